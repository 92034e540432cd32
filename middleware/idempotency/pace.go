package idempotency

import "time"

// pace finds how many transactions of one handler at a time get most done. That cannot be told in advance: where two cores do
// the work of client and database, eight lanes did 0.7 of what three did; where an answer is a millisecond away, or a handler
// waits for something else, each further one adds as much as the first. So it tries one step more, or less, and stays with what
// did better (docs/adr/0014). Its methods want the lock of the lanes held.
type pace struct {
	most  int // as many lanes as there are
	lanes int // to be used now; 0: all, because nothing is known of the handler
	base  int // the best so far; others are on trial
	rate  float64
	down  bool // the next trial is of fewer
	calm  int  // how many trials in a row found nothing better
	wait  int  // measurements until the next trial

	// The measurement under way: since when, and what ended in it, busy while as many ran as may. skip is how many transactions it
	// does not count because they began under another number.
	since, last             time.Time
	batches, messages, busy int
	skip                    int
}

const (
	// fewLanes is where the search begins, unless the first message's handler took slowHandler: then it begins with all.
	fewLanes    = 4
	slowHandler = 5 * time.Millisecond
	// paceBatches is how many transactions of each lane are measured together, and paceTime how long at least.
	// Nothing for paceGap is a pause, which says nothing of the lanes.
	paceBatches = 8
	paceTime    = 50 * time.Millisecond
	paceGap     = 200 * time.Millisecond
	// moreLanes have to do so much better, fewerLanes may do so much worse: connections are worth something, too.
	moreLanes, fewerLanes = 1.1, 0.97
	// calmMost bounds how seldom trials become: after 2^calmMost measurements. With slow handlers they begin as seldom as after
	// slowCalm that failed.
	calmMost = 6
	slowCalm = 3
)

// now is how many transactions may run at a time.
func (p *pace) now() int {
	if p.lanes == 0 {
		return p.most
	}
	return p.lanes
}

// ended notes that a transaction of n messages ends as one of running. mean is how long a handler takes.
func (p *pace) ended(n, running int, mean time.Duration, now time.Time) {
	paused := now.Sub(p.last) > paceGap
	p.last = now
	switch {
	case p.most < 2:
		return
	case p.lanes == 0:
		if p.base = min(fewLanes, p.most); mean >= slowHandler { // fewer are hardly better
			p.base, p.calm, p.wait = p.most, slowCalm, 1<<slowCalm
		}
		p.use(p.base)
		return
	case p.skip > 0:
		p.skip--
		return
	case p.since.IsZero() || paused:
		p.measure()
		p.since = now
		return
	}
	p.batches++
	p.messages += n
	if running >= p.lanes {
		p.busy++
	}
	took := now.Sub(p.since)
	switch {
	case p.batches < paceBatches*p.lanes || took < paceTime:
	case p.busy < p.batches*3/4: // something else is scarce: messages, say
		p.measure()
	default:
		p.measured(float64(p.messages) / took.Seconds())
	}
}

// use changes the number of lanes.
func (p *pace) use(lanes int) {
	p.skip, p.lanes = max(p.lanes, lanes), lanes
	p.measure()
}

func (p *pace) measure() { p.batches, p.messages, p.busy, p.since = 0, 0, 0, time.Time{} }

// measured ends a measurement: a trial is decided, or the next one begins.
func (p *pace) measured(rate float64) {
	switch {
	case p.lanes != p.base:
		p.decide(rate)
	case p.wait > 0:
		p.wait--
		p.rate += (rate - p.rate) / 2
		p.measure()
	default:
		p.rate = rate
		p.try()
	}
}

// try puts the next number on trial.
func (p *pace) try() {
	next := p.next()
	if next == p.base {
		p.down = !p.down
		next = p.next()
	}
	p.use(next)
}

// next is one step from the base.
func (p *pace) next() int {
	if p.down {
		return max(p.base-max(1, p.base/3), 1)
	}
	return min(p.base+max(1, p.base/2), p.most)
}

// decide stays with what was on trial, or goes back.
func (p *pace) decide(rate float64) {
	want := moreLanes
	if p.down {
		want = fewerLanes
	}
	if rate >= want*p.rate {
		p.base, p.rate, p.calm, p.wait = p.lanes, rate, 0, 0
		p.measure()
		return
	}
	p.down = !p.down
	p.wait = 1 << p.calm
	p.calm = min(p.calm+1, calmMost)
	p.use(p.base)
}
