package sdk

import (
	"cmp"
	"net/url"
	"slices"
	"strings"
)

// shown is all of a URL that may be seen.
func shown(u *url.URL) string {
	if misread(u) {
		return u.Scheme + "://***"
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host}).String()
}

// misread tells that an "@" came after the host: a password with a "/", "?" or "#" that was not percent-encoded looks like
// that, and then what was taken for host and path is user and password.
func misread(u *url.URL) bool {
	return u.User == nil && strings.Contains(u.Path+u.RawQuery+u.Fragment, "@")
}

// concealed is an error whose text lost its secrets. The error below stays reachable for errors.Is and errors.As.
type concealed struct {
	text string
	err  error
}

func (c *concealed) Error() string { return c.text }
func (c *concealed) Unwrap() error { return c.err }

// conceal takes the URL and everything secret in it out of the text of an error: drivers and client libraries quote what
// they were given.
func conceal(err error, u *url.URL, rawURL string) error {
	text := err.Error()
	for _, secret := range secrets(u, rawURL) {
		text = strings.ReplaceAll(text, secret, "***")
	}
	return &concealed{text: text, err: err}
}

// secrets lists the texts to conceal, the longest first, so that no rest of a longer one stays.
func secrets(u *url.URL, rawURL string) []string {
	found := []string{rawURL, u.String()}
	add := func(s string) {
		found = append(found, s, url.QueryEscape(s), url.PathEscape(s))
	}
	if u.User != nil {
		found = append(found, u.User.String())
		password, ok := u.User.Password()
		add(password)
		if !ok || password == "" { // a token alone
			add(u.User.Username())
		}
	}
	for name, values := range u.Query() {
		if secretParameter(name) {
			for _, v := range values {
				add(v)
			}
		}
	}
	if u.RawQuery != "" {
		found = append(found, u.RawQuery)
	}
	if misread(u) {
		found = append(found, u.Host, u.Hostname(), u.Port())
		for _, part := range []string{u.Path, u.RawPath, u.Fragment} {
			add(part)
			add(strings.TrimPrefix(part, "/"))
		}
	}
	found = slices.DeleteFunc(found, func(s string) bool { return s == "" })
	slices.SortFunc(found, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	return slices.Compact(found)
}

func secretParameter(name string) bool {
	name = strings.ToLower(name)
	for _, word := range []string{"pass", "pwd", "secret", "token", "key", "auth", "cred", "sig"} {
		if strings.Contains(name, word) {
			return true
		}
	}
	return false
}
