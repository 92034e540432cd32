package stage

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// childVariable makes the test binary the child of a test.
const childVariable = "PENSTOCK_STAGE_CHILD"

// part is what the child has to play.
type part struct {
	Say  string
	Fail string
	Deaf bool
	Kill Kill
}

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		var p part
		if err := Consumer(childVariable, &p, p.hear, p.play); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func (p *part) hear(line []byte) { Line(os.Stdout, fmt.Append(nil, "heard ", string(line))) }

func (p *part) play(ctx context.Context) error {
	Line(os.Stdout, []byte(p.Say))
	if p.Fail != "" {
		return fmt.Errorf("told to fail: %s", p.Fail)
	}
	if p.Kill.Point != "" {
		death := NewTrigger(p.Kill, func(last LastWords) { Line(os.Stdout, fmt.Append(nil, "open: ", last.Open)) })
		for n := 1; ; n++ {
			death.Pass("another point", 1, LastWords{})
			death.Pass(p.Kill.Point, 1, LastWords{Open: n})
		}
	}
	<-ctx.Done()
	if p.Deaf {
		select {}
	}
	Line(os.Stdout, []byte("asked to end"))
	return nil
}

// said collects a child's lines.
type said struct {
	mu    sync.Mutex
	lines []string
	first chan struct{}
}

func newSaid() *said { return &said{first: make(chan struct{})} }

func (s *said) line(text []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lines = append(s.lines, string(text)); len(s.lines) == 1 {
		close(s.first)
	}
}

func start(t *testing.T, p part) (*Child, *said) {
	t.Helper()
	s := newSaid()
	c, err := Start(childVariable, p, s.line)
	require.NoError(t, err)
	t.Cleanup(c.Kill)
	return c, s
}

func TestAChildThatIsStopped(t *testing.T) {
	t.Parallel()
	c, s := start(t, part{Say: "hello"})
	<-s.first
	require.NoError(t, c.Tell(map[string]int{"a": 1}))
	require.NoError(t, c.Stop(time.Minute))
	require.NoError(t, c.Ended())
	assert.False(t, c.Killed())
	assert.Equal(t, []string{"hello", `heard {"a":1}`, "asked to end"}, s.lines)
	require.ErrorContains(t, c.Tell(1), "tell the consumer")
	require.ErrorContains(t, c.Tell(func() {}), "encode")
	c.Kill() // nothing is left to do
	assert.False(t, c.Killed())
}

func TestAChildThatFails(t *testing.T) {
	t.Parallel()
	c, _ := start(t, part{Fail: "no such thing"})
	<-c.Exited()
	require.ErrorContains(t, c.Ended(), "told to fail: no such thing")
	require.ErrorContains(t, c.Stop(time.Minute), "told to fail")
	assert.False(t, c.Killed())
}

func TestAChildThatDoesNotHear(t *testing.T) {
	t.Parallel()
	c, s := start(t, part{Deaf: true})
	<-s.first
	require.ErrorContains(t, c.Stop(10*time.Millisecond), "did not end within 10ms")
	assert.True(t, c.Killed())
}

func TestAChildThatKillsItself(t *testing.T) {
	t.Parallel()
	c, s := start(t, part{Say: "hello", Kill: Kill{Point: BeforeCommit, After: 3}})
	<-c.Exited()
	assert.True(t, c.Killed())
	require.Error(t, c.Ended())
	assert.Equal(t, []string{"hello", "open: 3"}, s.lines, "its last words are read")
}

func TestAChildMustBeToldWhatToDo(t *testing.T) {
	var p part
	require.ErrorContains(t, Consumer(childVariable, &p, nil, nil), "not set")
	t.Setenv(childVariable, "{")
	require.ErrorContains(t, Consumer(childVariable, &p, nil, nil), childVariable)
	_, err := Start(childVariable, func() {}, nil)
	require.ErrorContains(t, err, "encode")
}

func TestOfLastWordsTheFirstAreKept(t *testing.T) {
	t.Parallel()
	var b lockedBuffer
	n, err := io.Copy(&b, strings.NewReader(strings.Repeat("x", 10<<10)))
	require.NoError(t, err)
	assert.EqualValues(t, 10<<10, n)
	assert.Len(t, b.String(), 8<<10)
	assert.True(t, bytes.HasPrefix([]byte(b.String()), []byte("xxx")))
}

func TestPlan(t *testing.T) {
	t.Parallel()
	kills := Plan([]Point{BeforeCommit, AtRandom}, 5, 1000, 7)
	assert.Equal(t, kills, Plan([]Point{BeforeCommit, AtRandom}, 5, 1000, 7), "the same seed, the same plan")
	assert.NotEqual(t, kills, Plan([]Point{BeforeCommit, AtRandom}, 5, 1000, 8))
	total := 0
	for i, k := range kills {
		assert.Equal(t, []Point{BeforeCommit, AtRandom}[i%2], k.Point)
		total += k.After
	}
	assert.LessOrEqual(t, total, 600, "all happen before the work is done")
	assert.Empty(t, Plan([]Point{AtRandom}, 0, 10, 1))
}
