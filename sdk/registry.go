package sdk

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
)

// Registry opens drivers by URL. The zero value is empty and ready; it must not be copied after its first use. It is safe
// for concurrent use.
type Registry struct {
	mu      sync.Mutex
	openers map[string]func(context.Context, *url.URL) (Driver, error)
}

// Add makes a scheme known, "memory" say. It refuses a scheme that is not lower-case letters, digits, "+", "-" or "."
// beginning with a letter, one that is there already, and a nil open.
func (r *Registry) Add(scheme string, open func(context.Context, *url.URL) (Driver, error)) error {
	if !validScheme(scheme) {
		return fmt.Errorf("add scheme %q: use lower-case letters, digits, \"+\", \"-\" and \".\", beginning with a letter, "+
			"without \"://\"", scheme)
	}
	if open == nil {
		return fmt.Errorf("add scheme %q: the function that opens a driver is nil", scheme)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.openers[scheme]; ok {
		return fmt.Errorf("add scheme %q: it is there already", scheme)
	}
	if r.openers == nil {
		r.openers = map[string]func(context.Context, *url.URL) (Driver, error){}
	}
	r.openers[scheme] = open
	return nil
}

// Open opens the driver that a URL names: "scheme://host/path?parameter=value". What ctx bounds, and whether the broker is
// dialled, is the driver's. The caller closes the driver. An error shows no more of the URL than scheme and host, and
// neither passwords nor secret parameters, wherever they came from.
func (r *Registry) Open(ctx context.Context, rawURL string) (Driver, error) {
	scheme, _, ok := strings.Cut(rawURL, "://")
	if scheme = strings.ToLower(scheme); !ok || !validScheme(scheme) {
		return nil, errors.New("open driver: the URL does not begin with a scheme and \"://\" (it is not shown, because it " +
			"may hold a password)")
	}
	r.mu.Lock()
	open, ok := r.openers[scheme]
	known := r.schemes()
	r.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("open driver: unknown scheme %q: %s", scheme, known)
	}
	u, err := url.Parse(rawURL)
	if err != nil { // its text may hold any part of the URL
		return nil, fmt.Errorf("open driver: the URL of scheme %q cannot be parsed (it is not shown, because it may hold a "+
			"password): percent-encode special characters in user, password and parameters, and check the port", scheme)
	}
	driver, err := open(ctx, u)
	if err != nil {
		return nil, fmt.Errorf("open driver %s: %w", shown(u), conceal(err, u, rawURL))
	}
	if driver == nil {
		return nil, fmt.Errorf("open driver %s: its opener returned neither a driver nor an error", shown(u))
	}
	return driver, nil
}

// schemes lists what is known. It is called under the lock.
func (r *Registry) schemes() string {
	if len(r.openers) == 0 {
		return "none is known yet: call Registry.Add first"
	}
	known := make([]string, 0, len(r.openers))
	for scheme := range r.openers {
		known = append(known, scheme)
	}
	slices.Sort(known)
	return "known are " + strings.Join(known, ", ")
}

func validScheme(s string) bool {
	for i, c := range s {
		letter := 'a' <= c && c <= 'z'
		rest := ('0' <= c && c <= '9') || strings.ContainsRune("+-.", c)
		if !letter && (i == 0 || !rest) {
			return false
		}
	}
	return s != ""
}
