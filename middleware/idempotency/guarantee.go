package idempotency

// claims tells whether the next transaction claims the receipt: always, except at-least-once, which has none, and
// at-most-once once its own transaction has claimed.
func (m *Middleware[T]) claims(p *pending[T]) bool {
	return m.cfg.Guarantee != AtLeastOnce && !p.claimed
}

// claimsAhead tells whether the claim commits alone, before the handler runs.
func (m *Middleware[T]) claimsAhead(p *pending[T]) bool {
	return m.cfg.Guarantee == AtMostOnce && !p.claimed
}

// whenUnknown tells what a lost answer to the COMMIT of the handler's transaction leads to. Only effectively-once has a
// claim in it that the database can be asked about. At-least-once comes again; at-most-once comes again as a replay.
func (m *Middleware[T]) whenUnknown() unknown {
	if m.cfg.Guarantee == EffectivelyOnce {
		return askAgain
	}
	return giveBack
}

// whenDiverting is the same for a transaction that diverts a message the handler gave up: a dead letter stored twice is
// one dead letter.
func (m *Middleware[T]) whenDiverting() unknown {
	if m.cfg.Guarantee == EffectivelyOnce {
		return askAgain
	}
	return runAgain
}
