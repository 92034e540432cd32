package wire_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/wire"
)

// echo is a server that sends back what it gets.
func echo(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	return l.Addr().String()
}

func dial(t *testing.T, p *wire.Proxy) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", p.Address())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.TCPConn)
}

// closed closes what a test has opened.
func closed(t *testing.T, c io.Closer) {
	t.Helper()
	assert.NoError(t, c.Close())
}

// say sends a word and reads it back.
func say(c net.Conn, word string) error {
	if _, err := io.WriteString(c, word); err != nil {
		return err
	}
	got := make([]byte, len(word))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if string(got) != word {
		return errors.New("got " + string(got))
	}
	return nil
}

// try is say on a connection that may be reset before it is there.
func try(t *testing.T, p *wire.Proxy, word string) error {
	t.Helper()
	c, err := net.Dial("tcp", p.Address())
	if err != nil {
		return err
	}
	defer closed(t, c)
	return say(c, word)
}

func TestWhatCannotWorkIsRefused(t *testing.T) {
	for _, opt := range []wire.Options{{}, {Upstream: "nowhere"}, {Upstream: "127.0.0.1:1", Protocol: 9}} {
		_, err := wire.Open(t.Context(), opt)
		require.Error(t, err, "%+v", opt)
	}
	p := wire.Test(t, wire.Options{Upstream: "127.0.0.1:1"})
	for _, r := range []wire.Rule{
		{},
		{Match: wire.Commit, Do: wire.Reset},
		{Match: wire.Commit, When: wire.Before},
		{Match: wire.Commit, When: 3, Do: wire.Reset},
		{Match: wire.Commit, When: wire.Before, Do: 9},
	} {
		require.Panics(t, func() { p.On(r) }, "%+v", r)
	}
}

// Whatever the protocol, all bytes arrive, and the end of one direction does not end the other.
func TestBytesArrive(t *testing.T) {
	p := wire.Test(t, wire.Options{Upstream: echo(t)})
	c := dial(t, p)
	sent := make([]byte, 8<<20)
	_, _ = rand.Read(sent)
	go func() {
		_, _ = c.Write(sent)
		_ = c.CloseWrite()
	}()
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	require.True(t, bytes.Equal(sent, got))
	require.Eventually(t, func() bool { return p.Connections() == 0 }, 10*time.Second, time.Millisecond)
}

// Large statements and large answers pass the readers of the protocols.
func TestLargeMessages(t *testing.T) {
	forEachClient(t, wire.Options{}, func(t *testing.T, c clientCase, all *client) {
		h := listen(all.Proxy)
		text := strings.Repeat("x", 3<<20)
		var got string
		require.NoError(t, all.through.QueryRowContext(t.Context(), "SELECT '"+text+"'").Scan(&got))
		require.True(t, got == text)
		kind := map[wire.Protocol]string{wire.Postgres: "Execute", wire.MySQL: "QUERY"}[c.protocol]
		if c.name == "postgres" {
			kind = "Query"
		}
		heard := h.statements(kind)
		require.NotEmpty(t, heard)
		assert.True(t, strings.HasPrefix(heard[len(heard)-1], kind+" SELECT 'xxx"))
		assert.Less(t, len(heard[len(heard)-1]), 20<<10, "of a long text the beginning is kept")
	})
}

// The round trip is longer by what was asked for; a batch pays for it once.
func TestRoundTrip(t *testing.T) {
	const delay = 60 * time.Millisecond
	forEachClient(t, wire.Options{RoundTrip: delay}, func(t *testing.T, _ clientCase, all *client) {
		conn, err := all.through.Conn(t.Context())
		require.NoError(t, err)
		defer closed(t, conn)
		begin := time.Now()
		for range 3 {
			_, err := conn.ExecContext(t.Context(), "INSERT INTO a VALUES (1)")
			require.NoError(t, err)
		}
		require.GreaterOrEqual(t, time.Since(begin), 3*delay)
		all.SetRoundTrip(0)
		_, err = conn.ExecContext(t.Context(), "INSERT INTO a VALUES (1)")
		require.NoError(t, err)
	})
}

// What is sent without waiting is not slowed down by the delay of what is before it: the first byte of a batch is late by
// the round trip, and the last one is not later by another.
func TestRoundTripOfABatch(t *testing.T) {
	const delay, messages = 500 * time.Millisecond, 20
	p := wire.Test(t, wire.Options{Upstream: echo(t), RoundTrip: delay})
	c := dial(t, p)
	begin, last := time.Now(), make(chan time.Time, 1)
	go func() {
		for n := range messages {
			if n == messages-1 {
				last <- time.Now()
			}
			_, _ = c.Write([]byte("x"))
			time.Sleep(time.Millisecond) // so that they are messages of their own
		}
	}()
	_, err := io.ReadFull(c, make([]byte, messages))
	require.NoError(t, err)
	require.Less(t, time.Since(begin), messages*delay/2, "each of them waited for the one before it")
	require.GreaterOrEqual(t, time.Since(<-last), delay, "the last one, too, is late by the round trip")
}

// Stalled, nothing passes; then everything does.
func TestStall(t *testing.T) {
	p := wire.Test(t, wire.Options{Upstream: echo(t)})
	c := dial(t, p)
	require.NoError(t, say(c, "one"))
	undo, other := p.Stall(), p.Stall()
	undo()
	undo() // once more does nothing
	require.NoError(t, c.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	require.ErrorIs(t, say(c, "two"), os.ErrDeadlineExceeded)
	late := dial(t, p)
	require.NoError(t, late.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	require.ErrorIs(t, say(late, "three"), os.ErrDeadlineExceeded)
	other()
	for conn, want := range map[*net.TCPConn]string{c: "two", late: "three"} {
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(20*time.Second)))
		got := make([]byte, len(want))
		_, err := io.ReadFull(conn, got)
		require.NoError(t, err)
		require.Equal(t, want, string(got))
	}
}

// Connections of a proxy that refuses are reset, those that are there go on.
func TestRefuse(t *testing.T) {
	p := wire.Test(t, wire.Options{Upstream: echo(t)})
	old := dial(t, p)
	require.NoError(t, say(old, "one"))
	undo := p.Refuse()
	require.Error(t, try(t, p, "two"))
	require.NoError(t, say(old, "three"))
	undo()
	require.NoError(t, say(dial(t, p), "four"))
}

// A server that is not there looks like one that does not take the connection.
func TestServerIsAway(t *testing.T) {
	p := wire.Test(t, wire.Options{Upstream: "127.0.0.1:1"})
	require.Error(t, try(t, p, "one"))
}

func TestCut(t *testing.T) {
	p := wire.Test(t, wire.Options{Upstream: echo(t)})
	one, two := dial(t, p), dial(t, p)
	require.NoError(t, say(one, "one"))
	require.NoError(t, say(two, "two"))
	require.Equal(t, 2, p.Cut())
	require.ErrorIs(t, say(one, "three"), syscall.ECONNRESET)
	require.Error(t, say(two, "three"))
	require.NoError(t, say(dial(t, p), "four"))
}

// Rules count: some pass first, then some act, then none.
func TestSkipAndTimes(t *testing.T) {
	p := wire.Test(t, wire.Options{Upstream: echo(t)})
	called := 0
	rule := p.On(wire.Rule{
		Match: wire.Sent(wire.Client), When: wire.Before, Skip: 2, Times: 3, Call: func(wire.Message) { called++ },
	})
	always := p.On(wire.Rule{Match: wire.Sent(wire.Client), When: wire.After, Times: -1, Call: func(wire.Message) {}})
	c := dial(t, p)
	for n, want := range []int{0, 0, 1, 2, 3, 3} {
		require.NoError(t, say(c, "word"))
		require.Equal(t, want, rule.Count(), "after word %d", n+1)
	}
	require.Equal(t, 3, called)
	require.Eventually(t, func() bool { return always.Count() == 6 }, 10*time.Second, time.Millisecond)
	always.Remove()
	always.Remove()
	require.NoError(t, say(c, "word"))
	require.Equal(t, 6, always.Count())
	p.On(wire.Rule{Match: wire.Sent(wire.Server), When: wire.Before, Do: wire.Finish})
	require.ErrorIs(t, say(c, "word"), io.EOF)
}

// The first rule that ends the connection is the last one that acts.
func TestTheFirstRuleWins(t *testing.T) {
	p := wire.Test(t, wire.Options{Upstream: echo(t)})
	first := p.On(wire.Rule{Match: wire.Sent(wire.Client), When: wire.Before, Call: func(wire.Message) {}})
	second := p.On(wire.Rule{Match: wire.Sent(wire.Client), When: wire.Before, Do: wire.Reset})
	third := p.On(wire.Rule{Match: wire.Sent(wire.Client), When: wire.Before, Do: wire.Swallow})
	require.Error(t, say(dial(t, p), "word"))
	require.Equal(t, []int{1, 1, 0}, []int{first.Count(), second.Count(), third.Count()})
}

// The proxy ends with its context, and Close afterwards waits for it.
func TestContextEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	p, err := wire.Open(ctx, wire.Options{Upstream: echo(t)})
	require.NoError(t, err)
	c := dial(t, p)
	require.NoError(t, say(c, "one"))
	rule := p.On(wire.Rule{Match: wire.Sent(wire.Client), When: wire.Before, Do: wire.Swallow})
	_, err = io.WriteString(c, "two")
	require.NoError(t, err)
	fired(t, rule)
	cancel()
	_, err = io.ReadAll(c)
	require.NoError(t, err)
	require.NoError(t, p.Close())
	require.NoError(t, p.Close())
	_, err = net.Dial("tcp", p.Address())
	require.Error(t, err)
}

// What is no message of the protocol ends its connection, and Close tells.
func TestWhatCannotBeRead(t *testing.T) {
	p, err := wire.Open(t.Context(), wire.Options{Upstream: echo(t), Protocol: wire.Postgres})
	require.NoError(t, err)
	require.Error(t, say(dial(t, p), strings.Repeat("\xff", 100)))
	require.ErrorContains(t, p.Close(), "connection 1: reading what the client sends")
}

// A client that only prefers TLS does without; one that wants it hears that there is none.
func TestTLSIsDeclined(t *testing.T) {
	all := connect(t, clientCases()["pgx"], wire.Options{})
	for mode, works := range map[string]bool{"prefer": true, "require": false} {
		config, err := pgx.ParseConfig(strings.Replace(all.d.At(all.Address()).URL(), "sslmode=disable", "sslmode="+mode, 1))
		require.NoError(t, err)
		conn, err := pgx.ConnectConfig(t.Context(), config)
		if !works {
			require.ErrorContains(t, err, "TLS")
			continue
		}
		require.NoError(t, err)
		require.NoError(t, conn.Close(t.Context()))
	}
}
