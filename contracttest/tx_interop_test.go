package contracttest_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/penstock-mq/penstock/contracttest/memstore"
	"github.com/penstock-mq/penstock/drivers/memory"
	"github.com/penstock-mq/penstock/middleware/idempotency"
	"github.com/penstock-mq/penstock/sdk"
)

// ending is how the first run of a trial's handler ends, after it has applied its effect. Later runs succeed.
type ending string

const (
	succeeds ending = "succeeds"
	fails    ending = "fails once"
	panics   ending = "panics once"
	waits    ending = "waits once" // until its context ends, and returns that error
	ignores  ending = "ignores its context"
	away     ending = "database away" // for the first three seconds; the handler succeeds
)

var errFirst = errors.New("the first attempt fails")

// whatever stands in a wanted outcome for a number that chance decides.
const whatever = -1

// outcome is what became of one message.
type outcome struct {
	deliveries int // attempts, as the router sees them
	runs       int // of the handler itself
	effects    int
	receipts   int
	acks       int
	outputs    int
	correlated int // outputs with the correlation id of their input
	poisoned   int // messages on the poison topic
	failed     int // attempts that are charged
	unused     int // counted as handled without its transaction
}

// as leaves out the numbers that do not matter in want.
func (o outcome) as(want outcome) outcome {
	if want.deliveries == whatever {
		o.deliveries = whatever
	}
	if want.runs == whatever {
		o.runs = whatever
	}
	if want.failed == whatever {
		o.failed = whatever
	}
	return o
}

// plain is the outcome without any middleware but ours.
func plain(end ending) outcome {
	o := outcome{deliveries: 1, runs: 1, effects: 1, receipts: 1, acks: 1, outputs: 1}
	switch end {
	case fails, panics, waits:
		o.deliveries, o.runs, o.failed = 2, 2, 1
	case away:
		o.deliveries = whatever // each waits two seconds in memory for the database, and then for the broker to bring it again
	}
	return o
}

// trial is one message on its way through a router.
type trial struct {
	end           ending
	outer, inside []message.HandlerMiddleware
	requireTx     bool

	m *idempotency.Middleware[*memstore.Tx]

	mu  sync.Mutex
	got outcome
}

func (tr *trial) count(f func(o *outcome)) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	f(&tr.got)
}

// handle applies the effect, ends as it is told, and produces one output.
func (tr *trial) handle(msg *message.Message) ([]*message.Message, error) {
	tx, err := idempotency.TxFrom[*memstore.Tx](msg.Context())
	if err != nil {
		return nil, err
	}
	run := 0
	tr.count(func(o *outcome) { o.runs++; run = o.runs })
	time.Sleep(10 * time.Millisecond) // no handler is done at once
	if err := tx.Add("effect", 1); err != nil {
		return nil, err
	}
	if run == 1 {
		switch tr.end {
		case fails:
			return nil, errFirst
		case panics:
			panic("the first attempt panics")
		case waits:
			<-msg.Context().Done()
			return nil, msg.Context().Err()
		case ignores:
			time.Sleep(500 * time.Millisecond)
		}
	}
	return []*message.Message{message.NewMessage(fmt.Sprintf("output-of-run-%d", run), nil)}, nil
}

// outlet is a publisher that counts with a func.
type outlet func(msg *message.Message)

// Publish counts.
func (o outlet) Publish(_ string, msgs ...*message.Message) error {
	for _, msg := range msgs {
		o(msg)
	}
	return nil
}

// Close does nothing.
func (outlet) Close() error { return nil }

func (tr *trial) outputs() message.Publisher {
	return outlet(func(msg *message.Message) {
		tr.count(func(o *outcome) {
			o.outputs++
			if middleware.MessageCorrelationID(msg) == "cid" {
				o.correlated++
			}
		})
	})
}

func (tr *trial) poison() message.Publisher {
	return outlet(func(*message.Message) { tr.count(func(o *outcome) { o.poisoned++ }) })
}

// subscriber requeues after 50 ms, without jitter, and counts confirmed acks.
func (tr *trial) subscriber(d sdk.Driver) (*sdk.Subscriber, error) {
	return sdk.NewSubscriber(d, sdk.SubscriberConfig{
		Group: "g", Backoff: sdk.Backoff{Min: 50 * time.Millisecond, Max: 50 * time.Millisecond},
		Observer: sdk.ObserverFunc(func(e sdk.Event) {
			if e.Kind == sdk.EventSettled && e.Verdict == sdk.Ack && e.Outcome == sdk.SettleOutcomeConfirmed {
				tr.count(func(o *outcome) { o.acks++ })
			}
		}),
	})
}

// run sends one message and says ten seconds later what became of it; meanwhile, where set, is called 5 ms after the
// sending. It wants a bubble.
func (tr *trial) run(t *testing.T, meanwhile func()) outcome {
	t.Helper()
	driver, err := memory.NewNetwork(memory.Options{}).Driver("trial")
	must(t, err)
	sub, err := tr.subscriber(driver)
	must(t, err)
	db := memstore.NewDatabase()
	store := db.Store()
	tr.m, err = idempotency.New(store, idempotency.Config{
		Consumer: "trial", Inside: tr.inside, Outputs: tr.outputs(), TxBudget: time.Second, RequireTx: tr.requireTx,
	})
	must(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	must(t, err)
	router.AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			tr.count(func(o *outcome) { o.deliveries++ })
			return h(msg)
		}
	})
	router.AddMiddleware(tr.outer...)
	router.AddPlugin(tr.m.Plugin)
	router.AddHandler("apply", "in", sub, "out", tr.outputs(), tr.handle)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- sdk.Run(ctx, router, sub) }()
	<-router.Running()
	if tr.end == away {
		back, _ := store.Away()
		time.AfterFunc(3*time.Second, back)
	}
	msg := sdk.Message{ID: "m", Metadata: map[string]string{middleware.CorrelationIDMetadataKey: "cid"}, Payload: []byte("payload")}
	must(t, driver.Send(t.Context(), "in", []sdk.Message{msg}))
	time.Sleep(5 * time.Millisecond)
	if meanwhile != nil {
		meanwhile()
	}
	time.Sleep(10 * time.Second)
	cancel()
	must(t, <-ended)
	must(t, driver.Close(context.Background()))
	stats, err := store.Stats(context.Background())
	must(t, err)
	report := tr.m.Report()
	tr.got.effects, tr.got.receipts = int(db.Counters()["effect"]), stats.Done
	tr.got.failed, tr.got.unused = int(report.Failed), int(report.WithoutTx)
	return tr.got
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// place is where a middleware stands: outside ours, or in Config.Inside.
type place string

const (
	outside place = "outside"
	inside  place = "inside"
)

// TestWatermillMiddlewares is clause T23 for everything that Watermill ships: what becomes of a message in each place and
// for each way in which its handler can end.
func TestWatermillMiddlewares(t *testing.T) {
	for _, mw := range shipped() {
		for at, special := range map[place]map[ending]outcome{outside: mw.outside, inside: mw.inside} {
			for _, end := range []ending{succeeds, fails, panics, waits, ignores, away} {
				t.Run(fmt.Sprintf("%s/%s/%s", mw.name, at, end), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						tr := &trial{end: end}
						if at == outside {
							tr.outer = append(tr.outer, mw.make(tr))
						} else {
							tr.inside = append(tr.inside, mw.make(tr))
						}
						want, ok := special[end]
						if !ok {
							want = plain(end)
						}
						if got := tr.run(t, nil).as(want); got != want {
							t.Errorf("got  %+v\nwant %+v", got, want)
						}
					})
				})
			}
		}
	}
}

// TestWatermillCombinations is what the page says about several middlewares, and about what helps.
func TestWatermillCombinations(t *testing.T) {
	retry := middleware.Retry{MaxRetries: 3, InitialInterval: time.Millisecond}
	reset := retry
	reset.ResetContextOnRetry = true
	timeout := middleware.Timeout(100 * time.Millisecond)
	poisonAnd := func(next ...message.HandlerMiddleware) func(tr *trial) []message.HandlerMiddleware {
		return func(tr *trial) []message.HandlerMiddleware {
			return append([]message.HandlerMiddleware{poisonQueue(tr)}, next...)
		}
	}
	just := func(all ...message.HandlerMiddleware) func(*trial) []message.HandlerMiddleware {
		return func(*trial) []message.HandlerMiddleware { return all }
	}
	tests := []struct {
		name      string
		at        place
		make      func(tr *trial) []message.HandlerMiddleware
		end       ending
		requireTx bool
		want      outcome
	}{
		{
			"Retry around Timeout tries with the context that is over", outside, just(retry.Middleware, timeout), waits, false,
			plain(waits), // the tries are in vain: another delivery has to come
		},
		{
			"with ResetContextOnRetry it does not", outside, just(reset.Middleware, timeout), waits, false,
			change(plain(waits), func(o *outcome) { o.deliveries = 1 }),
		},
		{
			"PoisonQueue around Recoverer takes a panic", outside, poisonAnd(middleware.Recoverer), panics, false,
			outcome{deliveries: 1, runs: 1, acks: 1, poisoned: 1, failed: 1},
		},
		{
			"PoisonQueue around Retry takes what failed each time", outside, poisonAnd(retry.Middleware), fails, false,
			change(plain(fails), func(o *outcome) { o.deliveries = 1 }),
		},
		{
			"RequireTx sees that a Deduplicator inside has kept the handler away", inside, just(deduplicator().Middleware), fails, true,
			// The message stays with the broker. Each delivery is returned, and nothing is recorded as done.
			outcome{deliveries: whatever, runs: 1, failed: 1},
		},
		{
			"nobody sees that a middleware inside has swallowed another's error", inside,
			just(swallow, middleware.RandomFail(1)), succeeds, false,
			outcome{deliveries: 1, receipts: 1, acks: 1, unused: 1},
		},
		{
			"but RequireTx does", inside, just(swallow, middleware.RandomFail(1)), succeeds, true,
			outcome{deliveries: whatever},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tr := &trial{end: test.end, requireTx: test.requireTx}
				if test.at == outside {
					tr.outer = test.make(tr)
				} else {
					tr.inside = test.make(tr)
				}
				if got := tr.run(t, nil).as(test.want); got != test.want {
					t.Errorf("got  %+v\nwant %+v", got, test.want)
				}
			})
		})
	}
}

// swallow makes a success of every error.
func swallow(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		outputs, _ := h(msg)
		return outputs, nil
	}
}

// TestThrottleInsideHoldsTheLane: while Throttle waits inside, a transaction is open; outside none is.
func TestThrottleInsideHoldsTheLane(t *testing.T) {
	for at, want := range map[place]int{outside: 0, inside: 1} {
		synctest.Test(t, func(t *testing.T) {
			throttle := []message.HandlerMiddleware{middleware.NewThrottle(10, time.Second).Middleware}
			tr := &trial{end: succeeds, outer: throttle}
			if at == inside {
				tr.outer, tr.inside = nil, throttle
			}
			got := tr.run(t, func() {
				if busy := tr.m.Report().Health.LanesBusy; busy != want {
					t.Errorf("%s: %d transactions are open while it waits, want %d", at, busy, want)
				}
			})
			if got != plain(succeeds) {
				t.Errorf("%s: %+v", at, got)
			}
		})
	}
}

// TestEveryWatermillMiddlewareIsKnown fails when Watermill ships something that the table does not have, or drops something
// that it has.
func TestEveryWatermillMiddlewareIsKnown(t *testing.T) {
	known := notMiddlewares()
	for _, mw := range shipped() {
		known = append(known, mw.exports...)
	}
	slices.Sort(known)
	got := exported(t, "github.com/ThreeDotsLabs/watermill/message/router/middleware")
	for _, name := range got {
		if !slices.Contains(known, name) {
			t.Errorf("Watermill exports %s: say in the table, and in docs/retries.md, what it does outside and inside", name)
		}
	}
	for _, name := range known {
		if !slices.Contains(got, name) {
			t.Errorf("the table knows %s, which Watermill does not export", name)
		}
	}
}

// exported lists the names that a package exports: functions, types and their methods, variables.
func exported(t *testing.T, path string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-json=Dir,GoFiles", path).Output()
	must(t, err)
	var pkg struct {
		Dir     string
		GoFiles []string
	}
	must(t, json.Unmarshal(out, &pkg))
	names := map[string]bool{}
	for _, file := range pkg.GoFiles {
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(pkg.Dir, file), nil, parser.SkipObjectResolution)
		must(t, err)
		for _, decl := range parsed.Decls {
			for _, name := range declared(decl) {
				names[name] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
}

func declared(decl ast.Decl) []string {
	switch d := decl.(type) {
	case *ast.FuncDecl:
		name := d.Name.Name
		if d.Recv != nil {
			of := d.Recv.List[0].Type
			if star, ok := of.(*ast.StarExpr); ok {
				of = star.X
			}
			receiver, ok := of.(*ast.Ident)
			if !ok || !receiver.IsExported() {
				return nil
			}
			name = receiver.Name + "." + name
		}
		if d.Name.IsExported() {
			return []string{name}
		}
	case *ast.GenDecl:
		var names []string
		for _, spec := range d.Specs {
			switch s := spec.(type) {
			case *ast.TypeSpec:
				names = append(names, s.Name.Name)
			case *ast.ValueSpec:
				for _, name := range s.Names {
					if d.Tok == token.VAR {
						names = append(names, name.Name)
					}
				}
			}
		}
		return slices.DeleteFunc(names, func(name string) bool { return !ast.IsExported(name) })
	}
	return nil
}

// TestRetriesPageSaysWhatIsTested compares the page with the table, row by row.
func TestRetriesPageSaysWhatIsTested(t *testing.T) {
	page, err := os.ReadFile("../docs/retries.md")
	must(t, err)
	var rows []string
	all := shipped()
	slices.SortFunc(all, func(a, b shippedMiddleware) int { return cmp.Compare(a.name, b.name) })
	for _, mw := range all {
		rows = append(rows, fmt.Sprintf("| `%s` | %s | %s |\n", mw.name, mw.says[0], mw.says[1]))
	}
	if table := strings.Join(rows, ""); !strings.Contains(string(page), table) {
		t.Errorf("docs/retries.md does not have this table:\n%s", table)
	}
}
