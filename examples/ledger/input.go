package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
)

// input is one message to send: the payload as bytes, and its identity.
type input struct {
	id      string
	payload []byte
	transfer
}

// transfers makes n of them between accounts 1 to accounts. The same seed gives the same ones.
func transfers(n int, accounts int32, seed uint64) ([]input, error) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	made := make([]input, n)
	for i := range made {
		t := transfer{Debit: 1 + rnd.Int32N(accounts), Cents: 1 + rnd.Int64N(50_000)}
		t.Credit = 1 + (t.Debit+rnd.Int32N(accounts-1))%accounts
		payload, err := json.Marshal(t)
		if err != nil {
			return nil, fmt.Errorf("encode a transfer: %w", err)
		}
		made[i] = input{id: fmt.Sprintf("t-%06d", i+1), payload: payload, transfer: t}
	}
	return made, nil
}

// disturb makes of clean transfers what a bad network makes of them: one in three is there twice, the copy at once or up to
// 400 places later.
func disturb(clean []input, seed uint64) []input {
	rnd := rand.New(rand.NewPCG(seed, 2))
	type placed struct {
		input
		place int
	}
	sent := make([]placed, 0, len(clean)*4/3)
	for i, in := range clean {
		sent = append(sent, placed{in, i})
		if rnd.IntN(3) == 0 {
			sent = append(sent, placed{in, i + rnd.IntN(400)*rnd.IntN(2)})
		}
	}
	slices.SortStableFunc(sent, func(a, b placed) int { return a.place - b.place })
	inputs := make([]input, len(sent))
	for i, s := range sent {
		inputs[i] = s.input
	}
	return inputs
}

// expectation is what the database must hold in the end, whatever happened on the way.
type expectation struct {
	transfers map[string]transfer // by identity
	balances  map[int32]int64
}

// expect works out the expectation from the clean input. It knows nothing of the middleware.
func expect(clean []input, accounts int32) expectation {
	want := expectation{transfers: map[string]transfer{}, balances: map[int32]int64{}}
	for account := int32(1); account <= accounts; account++ {
		want.balances[account] = opening
	}
	for _, in := range clean {
		want.transfers[in.id] = in.transfer
		want.balances[in.Debit] -= in.Cents
		want.balances[in.Credit] += in.Cents
	}
	return want
}
