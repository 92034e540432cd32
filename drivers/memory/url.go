package memory

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// setting is one URL parameter: how it changes options, and how its value reads back from them.
type setting struct {
	name  string
	set   func(o *Options, value string) error
	value func(o Options) string
}

// settings lists the URL parameters that belong to the broker, in the order in which messages name them.
func settings() []setting {
	return []setting{
		{"capacity", func(o *Options, v string) (err error) {
			o.Capacity, err = positive(v)
			return err
		}, func(o Options) string { return strconv.Itoa(o.Capacity) }},
		{"capacity_bytes", func(o *Options, v string) error {
			n, err := positive(v)
			o.CapacityBytes = int64(n)
			return err
		}, func(o Options) string { return strconv.FormatInt(o.CapacityBytes, 10) }},
		{"max_payload", func(o *Options, v string) (err error) {
			o.MaxPayload, err = positive(v)
			return err
		}, func(o Options) string { return strconv.Itoa(o.MaxPayload) }},
		{"lease", func(o *Options, v string) (err error) {
			o.Lease, err = span(v)
			return err
		}, func(o Options) string { return o.Lease.String() }},
		{"horizon", func(o *Options, v string) (err error) {
			o.Horizon, err = span(v)
			return err
		}, func(o Options) string { return o.Horizon.String() }},
	}
}

const unroutableParam = "unroutable"

func positive(v string) (int, error) {
	n, err := strconv.ParseUint(v, 10, strconv.IntSize-1)
	if err != nil || n == 0 {
		return 0, errors.New("it must be a whole number of at least 1")
	}
	return int(n), nil
}

func span(v string) (time.Duration, error) {
	d, err := time.ParseDuration(v)
	if err != nil || d <= 0 {
		return 0, errors.New("it must be a positive duration such as 30s")
	}
	return d, nil
}

// address is what a memory:// URL says.
type address struct {
	name string
	opts Options // with defaults; for a broker that does not exist yet
	// asked are the broker settings that the URL names: an existing broker has to have the same.
	asked []setting
}

// parseAddress reads a memory://name?… URL strictly. base are the network's options.
func parseAddress(u *url.URL, base Options) (address, error) {
	if err := checkShape(u); err != nil {
		return address{}, err
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return address{}, errors.New("its parameters cannot be read: write name=value, joined by &")
	}
	a := address{name: u.Host, opts: base}
	known := settings()
	for name, values := range query {
		if len(values) != 1 {
			return address{}, fmt.Errorf("parameter %q is given %d times: once is allowed", name, len(values))
		}
		if name == unroutableParam {
			a.opts.AcceptUnroutable, err = acceptUnroutable(values[0])
		} else {
			i := slices.IndexFunc(known, func(s setting) bool { return s.name == name })
			if i < 0 {
				return address{}, fmt.Errorf("unknown parameter %q: allowed are %s", name, allowed())
			}
			err = known[i].set(&a.opts, values[0])
			a.asked = append(a.asked, known[i])
		}
		if err != nil {
			return address{}, fmt.Errorf("parameter %q is %q: %w", name, values[0], err)
		}
	}
	a.opts = a.opts.withDefaults()
	return a, a.opts.validate()
}

func allowed() string {
	names := make([]string, 0, 8)
	for _, s := range settings() {
		names = append(names, s.name)
	}
	return strings.Join(append(names, unroutableParam), ", ")
}

func acceptUnroutable(v string) (bool, error) {
	switch v {
	case "accept":
		return true, nil
	case "error":
		return false, nil
	}
	return false, errors.New("it must be accept or error")
}

// checkShape refuses every part of a URL that means nothing here. It never quotes them: user information is a credential.
func checkShape(u *url.URL) error {
	const form = "the form is memory://name?parameters"
	switch {
	case u == nil:
		return errors.New("there is no address: " + form)
	case u.Opaque != "" || u.Host == "":
		return errors.New("the address has no broker name: " + form)
	case u.User != nil:
		return errors.New("the address has a user: nobody logs in here; " + form)
	case u.Port() != "" || strings.Contains(u.Host, ":"):
		return errors.New("the address has a port: " + form)
	case u.Path != "":
		return errors.New("the address has a path: " + form)
	case u.Fragment != "":
		return errors.New("the address has a fragment: " + form)
	}
	return checkName("broker", u.Host)
}

// conflict says in which of the settings asked for a broker with options have differs, or nil.
func (a address) conflict(have Options) error {
	for _, s := range a.asked {
		if got, want := s.value(have), s.value(a.opts); got != want {
			return fmt.Errorf("broker %q exists with %s %s, and %s was asked for: leave the parameter out or use the same",
				a.name, s.name, got, want)
		}
	}
	return nil
}
