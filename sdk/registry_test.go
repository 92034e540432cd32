package sdk

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
)

func TestRegistryOpens(t *testing.T) {
	var r Registry
	want := newFake(Capabilities{})
	var got *url.URL
	err := r.Add("fake", func(_ context.Context, u *url.URL) (Driver, error) { got = u; return want, nil })
	if err != nil {
		t.Fatal(err)
	}
	d, err := r.Open(t.Context(), "FAKE://u:p@host/path?x=1")
	if err != nil || d != Driver(want) {
		t.Fatalf("%v, %v", d, err)
	}
	if got.Host != "host" || got.Path != "/path" || got.Query().Get("x") != "1" || got.User.String() != "u:p" {
		t.Errorf("the opener got %v", got)
	}
}

func TestRegistryAddRefuses(t *testing.T) {
	open := func(context.Context, *url.URL) (Driver, error) { return nil, nil }
	var r Registry
	if err := r.Add("amqp", open); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		scheme string
		open   func(context.Context, *url.URL) (Driver, error)
		want   string
	}{
		"duplicate":   {"amqp", open, "already"},
		"empty":       {"", open, "letter"},
		"upper case":  {"AMQP", open, "lower-case"},
		"with slash":  {"amqp://", open, "without"},
		"digit first": {"1amqp", open, "letter"},
		"unicode":     {"ämqp", open, "letter"},
		"nil":         {"x", nil, "nil"},
	} {
		if err := r.Add(c.scheme, c.open); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := r.Add("amqp+tls", open); err != nil {
		t.Errorf("a valid scheme: %v", err)
	}
}

func TestRegistryUnknownScheme(t *testing.T) {
	var r Registry
	if _, err := r.Open(t.Context(), "memory://x"); err == nil || !strings.Contains(err.Error(), "Registry.Add") {
		t.Errorf("empty registry: %v", err)
	}
	for _, s := range []string{"sqlite", "amqp"} {
		if err := r.Add(s, func(context.Context, *url.URL) (Driver, error) { return nil, nil }); err != nil {
			t.Fatal(err)
		}
	}
	_, err := r.Open(t.Context(), "memory://user:hunter2@x")
	if err == nil || !strings.Contains(err.Error(), `"memory"`) || !strings.Contains(err.Error(), "amqp, sqlite") {
		t.Errorf("unknown scheme: %v", err)
	}
	if _, err := r.Open(t.Context(), "amqp://host"); err == nil || !strings.Contains(err.Error(), "neither") {
		t.Errorf("an opener that returns nothing: %v", err)
	}
}

// However the URL is broken and whatever the opener says, nothing secret is in the error.
func TestRegistryNeverShowsCredentials(t *testing.T) {
	wrapped := errors.New("connection refused")
	var r Registry
	err := r.Add("amqp", func(_ context.Context, u *url.URL) (Driver, error) {
		password, _ := u.User.Password()
		return nil, fmt.Errorf("dial %s (%s, %v, %q, user info %v, host %v, path %v, query %v, fragment %v, user %v, password %s %s): %w",
			u.String(), u.Redacted(), *u, u, u.User, u.Host, u.Path, u.RawQuery, u.Fragment, known(u), password, u.Query().Get("password"), wrapped)
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, raw := range map[string]string{
		"password":          "amqp://bob:hunter2@host:5672/vhost",
		"encoded":           "amqp://bob:hunter2%40%2F%20x@host/vhost",
		"token as user":     "amqp://hunter2@host",
		"encoded token":     "amqp://hunter2%40x@host",
		"parameter":         "amqp://host/?password=hunter2&sslkey=hunter2%2Bx",
		"not a url":         "bob:hunter2@host",
		"no scheme":         "//bob:hunter2@host",
		"scheme of secrets": "hunter2+bob:pass@host",
		"unknown scheme":    "xmqp://bob:hunter2@host",
		"bad port":          "amqp://bob:hunter2@host:port/",
		"bad escape":        "amqp://bob:hunter2%zz@host/",
		"space":             "amqp://bob:hun ter2@host/",
		"control":           "amqp://bob:hunter2\n@host/",
		"slash":             "amqp://bob:hunter2/x@host/",
		"slash and number":  "amqp://bob:4711/hunter2@host/",
		"question mark":     "amqp://bob:4711?hunter2@host/",
		"hash":              "amqp://bob:4711#hunter2@host/",
		"bracket":           "amqp://bob:hunter2[@host/",
		"empty":             "",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := r.Open(t.Context(), raw)
			if err == nil {
				t.Fatal("no error")
			}
			for _, secret := range []string{"hunter2", "hun ter2", "4711", "ter2"} {
				if strings.Contains(err.Error(), secret) {
					t.Errorf("the error shows %q: %v", secret, err)
				}
			}
		})
	}
	_, err = r.Open(t.Context(), "amqp://bob:hunter2@host:5672/vhost")
	if !errors.Is(err, wrapped) || !strings.Contains(err.Error(), "amqp://host:5672") {
		t.Errorf("the opener's error is %v", err)
	}
}

// known is a user name that may be shown: one with a password beside it.
func known(u *url.URL) string { return u.User.Username() }

func FuzzRegistryNeverShowsThePassword(f *testing.F) {
	for _, seed := range []string{"hunter2", "a/b", "a?b", "a#b", "a@b", "a:b", "%41", "ä", "a b", "4711/x"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, part string) {
		password := "Zq" + part + "qZ" // long and odd enough to be no part of our own words
		var r Registry
		_ = r.Add("amqp", func(_ context.Context, u *url.URL) (Driver, error) {
			given, _ := u.User.Password()
			return nil, fmt.Errorf("%v %v %v %v %v", u, u.User, u.Path, u.Fragment, given)
		})
		_, err := r.Open(t.Context(), "amqp://bob:"+password+"@host/vhost")
		if err == nil || strings.Contains(err.Error(), password) {
			t.Errorf("error %v", err)
		}
	})
}
