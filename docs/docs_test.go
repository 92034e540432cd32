package docs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest"
)

// pages gives the README, the guides and the decisions, relative to this folder.
func pages(t *testing.T) []string {
	t.Helper()
	found := []string{"../README.md", "../CONTRIBUTING.md"}
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() && entry.Name() == "testdata" {
			return filepath.SkipDir
		}
		if err == nil && strings.HasSuffix(path, ".md") {
			found = append(found, path)
		}
		return err
	})
	require.NoError(t, err)
	return found
}

func TestEveryGoBlockCompiles(t *testing.T) {
	t.Parallel()
	var blocks []block
	for _, page := range pages(t) {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		found, err := goBlocks(page, string(text))
		require.NoError(t, err)
		blocks = append(blocks, found...)
	}
	require.NotEmpty(t, blocks)
	for _, err := range check(blocks) {
		t.Error(err)
	}
}

// The check is worth something only if it fails on what is broken, and says where.
func TestBrokenBlocksAreFound(t *testing.T) {
	t.Parallel()
	page := filepath.Join("testdata", "broken.md")
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	blocks, err := goBlocks(page, string(text))
	require.NoError(t, err)
	found := errors.Join(check(blocks)...)
	require.Error(t, found)
	for line, marked := range strings.Split(string(text), "\n") {
		if _, want, ok := strings.Cut(marked, "// want: "); ok {
			assert.Regexp(t, fmt.Sprintf(`%s:%d:.*%s`, page, line+1, want), found.Error())
		}
	}
	assert.NotContains(t, found.Error(), "right", "the blocks that are right")
	assert.Len(t, strings.Split(found.Error(), "\n"), strings.Count(string(text), "// want: "), found.Error())
}

func TestUnclosedBlockIsFound(t *testing.T) {
	t.Parallel()
	_, err := goBlocks("page.md", "text\n```go\nx := 1\n")
	require.ErrorContains(t, err, "page.md:2")
	_, err = goBlocks("page.md", "<!-- go\nvar x int\n")
	require.ErrorContains(t, err, "page.md:1")
}

// A link to a file of the repository leads somewhere.
func TestLinksLeadSomewhere(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([^)#\s]+)(#[^)\s]*)?\)`)
	code := regexp.MustCompile("(?s)```.*?```|`[^`\n]*`")
	image := regexp.MustCompile(`(?:src|href|srcset)="([^"#]+)"`)
	for _, page := range pages(t) {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		prose := code.ReplaceAllString(string(text), "")
		for _, match := range append(link.FindAllStringSubmatch(prose, -1), image.FindAllStringSubmatch(prose, -1)...) {
			if strings.Contains(match[1], "://") {
				continue
			}
			_, err := os.Stat(filepath.Join(filepath.Dir(page), match[1]))
			assert.NoError(t, err, "%s links to %s", page, match[1])
		}
	}
}

// What the project never claims, in any page.
func TestNoPageClaimsTooMuch(t *testing.T) {
	t.Parallel()
	claim := regexp.MustCompile(`(?i)exactly[- ]once`)
	for _, page := range pages(t) {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for number, line := range strings.Split(string(text), "\n") {
			if claim.MatchString(line) && !strings.Contains(strings.ToLower(line), "no ") {
				t.Errorf("%s:%d: %s", page, number+1, line)
			}
		}
	}
}

// A page that names a test or a clause names one that is there.
func TestNamedTestsAndClausesExist(t *testing.T) {
	t.Parallel()
	there := map[string]bool{}
	for _, clause := range contracttest.Clauses() {
		there[clause.ID[:3]] = true // without the suffix of a further check
	}
	for _, id := range contracttest.TxClauseIDs() {
		there[id[:3]] = true
	}
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	require.NoError(t, filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, match := range function.FindAllStringSubmatch(string(source), -1) {
			there[match[1]] = true
		}
		return err
	}))
	named := regexp.MustCompile("`(Test\\w+)`|\\b([PDOGLFHT]\\d\\d)\\b")
	for _, page := range pages(t) {
		if page == "contract.md" { // is generated from the clauses, and also lists the planned ones
			continue
		}
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, match := range named.FindAllStringSubmatch(string(text), -1) {
			assert.True(t, there[match[1]+match[2]], "%s names %s", page, match[1]+match[2])
		}
	}
}
