package receipts

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"unicode/utf8"
)

// metadataBinary is the first byte of metadata that JSON cannot keep exactly. A JSON object starts with another byte.
const metadataBinary = 1

var errMetadata = errors.New("stored metadata is damaged")

// encodeMetadata gives a JSON object, which people can read in the database, where every string is valid UTF-8, else a
// length-prefixed form: encoding/json would replace invalid bytes silently.
func encodeMetadata(metadata map[string]string) ([]byte, error) {
	if len(metadata) == 0 {
		return []byte("{}"), nil
	}
	for k, v := range metadata {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return encodeBinaryMetadata(metadata), nil
		}
	}
	encoded, err := json.Marshal(metadata)
	if err != nil {
		return nil, fmt.Errorf("encoding metadata: %w", err)
	}
	return encoded, nil
}

func encodeBinaryMetadata(metadata map[string]string) []byte {
	b := binary.AppendUvarint([]byte{metadataBinary}, uint64(len(metadata)))
	for _, k := range slices.Sorted(maps.Keys(metadata)) {
		for _, s := range [...]string{k, metadata[k]} {
			b = binary.AppendUvarint(b, uint64(len(s)))
			b = append(b, s...)
		}
	}
	return b
}

// decodeMetadata reads either form. The map is never nil.
func decodeMetadata(b []byte) (map[string]string, error) {
	if len(b) == 0 {
		return nil, errMetadata
	}
	if b[0] == metadataBinary {
		return decodeBinaryMetadata(b[1:])
	}
	metadata := map[string]string{}
	if err := json.Unmarshal(b, &metadata); err != nil {
		return nil, fmt.Errorf("%w: %w", errMetadata, err)
	}
	if metadata == nil { // JSON null
		return nil, errMetadata
	}
	return metadata, nil
}

func decodeBinaryMetadata(b []byte) (map[string]string, error) {
	count, n := binary.Uvarint(b)
	if n <= 0 || count > uint64(len(b)) { // each entry takes two bytes at least: a larger count is damage
		return nil, errMetadata
	}
	b = b[n:]
	metadata := make(map[string]string, count)
	for range count {
		var pair [2]string
		for i := range pair {
			size, n := binary.Uvarint(b)
			if n <= 0 || size > uint64(len(b)-n) {
				return nil, errMetadata
			}
			pair[i] = string(b[n : n+int(size)]) //nolint:gosec // size is at most len(b)
			b = b[n+int(size):]                  //nolint:gosec // as above
		}
		metadata[pair[0]] = pair[1]
	}
	if len(b) != 0 {
		return nil, errMetadata
	}
	return metadata, nil
}
