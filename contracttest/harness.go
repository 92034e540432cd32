package contracttest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

// defaultMany is the number of messages in the text of the contract.
const defaultMany = 10_000

// Harness connects the suite to one broker. Only Open is required, on the harness itself or on what Fresh returns; each
// further hook lets more clauses run. Hooks may be called from any goroutine, one at a time.
type Harness struct {
	// Name is the name in reports.
	Name string
	// Open gives a driver that was not used before, on the same broker at every call. The suite closes it.
	Open func(ctx context.Context) (sdk.Driver, error)
	// Fresh, where set, is called at the start of each clause, inside its bubble, and returns the harness for that clause,
	// usually on a new broker. Name, Bubble, Waive, Patience, Lease and Many are those of the outer harness. A harness with
	// Bubble needs it whenever its broker has channels or timers.
	Fresh func() Harness
	// Bubble says that broker and driver live in this process and do no I/O: [Run] and [Examine] run each clause inside
	// a bubble of testing/synctest, where waiting costs nothing. [Check] ignores it.
	Bubble bool
	// Waive names clauses that this driver is known to break, each with the reason. They still run, and have to fail.
	Waive map[string]string
	// Patience is the longest wait for what has to come. 0 means 10 s, in a bubble 1 min.
	Patience time.Duration
	// Lease is the lease that clauses about leases ask for: the shortest the broker takes. 0 means 1 s, in a bubble 10 s.
	Lease time.Duration
	// Many is the number of messages of the clauses that speak of 10,000. 0 means that; fewer weakens those clauses and is
	// for runs whose subject is something else.
	Many int

	// Restart restarts the broker and returns when it takes connections again.
	Restart func(ctx context.Context) error
	// Cut breaks every connection between drivers and broker; new ones can be made at once.
	Cut func(ctx context.Context) error
	// Stall makes the broker take requests and answer none, on present and future connections, until resume is called.
	// What was requested meanwhile may or may not be carried out. resume may be called more than once.
	Stall func(ctx context.Context) (resume func(), err error)
	// Refuse makes the broker refuse, without storing, every message sent to the topic until restore is called.
	Refuse func(ctx context.Context, topic string) (restore func(), err error)
	// DropTopology deletes what Prepare made for the topic, its groups included.
	DropTopology func(ctx context.Context, topic string) error
	// Undecodable puts a message into the topic that the driver cannot decode.
	Undecodable func(ctx context.Context, topic string, raw []byte) error
	// DeadLetterTopic names the topic where rejected messages of a topic can be consumed.
	DeadLetterTopic func(topic string) string
	// KillConsumer has another process take n deliveries, settle none, and be killed by SIGKILL. It returns once the
	// process is dead.
	KillConsumer func(ctx context.Context, topic, group string, n int) error
	// Signal sends SIGTERM to this very process, in which somebody may listen to it: for tests only.
	Signal func(ctx context.Context) error
	// Unsettled asks the broker how many deliveries of the group are handed out and not settled, prefetched ones included.
	Unsettled func(ctx context.Context, topic, group string) (int, error)
}

// hook tells whether the hook of that name, a field of Harness, is there.
func (h Harness) hook(name string) bool {
	return map[string]bool{
		"Restart":         h.Restart != nil,
		"Cut":             h.Cut != nil,
		"Stall":           h.Stall != nil,
		"Refuse":          h.Refuse != nil,
		"DropTopology":    h.DropTopology != nil,
		"Undecodable":     h.Undecodable != nil,
		"DeadLetterTopic": h.DeadLetterTopic != nil,
		"KillConsumer":    h.KillConsumer != nil,
		"Signal":          h.Signal != nil,
		"Unsettled":       h.Unsettled != nil,
	}[name]
}

// begin gives the harness that one clause uses. It must be called inside the clause's bubble.
func (h Harness) begin(bubbled bool) (Harness, error) {
	used := h
	if h.Fresh != nil {
		used = h.Fresh()
		used.Name, used.Waive, used.Patience, used.Lease, used.Many = h.Name, h.Waive, h.Patience, h.Lease, h.Many
	}
	used.Bubble = bubbled
	if used.Open == nil {
		return used, errors.New("the harness has no Open: it is required")
	}
	if used.Patience <= 0 {
		used.Patience = inBubble(bubbled, time.Minute, 10*time.Second)
	}
	if used.Lease <= 0 {
		used.Lease = inBubble(bubbled, 10*time.Second, time.Second)
	}
	if used.Many <= 0 {
		used.Many = defaultMany
	}
	return used, nil
}

// check refuses waivers of clauses that do not exist.
func (h Harness) check(known []Clause) error {
	ids := make(map[string]bool, len(known))
	for _, c := range known {
		ids[c.ID] = true
	}
	for id := range h.Waive {
		if !ids[id] {
			return fmt.Errorf("harness %q waives %s: there is no such clause", h.Name, id)
		}
	}
	return nil
}

func inBubble(bubbled bool, virtual, outside time.Duration) time.Duration {
	if bubbled {
		return virtual
	}
	return outside
}
