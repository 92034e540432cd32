package receipts_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

// hostileOutputs keep every byte of what handlers may produce.
func hostileOutputs() []receipts.Output {
	out := func(topic, uuid string, metadata map[string]string, payload []byte) receipts.Output {
		return receipts.Output{
			Scope: "billing\x00\xff", Key: []byte("k\x00\xff "), Topic: topic, UUID: uuid, Metadata: metadata, Payload: payload, At: noon,
		}
	}
	return []receipts.Output{
		out("out", "1", map[string]string{}, []byte{}),
		out("out\x00\xff", "\xff\x00 ", map[string]string{"": "", "a": "", "A": " ", "é": "😀<&>\u2028"}, []byte("\x00\xff\x00")),
		out("", "", map[string]string{"\xff": "\xfe\x00", "ok": "fine"}, []byte(strings.Repeat("x", 1<<20))),
		out("out", "1", map[string]string{"\ufffd": "\ufffd", "nul": "a\x00b"}, []byte("same uuid")),
	}
}

func TestOutputs(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := migrated(t, db)
		outputs := hostileOutputs()
		c := claim("k\x00\xff ")
		c.Scope = outputs[0].Scope
		tx := begin(t, s)
		claimed(t, tx, c)
		first, err := tx.AddOutputs(t.Context(), outputs[:2])
		must(t, err)
		if tx.Raw() == nil {
			t.Fatal("no transaction")
		}
		second, err := tx.AddOutputs(t.Context(), outputs[2:])
		must(t, err)
		if visible, err := s.Unsent(t.Context(), receipts.UnsentQuery{Limit: 9}); err != nil || len(visible) != 0 {
			t.Errorf("before the commit: %d outputs, %v", len(visible), err)
		}
		must(t, tx.Commit(t.Context()))
		stored := slices.Concat(first, second)
		for i := range stored {
			want := outputs[i]
			want.Nonce, want.Position = tx.Nonce(), i
			if !reflect.DeepEqual(stored[i], want) {
				t.Errorf("stored output %d is %+v, want %+v", i, stored[i], want)
			}
		}
		unsent, err := s.Unsent(t.Context(), receipts.UnsentQuery{Limit: 9})
		must(t, err)
		ofOne, err := s.Outputs(t.Context(), outputs[0].Scope, outputs[0].Key)
		must(t, err)
		if !reflect.DeepEqual(unsent, stored) || !reflect.DeepEqual(ofOne, stored) {
			t.Error("read back differently")
			for i := range min(len(unsent), len(ofOne)) {
				unsent[i].Payload, ofOne[i].Payload = nil, nil
				t.Logf("%+v, %+v", unsent[i], ofOne[i])
			}
		}
		must(t, s.MarkSent(t.Context(), []receipts.OutputRef{stored[1].OutputRef}, noon))
		unsent, err = s.Unsent(t.Context(), receipts.UnsentQuery{Limit: 9})
		must(t, err)
		ofOne, err = s.Outputs(t.Context(), outputs[0].Scope, outputs[0].Key)
		must(t, err)
		if len(unsent) != 3 || len(ofOne) != 4 || !ofOne[1].Sent || ofOne[0].Sent {
			t.Errorf("after marking one: %d unsent of %d, sent %t", len(unsent), len(ofOne), ofOne[1].Sent)
		}
	})
}

func TestUnsentSelects(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := migrated(t, db)
		store := func(key string, at time.Time, viaRouter bool) {
			tx := begin(t, s)
			claimed(t, tx, claim(key))
			o := receipts.Output{Scope: "billing", Key: []byte(key), Topic: "out", UUID: key, At: at, ViaRouter: viaRouter}
			_, err := tx.AddOutputs(t.Context(), []receipts.Output{o, o})
			must(t, err)
			must(t, tx.Commit(t.Context()))
		}
		store("late", noon.Add(2*time.Second), false)
		store("early", noon, false)
		store("middle", noon.Add(time.Second), false)
		store("router", noon, true)
		store("torn", noon, false)
		mustExec(t, db, `DELETE FROM penstock_markers WHERE nonce IN (SELECT nonce FROM penstock_receipts
			WHERE identity_key = CAST('torn' AS BLOB))`)
		list := func(q receipts.UnsentQuery) string {
			outputs, err := s.Unsent(t.Context(), q)
			must(t, err)
			var names []string
			for _, o := range outputs {
				names = append(names, fmt.Sprint(o.UUID, o.Position))
			}
			return strings.Join(names, " ")
		}
		for want, q := range map[string]receipts.UnsentQuery{
			"early0 early1 middle0 middle1 late0 late1": {Limit: 100},
			"early0 early1 middle0":                     {Limit: 3},
			"early0 early1":                             {Limit: 100, Before: noon.Add(time.Second)},
			"early0":                                    {Limit: 1, Prefix: "bill"},
			"":                                          {Limit: 100, Prefix: "ship"},
			"middle0 middle1":                           {Limit: 100, Scope: "billing", Key: []byte("middle")},
		} {
			if got := list(q); got != want {
				t.Errorf("%+v gives %q, want %q", q, got, want)
			}
		}
		if got := list(receipts.UnsentQuery{Limit: 100, Scope: "billing", Key: []byte("MIDDLE")}); got != "" {
			t.Errorf("a key of another case gives %q", got)
		}
		if _, err := s.Unsent(t.Context(), receipts.UnsentQuery{}); err == nil {
			t.Error("a limit of 0 was accepted")
		}
		stats, err := s.Stats(t.Context())
		must(t, err)
		if stats.Unsent != 6 || !stats.OldestUnsent.Equal(noon) || stats.Outputs != 10 || stats.Torn != 1 {
			t.Errorf("%+v", stats)
		}
		// Outputs without a receipt (at-least-once) are sent as well.
		tx := begin(t, s)
		_, err = tx.AddOutputs(t.Context(), []receipts.Output{{Scope: "x", Key: []byte("y"), UUID: "bare", At: noon.Add(-time.Hour)}})
		must(t, err)
		must(t, tx.Commit(t.Context()))
		if got := list(receipts.UnsentQuery{Limit: 1}); got != "bare0" {
			t.Errorf("first is %q, want the output without a receipt", got)
		}
	})
}

func TestMarkSent(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := migrated(t, db)
		const n = 2500 // three statements
		outputs := make([]receipts.Output, n)
		for i := range outputs {
			outputs[i] = receipts.Output{Scope: "s", Key: []byte("k"), Topic: "t", UUID: itoa(i), At: noon}
		}
		tx := begin(t, s)
		stored, err := tx.AddOutputs(t.Context(), outputs)
		must(t, err)
		must(t, tx.Commit(t.Context()))
		refs := []receipts.OutputRef{{Nonce: receipts.NewNonce(), Position: 3}, {Nonce: tx.Nonce(), Position: n}}
		for _, o := range stored[1:] {
			refs = append(refs, o.OutputRef)
		}
		must(t, s.MarkSent(t.Context(), nil, noon))
		must(t, s.MarkSent(t.Context(), refs, noon))
		must(t, s.MarkSent(t.Context(), refs[:5], noon.Add(time.Hour)))
		if unsent := count(t, db, "SELECT count(*) FROM penstock_outputs WHERE sent_at IS NULL"); unsent != 1 {
			t.Errorf("%d outputs are unsent, want 1", unsent)
		}
		if times := count(t, db, "SELECT count(DISTINCT sent_at) FROM penstock_outputs"); times != 1 {
			t.Error("marking twice moved the time")
		}
	})
}

func TestDeadLetters(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := migrated(t, db)
		letter := receipts.DeadLetter{
			Scope: "billing\x00\xff", Key: []byte("k\xff"), Fingerprint: []byte{0, 255}, Kind: receipts.KindConflict,
			Reason: "another payload", Consumer: "billing", Handler: "charge\xff", Topic: "orders\x00", UUID: "\xff",
			Metadata: map[string]string{"\xff": "a", "b": "\x00"}, Payload: []byte{0, 1, 255}, At: noon,
		}
		refused := letter
		refused.Key, refused.Fingerprint, refused.Payload, refused.Kind = []byte{}, []byte{}, []byte{}, receipts.KindRefused
		refused.At, refused.Metadata = noon.Add(-time.Hour), map[string]string{}
		refused.Reason = "bad \xff\x00 " + strings.Repeat("é", 2000)
		for range 2 { // a repeated one adds no row
			tx := begin(t, s)
			must(t, tx.Divert(t.Context(), []receipts.DeadLetter{letter, refused, letter}))
			must(t, tx.Commit(t.Context()))
		}
		other := letter
		other.Fingerprint = []byte("other")
		other.At = noon.Add(time.Hour)
		tx := begin(t, s)
		must(t, tx.Divert(t.Context(), []receipts.DeadLetter{other}))
		must(t, tx.Divert(t.Context(), nil))
		must(t, tx.Commit(t.Context()))
		letters, err := s.DeadLetters(t.Context(), 10)
		must(t, err)
		if len(letters) != 3 {
			t.Fatalf("%d dead letters, want 3", len(letters))
		}
		if r := letters[0].Reason; !utf8.ValidString(r) || strings.Contains(r, "\x00") || len(r) > 1100 {
			t.Errorf("the reason is not fit for people: %q", r)
		}
		refused.Reason = letters[0].Reason
		for i, want := range []receipts.DeadLetter{refused, letter, other} {
			if !reflect.DeepEqual(letters[i], want) {
				t.Errorf("dead letter %d is %+v, want %+v", i, letters[i], want)
			}
		}
		if one, err := s.DeadLetters(t.Context(), 1); err != nil || len(one) != 1 {
			t.Errorf("limit 1: %d, %v", len(one), err)
		}
		if _, err := s.DeadLetters(t.Context(), 0); err == nil {
			t.Error("a limit of 0 was accepted")
		}
		stats, err := s.Stats(t.Context())
		must(t, err)
		want := map[receipts.DeadLetterKind]int{receipts.KindConflict: 2, receipts.KindRefused: 1}
		if !reflect.DeepEqual(stats.DeadLetters, want) {
			t.Errorf("dead letters by kind: %v, want %v", stats.DeadLetters, want)
		}
		tx = begin(t, s)
		must(t, tx.Divert(t.Context(), []receipts.DeadLetter{{Scope: "rolled back"}}))
		must(t, tx.Rollback(t.Context()))
		if n := count(t, db, "SELECT count(*) FROM penstock_dead_letters"); n != 3 {
			t.Errorf("%d dead letters after a rollback, want 3", n)
		}
	})
}

// The zero time and times far away come back as they were.
func TestTimes(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		s := migrated(t, d.open(t, d.file(t), "synchronous=OFF"))
		for i, at := range []time.Time{{}, time.UnixMicro(-1), time.UnixMicro(0), noon, time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)} {
			c := claim(itoa(i))
			c.At = at
			tx := begin(t, s)
			claimed(t, tx, c)
			got := claimed(t, tx, c)[0].Receipt.At
			if !got.Equal(at) || got.Location() != time.UTC {
				t.Errorf("%v came back as %v", at, got)
			}
			must(t, tx.Rollback(t.Context()))
		}
	})
}
