package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTheFileInTheRepositoryIsTheGeneratorsOutput(t *testing.T) {
	t.Parallel()
	kept, err := os.ReadFile(filepath.Join("..", "events.jsonl"))
	require.NoError(t, err)
	var out, errs bytes.Buffer
	require.NoError(t, run([]string{"-n", "3000", "-seed", "1"}, &out, &errs))
	assert.True(t, bytes.Equal(kept, out.Bytes()), "events.jsonl differs: run make generate")
	assert.Empty(t, errs.String())
}

func TestRun(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		args    []string
		wantErr string
		lines   int
	}{
		"some":         {args: []string{"-n", "12"}, lines: 12},
		"none":         {args: []string{"-n", "0"}, wantErr: "at least 1"},
		"negative":     {args: []string{"-n", "-3"}, wantErr: "at least 1"},
		"unknown flag": {args: []string{"-size", "3"}, wantErr: "not defined"},
		"no directory": {args: []string{"-n", "1", "-o", filepath.Join(t.TempDir(), "no", "such", "file")}, wantErr: "create the file"},
		"help":         {args: []string{"-help"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out, errs bytes.Buffer
			err := run(test.args, &out, &errs)
			if test.wantErr != "" {
				require.ErrorContains(t, err, test.wantErr)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, test.lines, bytes.Count(out.Bytes(), []byte("\n")))
		})
	}
}

func TestRunWritesAFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "events.jsonl")
	var out, errs bytes.Buffer
	require.NoError(t, run([]string{"-n", "40", "-seed", "9", "-o", path}, &out, &errs))
	assert.Empty(t, out.String())
	written, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, run([]string{"-n", "40", "-seed", "9"}, &out, &errs))
	assert.Equal(t, out.String(), string(written))
}
