package pipe_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/contracttest/pipe"
	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/sdk"
)

// scripted is a driver whose Send and Settle answer what the test says.
type scripted struct {
	sdk.Driver
	send   func(ctx context.Context, batch []sdk.Message) error
	settle func(batch []sdk.Settlement) error
	ds     []sdk.Delivery
}

func (s *scripted) Capabilities() sdk.Capabilities { return sdk.Capabilities{} }

func (s *scripted) Send(ctx context.Context, _ string, batch []sdk.Message) error {
	return s.send(ctx, batch)
}

func (s *scripted) Open(context.Context, sdk.Binding) (sdk.Source, error) {
	return &scriptedSource{s: s, closed: make(chan struct{})}, nil
}

type scriptedSource struct {
	s      *scripted
	closed chan struct{}
	given  bool
}

func (s *scriptedSource) Capabilities() sdk.Capabilities { return sdk.Capabilities{} }

func (s *scriptedSource) Receive(ctx context.Context, _ int) ([]sdk.Delivery, error) {
	if !s.given {
		s.given = true
		return s.s.ds, nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func (s *scriptedSource) Settle(_ context.Context, batch []sdk.Settlement) error {
	return s.s.settle(batch)
}

func (s *scriptedSource) Close(context.Context) error { return nil }

// connect puts a server in front of d and opens the child's driver over an in-process connection for each dial.
func connect(t *testing.T, d sdk.Driver, limit int) (*pipe.Driver, *pipe.Server) {
	t.Helper()
	server := pipe.NewServer(d, limit)
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx, l) }()
	child, err := pipe.Open(t.Context(), dialer(path), limit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := child.Close(context.Background()); err != nil {
			t.Error(err)
		}
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return child, server
}

func TestErrorsKeepTheirKind(t *testing.T) {
	odd := errors.New("something of the driver's own")
	tests := map[string]struct {
		err     error
		is      []error
		isNot   []error
		outcome sdk.Outcome
		text    string
	}{
		"plain":      {odd, nil, []error{sdk.ErrClosed}, sdk.OutcomeUnknown, "of the driver's own"},
		"closed":     {sdk.ErrClosed, []error{sdk.ErrClosed}, []error{sdk.ErrStaleToken}, sdk.OutcomeUnknown, ""},
		"deadline":   {context.DeadlineExceeded, []error{context.DeadlineExceeded}, []error{context.Canceled}, sdk.OutcomeUnknown, ""},
		"rejected":   {&sdk.OutcomeError{Kind: sdk.OutcomeRejected, Err: odd}, nil, nil, sdk.OutcomeRejected, "own"},
		"unroutable": {&sdk.OutcomeError{Kind: sdk.OutcomePermanent, Err: sdk.ErrUnroutable}, []error{sdk.ErrUnroutable}, nil, sdk.OutcomePermanent, ""},
		"joined":     {errors.Join(sdk.ErrTooLarge, sdk.ErrUnsupported), []error{sdk.ErrTooLarge, sdk.ErrUnsupported}, nil, sdk.OutcomeUnknown, ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			answer := tc.err
			child, _ := connect(t, &scripted{send: func(context.Context, []sdk.Message) error { return answer }}, 0)
			for _, batch := range []bool{false, true} {
				answer = tc.err
				if batch {
					answer = &sdk.BatchError{Entries: map[int]error{1: tc.err}}
				}
				errs := sdk.EntryErrors(child.Send(t.Context(), "t", make([]sdk.Message, 3)), 3)
				if batch == (errs[0] != nil) || errs[1] == nil {
					t.Fatalf("batch %t: entries %v", batch, errs)
				}
				got := errs[1]
				for _, want := range tc.is {
					if !errors.Is(got, want) {
						t.Errorf("batch %t: %v is not %v", batch, got, want)
					}
				}
				for _, other := range tc.isNot {
					if errors.Is(got, other) {
						t.Errorf("batch %t: %v is %v", batch, got, other)
					}
				}
				if o := sdk.OutcomeOf(got); o != tc.outcome {
					t.Errorf("batch %t: outcome %s, want %s", batch, o, tc.outcome)
				}
				if !strings.Contains(got.Error(), tc.text) {
					t.Errorf("batch %t: %q lacks %q", batch, got, tc.text)
				}
			}
		})
	}
}

func TestLargeBatchesAreSplitAndLargeAnswersToo(t *testing.T) {
	const limit, payload, n = 1 << 20, 100 << 10, 30
	var largest, sent int
	s := &scripted{send: func(_ context.Context, batch []sdk.Message) error {
		largest, sent = max(largest, len(batch)), sent+len(batch)
		return nil
	}}
	var batch []sdk.Message
	for i := range n {
		m := sdk.Message{ID: string(rune('A' + i)), Payload: bytes.Repeat([]byte{byte(i)}, payload)}
		batch = append(batch, m)
		s.ds = append(s.ds, sdk.Delivery{Message: m, Token: sdk.Token(m.ID)})
	}
	child, _ := connect(t, s, limit)
	if err := child.Send(t.Context(), "t", batch); err != nil {
		t.Fatal(err)
	}
	if sent != n || largest > limit/payload {
		t.Errorf("%d messages in batches of up to %d, want %d in smaller ones", sent, largest, n)
	}
	src, err := child.Open(t.Context(), sdk.Binding{Topic: "t", Group: "g"})
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < n; {
		got, err := src.Receive(t.Context(), n)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range got {
			if d.ID != batch[i].ID || !bytes.Equal(d.Payload, batch[i].Payload) {
				t.Fatalf("delivery %d is %s", i, d.ID)
			}
			i++
		}
	}
}

func TestTooLargeSendsNothing(t *testing.T) {
	child, _ := connect(t, &scripted{send: func(context.Context, []sdk.Message) error {
		t.Error("a batch with a payload that is too large was sent")
		return nil
	}}, 1<<20)
	err := child.Send(t.Context(), "t", []sdk.Message{{ID: "a"}, {ID: "b", Payload: make([]byte, 2<<20)}})
	errs := sdk.EntryErrors(err, 2)
	if sdk.OutcomeOf(errs[0]) != sdk.OutcomeRejected || sdk.OutcomeOf(errs[1]) != sdk.OutcomePermanent || !errors.Is(errs[1], sdk.ErrTooLarge) {
		t.Errorf("entries %v", errs)
	}
}

func TestOutcomeOfALostConnection(t *testing.T) {
	reached, hold := make(chan struct{}), make(chan struct{})
	defer close(hold)
	child, server := connect(t, &scripted{send: func(ctx context.Context, _ []sdk.Message) error {
		close(reached)
		select {
		case <-hold:
		case <-ctx.Done():
		}
		return nil
	}}, 0)
	answer := make(chan error, 1)
	go func() { answer <- child.Send(t.Context(), "t", make([]sdk.Message, 2)) }()
	<-reached
	server.Cut()
	for i, err := range sdk.EntryErrors(<-answer, 2) {
		if err == nil || sdk.OutcomeOf(err) != sdk.OutcomeUnknown {
			t.Errorf("entry %d: lost on the way gave %v, want outcome unknown", i, err)
		}
	}
}

func TestSendWithoutConnectionIsRejected(t *testing.T) {
	broken := errors.New("nobody listens")
	dial := func(context.Context) (io.ReadWriteCloser, error) { return nil, broken }
	if _, err := pipe.Open(t.Context(), dial, 0); !errors.Is(err, broken) {
		t.Errorf("Open gave %v, want the dial's error", err)
	}
	first := true
	near, far := net.Pipe()
	server := pipe.NewServer(&scripted{}, 0)
	served := make(chan error, 1)
	go func() { served <- server.ServeConn(context.Background(), far) }()
	child, err := pipe.Open(t.Context(), func(context.Context) (io.ReadWriteCloser, error) {
		if first {
			first = false
			return near, nil
		}
		return nil, broken
	}, 0)
	if err != nil {
		t.Fatal(err)
	}
	server.Cut()
	if err := <-served; err != nil {
		t.Error(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for { // until the child has noticed that the connection is gone, a Send may still leave
		err = child.Send(t.Context(), "t", make([]sdk.Message, 1))
		if errors.Is(err, broken) || time.Now().After(deadline) {
			break
		}
	}
	if entry := sdk.EntryErrors(err, 1)[0]; !errors.Is(entry, broken) || sdk.OutcomeOf(entry) != sdk.OutcomeRejected {
		t.Errorf("Send without a connection gave %v, want rejected", err)
	}
	if err := child.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestCancelledReceiveLosesNothing: the answer to a Receive that was given up goes to the next one.
func TestCancelledReceiveLosesNothing(t *testing.T) {
	p := newParent(t, memory.Options{})
	child, err := pipe.Open(t.Context(), dialer(p.path), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = child.Close(context.Background()) }()
	b := sdk.Binding{Topic: "t", Group: "g", Window: 4, Declare: true}
	if err := child.Prepare(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	src, err := child.Open(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	const n = 50
	got := map[string]int{}
	for i := range n {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%3)*time.Millisecond)
		_, err := src.Receive(ctx, 1) // nothing is there, so this one is given up
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Receive gave %v, want its context's error", err)
		}
		if err := child.Send(t.Context(), "t", []sdk.Message{{ID: string(rune('0' + i))}}); err != nil {
			t.Fatal(err)
		}
		var ds []sdk.Delivery
		for len(ds) == 0 {
			if ds, err = src.Receive(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
		}
		got[ds[0].ID]++
		if err := src.Settle(t.Context(), []sdk.Settlement{{Token: ds[0].Token, Verdict: sdk.Ack}}); err != nil {
			t.Fatal(err)
		}
	}
	for id, times := range got {
		if times != 1 {
			t.Errorf("message %q came %d times", id, times)
		}
	}
	if len(got) != n || p.broker.Pending("t", "g")+p.broker.Unsettled("t", "g") != 0 {
		t.Errorf("%d of %d messages came, %d are left", len(got), n, p.broker.Pending("t", "g"))
	}
}

func TestParentThatNeverReads(t *testing.T) {
	near, far := net.Pipe()
	defer func() { _ = far.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := pipe.Open(ctx, func(context.Context) (io.ReadWriteCloser, error) { return near, nil }, 0)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Open gave %v, want its context's error", err)
	}
}

// TestHostileFrames: whatever arrives, the connection ends with an error, its sources with it, and nothing panics.
func TestHostileFrames(t *testing.T) {
	frames := map[string][]byte{
		"empty frame":     {0, 0, 0, 0},
		"too large":       {0xff, 0xff, 0xff, 0xff, 1},
		"cut short":       {0, 0, 0, 9, 1, 2},
		"not gob":         append([]byte{0, 0, 0, 8}, "notagob!"...),
		"cut length":      {0, 0},
		"gob of no kind":  append(binary.BigEndian.AppendUint32(nil, 3), 2, 0xff, 0x80),
		"trailing garble": append([]byte{0, 0, 0, 3}, 1, 0, 0),
	}
	for name, frame := range frames {
		t.Run(name, func(t *testing.T) {
			near, far := net.Pipe()
			served := make(chan struct{})
			go func() {
				defer close(served)
				_ = pipe.NewServer(&scripted{}, 0).ServeConn(t.Context(), far)
			}()
			_, _ = near.Write(frame) // the other side may hang up in the middle
			_ = near.Close()
			select {
			case <-served:
			case <-time.After(10 * time.Second):
				t.Error("the server goes on")
			}
		})
	}
}
