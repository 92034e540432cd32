package memory

import (
	"context"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/penstock-mq/penstock/sdk"
)

func open(t *testing.T, n *Network, raw string) (sdk.Driver, error) {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatalf("the test's own URL: %v", err)
	}
	return n.Open(t.Context(), u)
}

func TestOpenRefuses(t *testing.T) {
	for _, tc := range []struct{ name, url, want string }{
		{"no name", "memory://", "no broker name"},
		{"opaque", "memory:orders", "no broker name"},
		{"three slashes", "memory:///orders", "no broker name"},
		{"user", "memory://root:s3cret@orders", "has a user"},
		{"user without host", "memory://root:s3cret@", "no broker name"},
		{"port", "memory://orders:99", "has a port"},
		{"empty port", "memory://orders:", "has a port"},
		{"path", "memory://orders/x", "has a path"},
		{"slash", "memory://orders/", "has a path"},
		{"fragment", "memory://orders#x", "has a fragment"},
		{"long name", "memory://" + strings.Repeat("n", 600), "600 bytes"},
		{"unknown parameter", "memory://orders?capacty=1", `unknown parameter "capacty": allowed are capacity, capacity_bytes`},
		{"case", "memory://orders?Capacity=1", "unknown parameter"},
		{"twice", "memory://orders?lease=1s&lease=1s", "given 2 times"},
		{"semicolon", "memory://orders?lease=1s;capacity=3", "cannot be read"},
		{"bad escape", "memory://orders?lease=%zz", "cannot be read"},
		{"word", "memory://orders?capacity=many", "whole number"},
		{"zero", "memory://orders?capacity=0", "whole number"},
		{"negative", "memory://orders?capacity_bytes=-1", "whole number"},
		{"plus", "memory://orders?max_payload=%2B5", "whole number"},
		{"overflow", "memory://orders?max_payload=9223372036854775808", "whole number"},
		{"empty value", "memory://orders?capacity=", "whole number"},
		{"number without unit", "memory://orders?lease=30", "positive duration"},
		{"no lease", "memory://orders?lease=0s", "positive duration"},
		{"negative horizon", "memory://orders?horizon=-1h", "positive duration"},
		{"unroutable", "memory://orders?unroutable=drop", "accept or error"},
		{"payload above queue", "memory://orders?capacity_bytes=10&max_payload=11", "lower the one"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := NewNetwork(Options{})
			d, err := open(t, n, tc.url)
			if err == nil || d != nil {
				t.Fatalf("Open succeeded")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %q, want it to say %q", err, tc.want)
			}
			if strings.Contains(err.Error(), "s3cret") {
				t.Errorf("error tells a credential: %q", err)
			}
			if len(n.brokers) != 0 {
				t.Errorf("a broker was made")
			}
		})
	}
	t.Run("nil", func(t *testing.T) {
		if _, err := NewNetwork(Options{}).Open(t.Context(), nil); err == nil {
			t.Fatal("Open(nil) succeeded")
		}
	})
	t.Run("context", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := NewNetwork(Options{}).Open(ctx, &url.URL{Host: "orders"}); err == nil {
			t.Fatal("Open with a done context succeeded")
		}
	})
}

func TestOpenReadsParameters(t *testing.T) {
	n := NewNetwork(Options{})
	d, err := open(t, n, "memory://orders?capacity=7&capacity_bytes=900&max_payload=90&lease=1m30s&horizon=48h&unroutable=accept")
	if err != nil {
		t.Fatal(err)
	}
	want := Options{
		Capacity: 7, CapacityBytes: 900, MaxPayload: 90, Lease: 90 * time.Second, Horizon: 48 * time.Hour, AcceptUnroutable: true,
	}
	if got := n.Broker("orders").opts; got != want {
		t.Errorf("options are %+v, want %+v", got, want)
	}
	c := d.Capabilities()
	if c.Lease != 90*time.Second || c.MaxPayload != 90 || c.Horizon != 48*time.Hour || c.UnroutableDetected {
		t.Errorf("capabilities do not follow the URL: %+v", c)
	}
}

func TestOpenExisting(t *testing.T) {
	for _, tc := range []struct{ url, conflict string }{
		{"memory://orders", ""},
		{"memory://orders?capacity=7", ""},
		{"memory://orders?lease=60s&capacity=7", ""},
		{"memory://orders?lease=30s", ""}, // as the network has it
		{"memory://orders?unroutable=accept", ""},
		{"memory://orders?capacity=8", "capacity 7, and 8"},
		{"memory://orders?capacity_bytes=1000000000", "capacity_bytes"},
		{"memory://orders?max_payload=5", "max_payload"},
		{"memory://orders?horizon=1h", "horizon 0s, and 1h0m0s"},
		{"memory://other?capacity=8", ""},
	} {
		t.Run(tc.url, func(t *testing.T) {
			n := NewNetwork(Options{})
			if _, err := open(t, n, "memory://orders?capacity=7"); err != nil {
				t.Fatal(err)
			}
			if tc.url == "memory://orders?lease=60s&capacity=7" {
				tc.conflict = "lease 30s, and 1m0s"
			}
			_, err := open(t, n, tc.url)
			switch {
			case tc.conflict == "" && err != nil:
				t.Errorf("Open: %v", err)
			case tc.conflict != "" && (err == nil || !strings.Contains(err.Error(), tc.conflict)):
				t.Errorf("error is %v, want it to say %q", err, tc.conflict)
			}
		})
	}
}

func TestOpenSameBroker(t *testing.T) {
	n := NewNetwork(Options{})
	for _, name := range []string{"a", "b"} {
		d, err := open(t, n, "memory://"+name)
		if err != nil {
			t.Fatal(err)
		}
		if d.(*driver).b != n.Broker(name) {
			t.Errorf("memory://%s is not the network's broker %s", name, name)
		}
	}
	if n.Broker("a") == n.Broker("b") || n.Broker("a") == NewNetwork(Options{}).Broker("a") {
		t.Error("two names, or two networks, share a broker")
	}
}

func TestOptionsThatCannotWork(t *testing.T) {
	for _, opts := range []Options{
		{Capacity: -1}, {CapacityBytes: -1}, {MaxPayload: -1}, {Lease: -1}, {Horizon: -1}, {CapacityBytes: 5, MaxPayload: 6},
	} {
		n := NewNetwork(opts)
		if _, err := n.Driver("b"); err == nil {
			t.Errorf("%+v: Driver succeeded", opts)
		}
		if _, err := open(t, n, "memory://b"); err == nil {
			t.Errorf("%+v: Open succeeded", opts)
		}
	}
	if got := (Options{CapacityBytes: 5}).withDefaults(); got.MaxPayload != 5 {
		t.Errorf("the default maximum payload is %d, which a queue of 5 bytes cannot hold", got.MaxPayload)
	}
}

func TestDriverNames(t *testing.T) {
	n := NewNetwork(Options{})
	for _, name := range []string{"", "a\x00b", strings.Repeat("n", maxName+1)} {
		if _, err := n.Driver(name); err == nil {
			t.Errorf("a name of %d bytes is taken", len(name))
		}
	}
}

func FuzzOpen(f *testing.F) {
	f.Add("memory://orders?capacity=1")
	f.Add("memory://root:pw@h:1/p?x=%#")
	f.Fuzz(func(t *testing.T, raw string) {
		u, err := url.Parse(raw)
		if err != nil {
			return
		}
		n := NewNetwork(Options{})
		d, err := n.Open(t.Context(), u)
		if (d == nil) == (err == nil) {
			t.Fatalf("Open gives driver %v and error %v", d, err)
		}
		if err == nil && len(n.brokers) != 1 {
			t.Fatalf("%d brokers", len(n.brokers))
		}
	})
}
