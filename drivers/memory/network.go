package memory

import (
	"context"
	"fmt"
	"net/url"
	"sync"

	"github.com/penstock-mq/penstock/sdk"
)

// Network holds brokers by name. It is a value of the program, not a global: two networks share nothing. It needs no
// closing. Its methods may be called by several goroutines at once.
type Network struct {
	opts Options
	err  error // options that cannot work; told by whatever opens a driver

	mu      sync.Mutex
	brokers map[string]*Broker
}

// NewNetwork makes an empty network whose brokers have these bounds. Options that cannot work are told by Open and
// Driver.
func NewNetwork(opts Options) *Network {
	n := &Network{opts: opts, brokers: make(map[string]*Broker)}
	n.err = opts.withDefaults().validate()
	return n
}

// Open connects to the broker that a URL memory://name names, and makes it when it is new. The parameters are capacity,
// capacity_bytes, max_payload, lease, horizon and unroutable (accept or error); see [Options]. Anything else in the URL is
// an error, and so is a parameter that differs from what an existing broker has. unroutable belongs to the driver that is
// opened, not to the broker. Open does not block.
func (n *Network) Open(ctx context.Context, u *url.URL) (sdk.Driver, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("memory: open: %w", err)
	}
	if n.err != nil {
		return nil, fmt.Errorf("memory: open: %w", n.err)
	}
	a, err := parseAddress(u, n.opts)
	if err != nil {
		return nil, fmt.Errorf("memory: open: %w", err)
	}
	b := n.broker(a.name, a.opts)
	if err := a.conflict(b.opts); err != nil {
		return nil, fmt.Errorf("memory: open: %w", err)
	}
	return newDriver(b, a.opts.AcceptUnroutable), nil
}

// Driver connects to the broker of that name, and makes it, with the network's options, when it is new. The error is
// about a name or options that cannot work.
func (n *Network) Driver(name string) (sdk.Driver, error) {
	if n.err != nil {
		return nil, fmt.Errorf("memory: driver: %w", n.err)
	}
	if err := checkName("broker", name); err != nil {
		return nil, fmt.Errorf("memory: driver: %w", err)
	}
	return newDriver(n.Broker(name), n.opts.AcceptUnroutable), nil
}

// Broker gives the broker of that name, and makes it when it is new.
func (n *Network) Broker(name string) *Broker {
	return n.broker(name, n.opts.withDefaults())
}

func (n *Network) broker(name string, opts Options) *Broker {
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.brokers[name]
	if b == nil {
		b = newBroker(opts)
		n.brokers[name] = b
	}
	return b
}
