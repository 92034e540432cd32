package docs

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/scanner"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// block is one Go block of a page. A block that does not start with "package" is a fragment: statements or declarations
// that use what an HTML comment before it declares, which readers do not see:
//
//	<!-- go
//	var router *message.Router
//	-->
//
// A block after a comment that names a file is a part of that file, word for word. It is compiled, and run, where the file is:
//
//	<!-- from clients/gorm.go -->
type block struct {
	page  string
	line  int // of its first line of code
	code  string
	setup string
	// setupLine is the first line of the setup.
	setupLine int
	from      string // the file it is a part of
}

// goBlocks finds the Go blocks of a page. A setup serves the next block.
func goBlocks(page, text string) ([]block, error) {
	var blocks []block
	var setup, from string
	setupLine := 1 // of a page whose first block has none
	lines := strings.Split(text, "\n")
	take := func(from int, end, what string) (code string, next int, err error) {
		for i := from; i < len(lines); i++ {
			if strings.TrimSpace(lines[i]) == end {
				return strings.Join(lines[from:i], "\n"), i, nil
			}
		}
		return "", 0, fmt.Errorf("%s:%d: %s is not closed", page, from, what)
	}
	for i := 0; i < len(lines); i++ {
		var err error
		switch strings.TrimSpace(lines[i]) {
		case "<!-- go":
			setupLine = i + 2
			setup, i, err = take(i+1, "-->", "the setup")
		case "```go":
			b := block{page: page, line: i + 2, setup: setup, setupLine: setupLine, from: from}
			b.code, i, err = take(i+1, "```", "the block")
			blocks = append(blocks, b)
			setup, from = "", ""
		default:
			if name, ok := strings.CutPrefix(lines[i], "<!-- from "); ok {
				from = strings.TrimSuffix(name, " -->")
			}
		}
		if err != nil {
			return nil, err
		}
	}
	return blocks, nil
}

// imports are the packages that fragments may use without importing them, by the name they are used under.
func imports() map[string]string {
	const module = "github.com/penstock-mq/penstock/"
	return map[string]string{
		"context": "context", "sql": "database/sql", "json": "encoding/json", "errors": "errors", "fmt": "fmt", "io": "io",
		"log": "log", "net": "net", "os": "os", "testing": "testing", "time": "time", "signal": "os/signal", "url": "net/url",
		"slog": "log/slog", "syscall": "syscall",

		"watermill":  "github.com/ThreeDotsLabs/watermill",
		"message":    "github.com/ThreeDotsLabs/watermill/message",
		"middleware": "github.com/ThreeDotsLabs/watermill/message/router/middleware",
		"cqrs":       "github.com/ThreeDotsLabs/watermill/components/cqrs",
		"gochannel":  "github.com/ThreeDotsLabs/watermill/pubsub/gochannel",

		"sdk": module + "sdk", "memory": module + "drivers/memory", "receipts": module + "middleware/receipts",
		"idempotency": module + "middleware/idempotency", "contracttest": module + "contracttest",
		"pipe": module + "contracttest/pipe", "handlertest": module + "contracttest/handlertest",
		"pgxpool": "github.com/jackc/pgx/v5/pgxpool", "pgxstore": module + "middleware/receipts/pgxstore",
		"backends": module + "contracttest/backends", "wire": module + "contracttest/wire",
	}
}

// check type-checks blocks. It finds what the compiler would, except variables of a fragment that are not used.
func check(blocks []block) []error {
	known := imports()
	fset := token.NewFileSet()
	files := make([]*ast.File, len(blocks))
	var errs []error
	needed := map[string]bool{}
	for i, b := range blocks {
		if b.from != "" {
			if err := b.sameAsFile(); err != nil {
				errs = append(errs, err)
			}
			continue
		}
		file, err := parse(fset, b, known)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		files[i] = file
		for _, spec := range file.Imports {
			path, _ := strconv.Unquote(spec.Path.Value)
			needed[path] = true
		}
	}
	lookup, err := exports(slices.Sorted(maps.Keys(needed)))
	if err != nil {
		return append(errs, err)
	}
	packages := importer.ForCompiler(fset, "gc", lookup)
	for i, b := range blocks {
		if files[i] == nil {
			continue
		}
		config := types.Config{Importer: packages, Error: func(err error) {
			var te types.Error
			if errors.As(err, &te) && te.Soft && b.fragment() && strings.Contains(te.Msg, "declared and not used") {
				return
			}
			errs = append(errs, err)
		}}
		_, _ = config.Check("example", fset, []*ast.File{files[i]}, nil)
	}
	return errs
}

// sameAsFile sees that the block is a part of its file.
func (b block) sameAsFile() error {
	text, err := os.ReadFile(filepath.Join(filepath.Dir(b.page), b.from))
	if err != nil {
		return fmt.Errorf("%s:%d: %w", b.page, b.line, err)
	}
	if !strings.Contains(string(text), "\n"+b.code+"\n") {
		return fmt.Errorf("%s:%d: the block is not in %s, word for word", b.page, b.line, b.from)
	}
	return nil
}

func (b block) fragment() bool { return !strings.HasPrefix(strings.TrimSpace(b.code), "package ") }

// parse gives a block as a file. Line directives make its positions those in the page.
func parse(fset *token.FileSet, b block, known map[string]string) (*ast.File, error) {
	parseAs := func(source string) (*ast.File, error) {
		return parser.ParseFile(fset, "block.go", source, parser.SkipObjectResolution)
	}
	here := fmt.Sprintf("//line %s:%d\n", b.page, b.line)
	if !b.fragment() {
		return parseAs(here + b.code)
	}
	head := "package example\n"
	body := fmt.Sprintf("//line %s:%d\n%s\n%s%s\n", b.page, b.setupLine, b.setup, here, b.code)
	if _, err := parseAs(head + body); err != nil { // not declarations: statements
		body = fmt.Sprintf("//line %s:%d\n%s\nfunc _() error {\n%s%s\npanic(0)\n}\n", b.page, b.setupLine, b.setup, here, b.code)
	}
	file, err := parseAs(head + body)
	if err != nil {
		var list scanner.ErrorList
		if errors.As(err, &list) {
			return nil, list[0]
		}
		return nil, err
	}
	for _, path := range used(file, known) {
		head += fmt.Sprintf("import %q\n", path)
	}
	return parseAs(head + body)
}

// used finds the known packages that a file uses. A variable of the same name hides the package only for the compiler,
// which then says that the import is not used: choose another name.
func used(file *ast.File, known map[string]string) []string {
	paths := map[string]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		if selector, ok := n.(*ast.SelectorExpr); ok {
			if name, ok := selector.X.(*ast.Ident); ok && known[name.Name] != "" {
				paths[known[name.Name]] = true
			}
		}
		return true
	})
	return slices.Sorted(maps.Keys(paths))
}

// exports asks the go command for the compiled form of packages and of all they import.
func exports(paths []string) (func(path string) (io.ReadCloser, error), error) {
	var out, stderr bytes.Buffer
	cmd := exec.Command("go", append([]string{"list", "-export", "-deps", "-f", "{{.ImportPath}}\t{{.Export}}"}, paths...)...)
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("compile what the blocks import: %w\n%s", err, stderr.String())
	}
	files := map[string]string{}
	for line := range strings.Lines(out.String()) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), "\t")
		files[path] = file
	}
	return func(path string) (io.ReadCloser, error) {
		if files[path] == "" {
			return nil, fmt.Errorf("package %s is unknown", path)
		}
		return os.Open(files[path])
	}, nil
}
