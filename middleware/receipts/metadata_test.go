package receipts_test

import (
	"maps"
	"testing"
	"testing/quick"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestMetadataKeepsEveryByte(t *testing.T) {
	bytewise := func(keys, values [][]byte) bool {
		metadata := map[string]string{}
		for i, k := range keys {
			v := ""
			if i < len(values) {
				v = string(values[i])
			}
			metadata[string(k)] = v
		}
		encoded, err := receipts.EncodeMetadata(metadata)
		if err != nil {
			return false
		}
		decoded, err := receipts.DecodeMetadata(encoded)
		return err == nil && maps.Equal(decoded, metadata)
	}
	if err := quick.Check(bytewise, &quick.Config{MaxCount: 500}); err != nil {
		t.Error(err)
	}
	text := func(metadata map[string]string) bool {
		encoded, err := receipts.EncodeMetadata(metadata)
		if err != nil {
			return false
		}
		decoded, err := receipts.DecodeMetadata(encoded)
		return err == nil && encoded[0] == '{' && maps.Equal(decoded, metadata)
	}
	if err := quick.Check(text, nil); err != nil {
		t.Error(err)
	}
	if encoded, _ := receipts.EncodeMetadata(nil); string(encoded) != "{}" {
		t.Errorf("no metadata is stored as %q", encoded)
	}
}

func FuzzDecodeMetadata(f *testing.F) {
	for _, seed := range []string{
		"", "{}", "null", "[]", `{"a":1}`, `{"a":"b"}`, "\x01", "\x01\x00", "\x01\x01\x01a\x01b", "\x01\x02\x00\x00",
		"\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "\x01\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "\x02", "\x01\x01\x00\x00x",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		metadata, err := receipts.DecodeMetadata(b)
		if err != nil {
			return
		}
		encoded, err := receipts.EncodeMetadata(metadata)
		if err != nil {
			t.Fatal(err)
		}
		again, err := receipts.DecodeMetadata(encoded)
		if err != nil || !maps.Equal(again, metadata) {
			t.Fatalf("%q decodes to %q, then to %q, %v", b, metadata, again, err)
		}
	})
}
