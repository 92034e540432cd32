package contracttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// storedClauses are about outputs, dead letters and counts.
func storedClauses[T any]() []storeClause[T] {
	return []storeClause[T]{
		{
			Clause: Clause{
				ID: "S22", Name: "outputs as they were given",
				Text: "outputs are stored byte for byte, under this transaction's nonce, at rising positions over several calls, and listed " +
					"in that order for their receipt and no other",
			},
			check: outputsStored[T],
		},
		{
			Clause: Clause{
				ID: "S23", Name: "unsent outputs",
				Text: "Unsent lists what is not marked as sent, oldest first, as the query asks, without what goes through the router; " +
					"MarkSent marks what it names and nothing else, and again it is nil",
			},
			check: unsentListed[T],
		},
		{
			Clause: Clause{
				ID: "S24", Name: "dead letters",
				Text: "dead letters are stored as given and listed oldest first; one that is there already, by scope, key and fingerprint, " +
					"is left alone, also where two transactions store it at once, and those stored with it are there",
			},
			check: lettersStored[T],
		},
		{
			Clause: Clause{
				ID: "S25", Name: "counts",
				Text: "Stats counts what is there: whole receipts by state, torn ones apart, outputs, unsent ones, dead letters by kind",
			},
			check: countsAll[T],
		},
	}
}

// output is one of a name, n seconds after the first.
func (e *storeEnv[T]) output(name string, n int) receipts.Output {
	return receipts.Output{
		Scope: e.scope, Key: []byte(name), Topic: "topic of " + name, UUID: fmt.Sprintf("%s-%d", name, n),
		Metadata: map[string]string{"name": name}, Payload: []byte("output of " + name), At: at(n),
	}
}

// letter is a name's dead letter with one fingerprint.
func (e *storeEnv[T]) letter(name, fingerprint string) receipts.DeadLetter {
	return receipts.DeadLetter{
		Scope: e.scope, Key: []byte(name), Fingerprint: []byte(fingerprint), Kind: receipts.KindConflict, Reason: "it says so",
		Consumer: "consumer", Handler: "handler", Topic: "topic", UUID: "uuid of " + name, Metadata: map[string]string{"name": name},
		Payload: []byte("payload of " + name), At: at(0),
	}
}

// strange are texts that databases like to change.
func strange() []string {
	return []string{"", " ", "a ", "\x00", "a\x00b", "\xff\xfe", "é", "e\u0301", "😀", `\'"%_`, "\r\n", string(bytes.Repeat([]byte{0, 255}, 40_000))}
}

func outputsStored[T any](ctx context.Context, e *storeEnv[T]) error {
	var given []receipts.Output
	for i, s := range strange() {
		o := e.output("k", 0)
		o.Topic, o.UUID, o.Payload = cut(s)+"topic", cut(s), []byte(s)
		o.Metadata = map[string]string{cut(s): s, "plain": "value"}
		o.ViaRouter = i%2 == 1
		given = append(given, o)
	}
	other := e.output("K", 0) // bytes, here too
	tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, "k", "K")
	if err != nil {
		return err
	}
	var stored []receipts.Output
	for _, call := range [][]receipts.Output{given[:1], given[1:4], {other}, given[4:]} {
		back, err := tx.AddOutputs(ctx, call)
		if err != nil {
			return fmt.Errorf("AddOutputs: %w", err)
		}
		if len(back) != len(call) {
			return fmt.Errorf("AddOutputs of %d gave %d", len(call), len(back))
		}
		stored = append(stored, back...)
	}
	if err := numberedOutputs(stored, tx.Nonce()); err != nil {
		return err
	}
	stored = slices.DeleteFunc(stored, func(o receipts.Output) bool { return string(o.Key) == "K" })
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("Commit: %w", err)
	}
	listed, err := e.b.Outputs(ctx, e.scope, []byte("k"))
	if err != nil {
		return fmt.Errorf("Outputs: %w", err)
	}
	if len(listed) != len(given) {
		return fmt.Errorf("Outputs lists %d, want %d", len(listed), len(given))
	}
	for i := range listed {
		want := given[i]
		want.OutputRef = stored[i].OutputRef
		if err := sameOutput(listed[i], want); err != nil {
			return fmt.Errorf("output number %d: %w", i, err)
		}
	}
	return nil
}

// numberedOutputs wants the transaction's nonce, and positions that rise.
func numberedOutputs(stored []receipts.Output, nonce receipts.Nonce) error {
	for i, o := range stored {
		if o.Nonce != nonce {
			return fmt.Errorf("an output got nonce %s, want %s", o.Nonce, nonce)
		}
		if i > 0 && o.Position <= stored[i-1].Position {
			return fmt.Errorf("an output got position %d after %d", o.Position, stored[i-1].Position)
		}
	}
	return nil
}

// sameOutput compares what is listed with what was given.
func sameOutput(got, want receipts.Output) error {
	switch {
	case got.OutputRef != want.OutputRef:
		return fmt.Errorf("it is named %v, want %v", got.OutputRef, want.OutputRef)
	case got.Scope != want.Scope || !bytes.Equal(got.Key, want.Key):
		return fmt.Errorf("it is of %q, want %q", got.Key, want.Key)
	case got.Topic != want.Topic:
		return fmt.Errorf("topic %q, want %q", got.Topic, want.Topic)
	case got.UUID != want.UUID:
		return fmt.Errorf("UUID %q, want %q", got.UUID, want.UUID)
	case !bytes.Equal(got.Payload, want.Payload):
		return fmt.Errorf("a payload of %d bytes is not the one of %d that was given", len(got.Payload), len(want.Payload))
	case !maps.Equal(got.Metadata, want.Metadata):
		return errors.New("the metadata is not what was given")
	case !got.At.Equal(want.At) || got.ViaRouter != want.ViaRouter || got.Sent != want.Sent:
		return fmt.Errorf("time %s, via router %t, sent %t; want %s, %t, %t", got.At, got.ViaRouter, got.Sent, want.At, want.ViaRouter, want.Sent)
	}
	return nil
}

// unsentListed commits outputs of several receipts, in time, and asks for them.
func unsentListed[T any](ctx context.Context, e *storeEnv[T]) error {
	refs := map[string]receipts.OutputRef{}
	for i, name := range []string{"a", "b", "c"} {
		_, err := e.commits(ctx, e.a, []string{name}, func(tx receipts.Tx[T]) error {
			router := e.output(name, i)
			router.ViaRouter, router.UUID = true, "through the router"
			second := e.output(name, i)
			second.UUID += "'"
			stored, err := tx.AddOutputs(ctx, []receipts.Output{e.output(name, i), router, second})
			if err != nil {
				return fmt.Errorf("AddOutputs: %w", err)
			}
			refs[stored[0].UUID], refs[stored[2].UUID] = stored[0].OutputRef, stored[2].OutputRef
			return nil
		})
		if err != nil {
			return err
		}
	}
	if err := e.unsentQueries(ctx); err != nil {
		return err
	}
	if err := e.b.MarkSent(ctx, []receipts.OutputRef{refs["b-1"], {Nonce: receipts.NewNonce()}}, at(100)); err != nil {
		return fmt.Errorf("MarkSent: %w", err)
	}
	if err := e.unsent(ctx, receipts.UnsentQuery{Limit: 9}, "a-0", "a-0'", "b-1'", "c-2", "c-2'"); err != nil {
		return fmt.Errorf("after marking one of two: %w", err)
	}
	all := slices.Collect(maps.Values(refs))
	for range 2 {
		if err := e.a.MarkSent(ctx, all, at(101)); err != nil {
			return fmt.Errorf("MarkSent: %w", err)
		}
	}
	if err := errors.Join(e.unsent(ctx, receipts.UnsentQuery{Limit: 9}), e.stats(ctx, receipts.Stats{Done: 3, Outputs: 9})); err != nil {
		return err
	}
	listed, err := e.b.Outputs(ctx, e.scope, []byte("b"))
	if err != nil || len(listed) != 3 {
		return fmt.Errorf("Outputs lists %d, want 3: %w", len(listed), err)
	}
	if !listed[0].Sent || listed[1].Sent || !listed[2].Sent {
		return errors.New("Outputs does not tell which are sent")
	}
	return nil
}

func (e *storeEnv[T]) unsentQueries(ctx context.Context) error {
	tests := []struct {
		q    receipts.UnsentQuery
		want []string
	}{
		{receipts.UnsentQuery{Limit: 9}, []string{"a-0", "a-0'", "b-1", "b-1'", "c-2", "c-2'"}},
		{receipts.UnsentQuery{Limit: 3}, []string{"a-0", "a-0'", "b-1"}},
		{receipts.UnsentQuery{Limit: 9, Before: at(1)}, []string{"a-0", "a-0'"}},
		{receipts.UnsentQuery{Limit: 9, Prefix: e.scope}, []string{"a-0", "a-0'", "b-1", "b-1'", "c-2", "c-2'"}},
		{receipts.UnsentQuery{Limit: 9, Prefix: e.scope[:3]}, []string{"a-0", "a-0'", "b-1", "b-1'", "c-2", "c-2'"}},
		{receipts.UnsentQuery{Limit: 9, Prefix: e.scope + "x"}, nil},
		{receipts.UnsentQuery{Limit: 9, Prefix: "%"}, nil},
		{receipts.UnsentQuery{Limit: 9, Prefix: "S"}, nil},
		{receipts.UnsentQuery{Limit: 9, Scope: e.scope, Key: []byte("b")}, []string{"b-1", "b-1'"}},
		{receipts.UnsentQuery{Limit: 9, Scope: e.scope, Key: []byte("B")}, nil},
		{receipts.UnsentQuery{Limit: 9, Scope: e.scope + " ", Key: []byte("b")}, nil},
	}
	for _, test := range tests {
		if err := e.unsent(ctx, test.q, test.want...); err != nil {
			return fmt.Errorf("%+v: %w", test.q, err)
		}
	}
	return nil
}

// unsent compares the UUIDs of what Unsent lists.
func (e *storeEnv[T]) unsent(ctx context.Context, q receipts.UnsentQuery, want ...string) error {
	outputs, err := e.b.Unsent(ctx, q)
	if err != nil {
		return fmt.Errorf("Unsent: %w", err)
	}
	var got []string
	for _, o := range outputs {
		got = append(got, o.UUID)
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("Unsent lists %q, want %q", got, want)
	}
	return nil
}

func lettersStored[T any](ctx context.Context, e *storeEnv[T]) error {
	var given []receipts.DeadLetter
	for i, s := range strange() {
		l := e.letter(cut(s), "1")
		l.Consumer, l.Handler, l.Topic, l.UUID, l.Payload = cut(s)+"c", cut(s)+"h", cut(s)+"t", cut(s), []byte(s)
		l.Metadata, l.At, l.Kind = map[string]string{cut(s): s}, at(i), receipts.KindRefused
		given = append(given, l)
	}
	given = append(given, e.letter("a", "1"), e.letter("a", "2"), e.letter("A", "1"))
	for i := range given[len(strange()):] {
		given[len(strange())+i].At = at(50 + i)
	}
	for _, s := range []receipts.Store[T]{e.a, e.b} {
		_, err := e.commits(ctx, s, nil, func(tx receipts.Tx[T]) error {
			again := e.letter("a", "1")
			again.Reason, again.At = "another", at(99)
			if err := tx.Divert(ctx, given); err != nil {
				return fmt.Errorf("Divert: %w", err)
			}
			return tx.Divert(ctx, []receipts.DeadLetter{again}) // in the same transaction
		})
		if err != nil {
			return err
		}
	}
	if err := e.letters(ctx, 100, given); err != nil {
		return err
	}
	if err := e.letters(ctx, 2, given[:2]); err != nil {
		return err
	}
	return errors.Join(e.letterByTwo(ctx), e.lettersAmong(ctx))
}

// letters compares what DeadLetters lists.
func (e *storeEnv[T]) letters(ctx context.Context, limit int, want []receipts.DeadLetter) error {
	got, err := e.b.DeadLetters(ctx, limit)
	if err != nil {
		return fmt.Errorf("DeadLetters: %w", err)
	}
	if len(got) != len(want) {
		return fmt.Errorf("DeadLetters lists %d, want %d", len(got), len(want))
	}
	for i := range want {
		if err := sameLetter(got[i], want[i]); err != nil {
			return fmt.Errorf("dead letter number %d: %w", i, err)
		}
	}
	return nil
}

func sameLetter(got, want receipts.DeadLetter) error {
	texts := [][2]string{
		{got.Scope, want.Scope},
		{string(got.Key), string(want.Key)},
		{string(got.Fingerprint), string(want.Fingerprint)},
		{string(got.Kind), string(want.Kind)},
		{got.Reason, want.Reason},
		{got.Consumer, want.Consumer},
		{got.Handler, want.Handler},
		{got.Topic, want.Topic},
		{got.UUID, want.UUID},
		{string(got.Payload), string(want.Payload)},
		{got.At.String(), want.At.String()},
	}
	for _, t := range texts {
		if t[0] != t[1] {
			return fmt.Errorf("%q, want %q", cut(t[0]), cut(t[1]))
		}
	}
	if !maps.Equal(got.Metadata, want.Metadata) {
		return errors.New("the metadata is not what was given")
	}
	return nil
}

// letterByTwo has two transactions store the same dead letter at once. The second one may be told to try again.
func (e *storeEnv[T]) letterByTwo(ctx context.Context) error {
	if !e.lanes() {
		return nil
	}
	before, err := e.look.Store.Stats(ctx)
	if err != nil {
		return fmt.Errorf("Stats: %w", err)
	}
	l := e.letter("by two", "1")
	first, err := e.begin(ctx, e.a, receipts.TxOptions{})
	if err != nil {
		return err
	}
	if err := first.Divert(ctx, []receipts.DeadLetter{l}); err != nil {
		return fmt.Errorf("Divert: %w", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := e.commits(ctx, e.b, nil, func(tx receipts.Tx[T]) error { return tx.Divert(ctx, []receipts.DeadLetter{l}) })
		done <- err
	}()
	err = errors.Join(pause(ctx, shortWait), first.Commit(ctx))
	if second := <-done; second != nil && e.b.Classify(second) != receipts.ClassContention {
		err = errors.Join(err, fmt.Errorf("the second one: %w", second))
	}
	if err != nil {
		return err
	}
	after, err := e.look.Store.Stats(ctx)
	if err != nil {
		return fmt.Errorf("Stats: %w", err)
	}
	if n := after.DeadLetters[receipts.KindConflict] - before.DeadLetters[receipts.KindConflict]; n != 1 {
		return fmt.Errorf("a dead letter that two transactions store at once is there %d times", n)
	}
	return nil
}

// lettersAmong has a transaction store several dead letters, the first of which it has to wait for, and the second of which is
// stored by somebody else meanwhile: those of which it is the only one are there in the end, and so are everybody's.
func (e *storeEnv[T]) lettersAmong(ctx context.Context) error {
	if !e.lanes() {
		return nil
	}
	before, err := e.look.Store.Stats(ctx)
	if err != nil {
		return fmt.Errorf("Stats: %w", err)
	}
	divert := func(s receipts.Store[T], names ...string) error {
		var letters []receipts.DeadLetter
		for _, name := range names {
			letters = append(letters, e.letter("among "+name, "1"))
		}
		return e.persist(ctx, s, func() error {
			_, err := e.commits(ctx, s, nil, func(tx receipts.Tx[T]) error { return tx.Divert(ctx, letters) })
			return err
		})
	}
	first, err := e.begin(ctx, e.a, receipts.TxOptions{})
	if err != nil {
		return err
	}
	if err := first.Divert(ctx, []receipts.DeadLetter{e.letter("among w", "1")}); err != nil {
		return errors.Join(fmt.Errorf("Divert: %w", err), first.Rollback(ctx))
	}
	done := make(chan error, 1)
	go func() { done <- divert(e.b, "w", "x", "y") }()
	err = errors.Join(pause(ctx, shortWait), divert(e.a, "x"), divert(e.a, "z"), first.Commit(ctx))
	if err := errors.Join(err, <-done); err != nil {
		return err
	}
	after, err := e.look.Store.Stats(ctx)
	if err != nil {
		return fmt.Errorf("Stats: %w", err)
	}
	if n := after.DeadLetters[receipts.KindConflict] - before.DeadLetters[receipts.KindConflict]; n != 4 {
		return fmt.Errorf("four dead letters that three transactions store at once are there %d times", n)
	}
	return nil
}

func countsAll[T any](ctx context.Context, e *storeEnv[T]) error {
	_, err := e.commits(ctx, e.a, []string{"a", "b"}, func(tx receipts.Tx[T]) error {
		diverted := e.claim("c")
		diverted.State = receipts.StateDiverted
		if _, err := tx.Claim(ctx, []receipts.Claim{diverted}); err != nil {
			return fmt.Errorf("Claim: %w", err)
		}
		router := e.output("a", 3)
		router.ViaRouter = true
		if _, err := tx.AddOutputs(ctx, []receipts.Output{router, e.output("a", 5), e.output("b", 4)}); err != nil {
			return fmt.Errorf("AddOutputs: %w", err)
		}
		permanent, torn := e.letter("c", "1"), e.letter("d", "1")
		permanent.Kind, torn.Kind = receipts.KindPermanent, receipts.KindTorn
		return tx.Divert(ctx, []receipts.DeadLetter{permanent, torn, e.letter("e", "1"), e.letter("e", "2")})
	})
	if err != nil {
		return err
	}
	want := receipts.Stats{
		Done: 2, Diverted: 1, Outputs: 3, Unsent: 2, OldestUnsent: at(4),
		DeadLetters: map[receipts.DeadLetterKind]int{receipts.KindPermanent: 1, receipts.KindTorn: 1, receipts.KindConflict: 2},
	}
	if err := statsOf(ctx, e.b, want); err != nil || e.s.End == nil {
		return err
	}
	return e.tornCounted(ctx, want)
}

// tornCounted has a handler commit, where the store cannot refuse that, and looks for the torn receipts.
func (e *storeEnv[T]) tornCounted(ctx context.Context, want receipts.Stats) error {
	tx, err := e.beginClaimed(ctx, e.a, receipts.TxOptions{}, "torn", "torn too")
	if err != nil {
		return err
	}
	if _, err := tx.AddOutputs(ctx, []receipts.Output{e.output("torn", 1)}); err != nil {
		return fmt.Errorf("AddOutputs: %w", err)
	}
	_ = e.s.End(ctx, tx.Raw(), EndCommit)
	if err := isError("Commit", tx.Commit(ctx), receipts.ErrTxEnded); err != nil {
		return err
	}
	results, err := e.ask(ctx, "torn")
	if err != nil {
		return err
	}
	if results[0].Status == receipts.ClaimTorn {
		want.Torn, want.Outputs = 2, want.Outputs+1
	}
	return statsOf(ctx, e.b, want)
}
