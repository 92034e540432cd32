package idempotency

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestKeys(t *testing.T) {
	ce := func(source, id string) message.Metadata { return message.Metadata{"ce_source": source, "ce_id": id} }
	long := strings.Repeat("k", receipts.MaxKey)
	tests := []struct {
		name     string
		field    string
		uuid     string
		metadata message.Metadata
		want     string
		refused  string
	}{
		{name: "uuid", uuid: "u-1", want: "u-1"},
		{name: "uuid of one byte", uuid: "\xff", want: "\xff"},
		{name: "uuid at the limit", uuid: long, want: long},
		{name: "uuid over the limit", uuid: long + "k", refused: refusedTooLong},
		{name: "no uuid", refused: refusedEmpty},
		{name: "uuid with trailing blank", uuid: "u-1 ", want: "u-1 "},
		{name: "uuid that starts with NUL", uuid: "\x00\x01", want: "\x00\x00\x01"},
		{name: "field", field: "event", metadata: message.Metadata{"event": "e-1"}, uuid: "u-1", want: "e-1"},
		{name: "field before CloudEvents", field: "event", metadata: message.Metadata{"event": "e", "ce_source": "s", "ce_id": "i"}, want: "e"},
		{name: "field missing", field: "event", uuid: "u-1", metadata: ce("s", "i"), refused: `metadata field "event", which holds the message identity, is missing`},
		{name: "field empty", field: "event", uuid: "u-1", metadata: message.Metadata{"event": ""}, refused: refusedEmpty},
		{name: "field too long", field: "event", metadata: message.Metadata{"event": long + "k"}, refused: refusedTooLong},
		{name: "cloud event", uuid: "u-1", metadata: ce("s", "i"), want: "\x00\x01\x01si"},
		{name: "cloud event over http", metadata: message.Metadata{"ce-source": "s", "ce-id": "i"}, want: "\x00\x01\x01si"},
		{name: "cloud event over go's http", metadata: message.Metadata{"Ce-Source": "s", "Ce-Id": "i"}, want: "\x00\x01\x01si"},
		{name: "cloud event over amqp", metadata: message.Metadata{"cloudEvents:source": "s", "cloudEvents:id": "i"}, want: "\x00\x01\x01si"},
		{name: "cloud event over amqp, jms", metadata: message.Metadata{"cloudEvents_source": "s", "cloudEvents_id": "i"}, want: "\x00\x01\x01si"},
		{name: "cloud event in two spellings", metadata: message.Metadata{"ce-source": "x", "ce-id": "y", "ce_source": "s", "ce_id": "i"}, want: "\x00\x01\x01si"},
		{name: "cloud event with half of each spelling", uuid: "u-1", metadata: message.Metadata{"ce-source": "x", "ce_id": "i"}, want: "u-1"},
		{name: "cloud event without source", uuid: "u-1", metadata: message.Metadata{"ce_id": "i", "x": ""}, want: "u-1"},
		{name: "cloud event with empty id", uuid: "u-1", metadata: ce("s", ""), refused: "the CloudEvents source or id is empty"},
		{name: "cloud event too long", uuid: "u-1", metadata: ce(long, "i"), refused: refusedTooLong},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			msg := message.NewMessage(tt.uuid, nil)
			msg.Metadata = tt.metadata
			key, refused := keyOf(msg, tt.field)
			if refused != tt.refused || (refused == "" && key != tt.want) {
				t.Errorf("got %q, %q, want %q, %q", key, refused, tt.want, tt.refused)
			}
		})
	}
}

func TestKeysOfDifferentKindsDiffer(t *testing.T) {
	key := func(uuid string, metadata message.Metadata) string {
		msg := message.NewMessage(uuid, nil)
		msg.Metadata = metadata
		k, refused := keyOf(msg, "")
		if refused != "" {
			t.Fatalf("refused: %s", refused)
		}
		return k
	}
	pair := key("", message.Metadata{"ce_source": "ab", "ce_id": "c"})
	seen := map[string]string{}
	for name, k := range map[string]string{
		"pair":                       pair,
		"the pair cut elsewhere":     key("", message.Metadata{"ce_source": "a", "ce_id": "bc"}),
		"a uuid with the pair's key": key(pair, nil),
		"that one escaped":           key("\x00"+pair, nil),
		"joined text":                key("abc", nil),
		"upper case":                 key("ABC", nil),
		"trailing blank":             key("abc ", nil),
		"NUL":                        key("abc\x00", nil),
	} {
		if other, taken := seen[k]; taken {
			t.Errorf("%s and %s have the same key %q", name, other, k)
		}
		seen[k] = name
	}
}

func TestScopes(t *testing.T) {
	scope := func(cfg Config, handler, topic string) (string, error) {
		cfg.Consumer = "billing"
		return newEnv(t, func(c *Config, _ *fakeStore) { *c = cfg }).m.scopeOf(handler, topic)
	}
	seen := map[string]string{}
	for name, in := range map[string]struct {
		cfg            Config
		handler, topic string
	}{
		"plain":            {handler: "ab", topic: "c"},
		"cut elsewhere":    {handler: "a", topic: "bc"},
		"other handler":    {handler: "ship", topic: "c"},
		"other topic":      {handler: "ab", topic: "paid"},
		"no topic":         {handler: "ab"},
		"coarse":           {cfg: Config{Scope: "ab"}},
		"coarse imitation": {cfg: Config{Scope: "7:billing2:ab1:c"}},
	} {
		s, err := scope(in.cfg, in.handler, in.topic)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if other, taken := seen[s]; taken {
			t.Errorf("%s and %s share scope %q", name, other, s)
		}
		seen[s] = name
	}

	renamed, err := scope(Config{Aliases: map[string]string{"ab2": "ab"}}, "ab2", "c")
	if err != nil || seen[renamed] != "plain" {
		t.Errorf("an alias gives %q, %v", renamed, err)
	}
	one, _ := scope(Config{Scope: "all"}, "a", "x")
	two, _ := scope(Config{Scope: "all"}, "b", "y")
	if one != two {
		t.Errorf("Config.Scope gives %q and %q", one, two)
	}
	if _, err := scope(Config{}, "", "c"); !errors.Is(err, errNoScope) {
		t.Errorf("without handler name: %v", err)
	}
	if _, err := scope(Config{}, strings.Repeat("h", 500), "c"); err == nil || !strings.Contains(err.Error(), "shorten one of them") {
		t.Errorf("a scope over 512 bytes: %v", err)
	}
}

// A message that cannot be told from another handler's is neither diverted nor handled, and does not come back at once.
func TestWithoutHandlerNameNothingIsLost(t *testing.T) {
	bubble(t, nil, func(e *env) {
		msg := message.NewMessage("u-1", nil)
		msg.SetContext(context.Background())
		_, err := e.counting()(msg)
		if !errors.Is(err, errNoScope) || IsFailure(err) {
			e.Errorf("got %v, failure %v", err, IsFailure(err))
		}
		e.wantEffect(0)
		e.wantCounts(map[string]uint64{"Returned": 1})
		if len(e.store.letters) != 0 || e.store.count("begin") != 0 {
			e.Error("the database was asked")
		}
	})
}

func TestRefusals(t *testing.T) {
	tests := []struct {
		name   string
		cfg    func(*Config)
		msg    *message.Message
		key    string
		reason string
	}{
		{"no uuid", func(*Config) {}, deliver("", "p"), "", refusedEmpty},
		{"missing field", func(c *Config) { c.IdentityField = "event" }, deliver("u", "p"), "", `metadata field "event"`},
		{"Validate", func(c *Config) {
			c.Validate = func(*message.Message) error { return errors.New("no customer " + strings.Repeat("x", 400)) }
		}, deliver("u", "p"), "u", "Validate: no customer"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnv(t, func(c *Config, _ *fakeStore) { tt.cfg(c) })
			for range 2 {
				if _, err := e.counting()(tt.msg); err != nil {
					t.Fatalf("a refused message is acknowledged after its dead letter: %v", err)
				}
			}
			e.wantEffect(0)
			e.wantCounts(map[string]uint64{"Refused": 2})
			if len(e.store.letters) != 1 || len(e.store.receipts) != 0 {
				t.Fatalf("%d dead letters, %d receipts", len(e.store.letters), len(e.store.receipts))
			}
			l := e.store.letters[0]
			if l.Kind != receipts.KindRefused || string(l.Key) != tt.key || len(l.Fingerprint) != 32 || l.Consumer != "billing" ||
				l.Handler != "charge" || l.Topic != "orders" || string(l.Payload) != "p" || l.UUID != tt.msg.UUID {
				t.Errorf("dead letter %+v", l)
			}
			if !strings.Contains(l.Reason, tt.reason) || len(l.Reason) > maxReason+4 {
				t.Errorf("reason %q", l.Reason)
			}
		})
	}
}

// Messages that are refused with one and the same payload are different messages: each has a dead letter before its ack.
func TestRefusedMessagesAreKeptApart(t *testing.T) {
	with := func(uuid string, metadata ...string) *message.Message {
		msg := deliver(uuid, "{}")
		for i := 0; i < len(metadata); i += 2 {
			msg.Metadata.Set(metadata[i], metadata[i+1])
		}
		return msg
	}
	tests := []struct {
		name string
		cfg  func(*Config)
		msgs []*message.Message
	}{
		{"refused by Validate", func(c *Config) {
			c.Validate = func(*message.Message) error { return errors.New("no customer") }
		}, []*message.Message{with("a"), with("b"), with("c")}},
		{"missing field", func(c *Config) { c.IdentityField = "event" }, []*message.Message{with("a"), with("b"), with("")}},
		{"no uuid", func(*Config) {}, []*message.Message{
			with(""), with("", "k", "v"), with("", "k", "w"), with("", "kv", ""), with("", "k", "v", "l", "v"),
		}},
		{"own fingerprint", func(c *Config) {
			c.IdentityField = "event"
			c.Fingerprint = func(*message.Message) []byte { return []byte("all alike") }
		}, []*message.Message{with("a"), with("b")}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnv(t, func(c *Config, _ *fakeStore) { tt.cfg(c) })
			for range 2 {
				for _, msg := range tt.msgs {
					if _, err := e.counting()(msg); err != nil {
						t.Fatal(err)
					}
				}
			}
			if got := len(e.store.letters); got != len(tt.msgs) {
				t.Errorf("%d messages were refused and acknowledged, %d dead letters are there", len(tt.msgs), got)
			}
		})
	}
}
