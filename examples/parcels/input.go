package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/penstock-mq/penstock/examples/parcels/scan"
)

// The events in the repository: what the generator writes for these two numbers.
const (
	keptEvents = 3000
	keptSeed   = 1
)

//go:embed events.jsonl
var eventsFile []byte

// input is one message to send: the payload as bytes, and its identity.
type input struct {
	id      string
	payload []byte
}

// events gives n scan events: those in the repository, or freshly generated ones.
func events(n int, seed uint64) ([]input, error) {
	lines := eventsFile
	if n != keptEvents || seed != keptSeed {
		var out bytes.Buffer
		if err := scan.Generate(&out, n, seed); err != nil {
			return nil, fmt.Errorf("generate %d events: %w", n, err)
		}
		lines = out.Bytes()
	}
	inputs := make([]input, 0, n)
	for line := range bytes.Lines(lines) {
		line = bytes.TrimRight(line, "\n")
		var head struct {
			ID string `json:"id"`
		}
		if err := json.Unmarshal(line, &head); err != nil {
			return nil, fmt.Errorf("read event %d: %w", len(inputs)+1, err)
		}
		inputs = append(inputs, input{id: head.ID, payload: line})
	}
	return inputs, nil
}

// disturb makes of clean events what a bad network makes of them: one in five is there twice, the copy up to 400 places
// later, and one in ten has changed places with another within 50.
func disturb(events []input, seed uint64) []input {
	rnd := rand.New(rand.NewPCG(seed, 2))
	type placed struct {
		input
		place int
	}
	sent := make([]placed, 0, len(events)*6/5)
	for i, e := range events {
		sent = append(sent, placed{e, i})
		if rnd.IntN(5) == 0 {
			sent = append(sent, placed{e, i + rnd.IntN(400)})
		}
		if rnd.IntN(10) == 0 {
			sent[len(sent)-1].place += rnd.IntN(50)
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
	sent int
	// valid holds, for each identity that has a valid payload, all its valid events. One of them is the effect: that of
	// the copy that is processed first.
	valid map[string][]scan.Event
	// conflicts counts the other valid payloads: each is one dead letter.
	conflicts int
	// refused counts the invalid payloads: each is one dead letter.
	refused int
}

// expect works out the expectation from what is sent. It knows nothing of the middleware.
func expect(sent []input) expectation {
	want := expectation{sent: len(sent), valid: map[string][]scan.Event{}}
	seen := map[string]bool{}
	for _, in := range sent {
		if seen[string(in.payload)] { // the payload contains the id
			continue
		}
		seen[string(in.payload)] = true
		e, err := scan.Parse(in.payload)
		if err != nil {
			want.refused++
			continue
		}
		if len(want.valid[in.id]) > 0 {
			want.conflicts++
		}
		want.valid[in.id] = append(want.valid[in.id], e)
	}
	return want
}
