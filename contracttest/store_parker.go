package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// parkerClauses are about messages that are kept aside.
func parkerClauses[T any]() []storeClause[T] {
	return []storeClause[T]{
		{
			Clause: Clause{
				ID: "S31", Name: "parked messages", Capability: capabilityParker,
				Text: "parked messages are stored as given and in their order, by scope and order key, byte for byte; one that is there " +
					"already is left alone; positions grow and never come again; Unpark deletes what it names and nothing else",
			},
			check: parkedMessages[T],
		},
		{
			Clause: Clause{
				ID: "S31/crowd", Name: "several park at once", Capability: capabilityParker,
			},
			check: parkedByMany[T],
		},
	}
}

// parking is a handle that can park.
func parking[T any](s receipts.Store[T]) receipts.Parker {
	p, _ := s.(receipts.Parker) // the capability says so
	return p
}

func (e *storeEnv[T]) parked(key, uuid string) receipts.Parked {
	return receipts.Parked{
		Scope: e.scope, OrderKey: key, Handler: "handler", Topic: "topic", UUID: uuid, Metadata: map[string]string{"of": uuid},
		Payload: []byte("payload of " + uuid), At: at(0),
	}
}

func parkedMessages[T any](ctx context.Context, e *storeEnv[T]) error {
	a, b := parking(e.a), parking(e.b)
	var strangers []receipts.Parked
	for i, s := range strange() {
		p := e.parked("s", fmt.Sprintf("%d%s", i, cut(s)))
		p.Payload, p.Metadata, p.Topic, p.Handler = []byte(s), map[string]string{cut(s): s}, cut(s)+"t", cut(s)+"h"
		strangers = append(strangers, p)
	}
	other := e.parked("k", "elsewhere")
	other.Scope += "'"
	first := []receipts.Parked{e.parked("k", "1"), e.parked("K", "1"), e.parked("k ", "1"), e.parked("k", "2"), other}
	later := []receipts.Parked{e.parked("k", "3"), e.parked("k", "1"), e.parked("j", "1")} // one of them is there
	if err := errors.Join(a.Park(ctx, first), b.Park(ctx, later), a.Park(ctx, strangers), b.Park(ctx, first)); err != nil {
		return fmt.Errorf("Park: %w", err)
	}
	if err := e.parkedKeys(ctx, b, "k 3", "K 1", "k  1", "j 1", fmt.Sprintf("s %d", len(strangers))); err != nil {
		return err
	}
	if err := e.stats(ctx, receipts.Stats{Parked: 7 + len(strangers)}); err != nil {
		return err
	}
	listed, err := b.Parked(ctx, e.scope, "s", 0, 100)
	if err != nil || len(listed) != len(strangers) {
		return fmt.Errorf("Parked lists %d, want %d: %w", len(listed), len(strangers), err)
	}
	for i := range listed {
		if err := sameParked(listed[i], strangers[i]); err != nil {
			return fmt.Errorf("parked message number %d: %w", i, err)
		}
	}
	return e.unpark(ctx, a, b)
}

// parkedKeys compares the keys and how many messages each has.
func (e *storeEnv[T]) parkedKeys(ctx context.Context, p receipts.Parker, want ...string) error {
	keys, err := p.ParkedKeys(ctx, e.scope)
	if err != nil {
		return fmt.Errorf("ParkedKeys: %w", err)
	}
	var got []string
	for _, k := range keys {
		got = append(got, fmt.Sprintf("%s %d", k.OrderKey, k.Messages))
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("ParkedKeys lists %q, want %q", got, want)
	}
	return nil
}

func sameParked(got, want receipts.Parked) error {
	texts := [][2]string{
		{got.Scope, want.Scope},
		{got.OrderKey, want.OrderKey},
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

// unpark reads the messages of a key on from positions, deletes some, and parks again.
func (e *storeEnv[T]) unpark(ctx context.Context, a, b receipts.Parker) error {
	read := func(after int64, limit int, want ...string) ([]receipts.Parked, error) {
		list, err := b.Parked(ctx, e.scope, "k", after, limit)
		if err != nil {
			return nil, fmt.Errorf("Parked: %w", err)
		}
		var got []string
		for i, p := range list {
			got = append(got, p.UUID)
			if p.Position <= after || i > 0 && p.Position <= list[i-1].Position {
				return nil, fmt.Errorf("Parked lists position %d too early", p.Position)
			}
		}
		if !slices.Equal(got, want) {
			return nil, fmt.Errorf("Parked lists %q, want %q", got, want)
		}
		return list, nil
	}
	all, err := read(0, 9, "1", "2", "3")
	if err != nil {
		return err
	}
	if _, err := read(0, 2, "1", "2"); err != nil {
		return err
	}
	if _, err := read(all[0].Position, 9, "2", "3"); err != nil {
		return err
	}
	last := all[2].Position
	for range 2 { // the second time they are gone
		if err := a.Unpark(ctx, []int64{last, all[0].Position}); err != nil {
			return fmt.Errorf("Unpark: %w", err)
		}
	}
	if _, err := read(0, 9, "2"); err != nil {
		return err
	}
	if err := a.Park(ctx, []receipts.Parked{e.parked("k", "3")}); err != nil {
		return fmt.Errorf("Park: %w", err)
	}
	again, err := read(0, 9, "2", "3")
	if err != nil {
		return err
	}
	if again[1].Position <= last {
		return fmt.Errorf("position %d is used again", again[1].Position)
	}
	return e.parkedKeys(ctx, a, "K 1", "k  1", "k 2", "j 1", fmt.Sprintf("s %d", len(strange())))
}

// parkedByMany has two processes park messages of one key, each its own in order, and some that both bring, and bring twice.
func parkedByMany[T any](ctx context.Context, e *storeEnv[T]) error {
	const each, both = 20, 5
	errs := make(chan error, 2)
	for i, s := range []receipts.Store[T]{e.a, e.b} {
		go func() {
			var err error
			for n := range each {
				uuid, times := fmt.Sprintf("%d-%02d", i, n), 1
				if n < both {
					uuid, times = fmt.Sprintf("both-%02d", n), 2
				}
				for range times {
					err = errors.Join(err, e.persist(ctx, s, func() error { return parking(s).Park(ctx, []receipts.Parked{e.parked("k", uuid)}) }))
				}
			}
			errs <- err
		}()
	}
	if err := errors.Join(<-errs, <-errs); err != nil {
		return fmt.Errorf("Park: %w", err)
	}
	list, err := parking(e.a).Parked(ctx, e.scope, "k", 0, 1000)
	if err != nil {
		return fmt.Errorf("Parked: %w", err)
	}
	if want := 2*each - both; len(list) != want {
		return fmt.Errorf("%d messages are parked, want %d", len(list), want)
	}
	last := map[string]string{}
	for _, p := range list {
		who, n := cutLast(p.UUID)
		if n <= last[who] {
			return fmt.Errorf("%q is parked behind %s-%s", p.UUID, who, last[who])
		}
		last[who] = n
	}
	return nil
}

func cutLast(s string) (before, after string) {
	i := len(s) - 3
	return s[:i], s[i+1:]
}

// persist tries again while another transaction is in the way.
func (e *storeEnv[T]) persist(ctx context.Context, s receipts.Store[T], f func() error) error {
	for {
		err := f()
		if err == nil || ctx.Err() != nil || s.Classify(err) != receipts.ClassContention {
			return err
		}
	}
}
