package contracttest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
)

// possessions is what a process holds: goroutines by number, open files, children.
type possessions struct {
	goroutines map[string]string // number -> stack
	files      int
	children   int
}

// holding takes stock. In a bubble it counts the goroutines of that bubble only, so that bubbles beside each other do not
// see each other, and no files. Files and children are known on Linux only.
func (e *Env) holding() possessions {
	stacks := allStacks()
	p := possessions{goroutines: map[string]string{}}
	bubble := ""
	if e.h.Bubble {
		bubble = bubbleOf(stacks[0]) // the first one is the caller's
	}
	for _, stack := range stacks[1:] {
		if bubbleOf(stack) == bubble && !strings.Contains(stack, "os/signal.") {
			number, _, _ := strings.Cut(strings.TrimPrefix(stack, "goroutine "), " ")
			p.goroutines[number] = stack
		}
	}
	if !e.h.Bubble {
		p.files = len(names("/proc/self/fd/*"))
		p.children = children()
	}
	return p
}

// nothingLeft waits until the process holds no more than it did before.
func (e *Env) nothingLeft(ctx context.Context, before possessions) error {
	return e.eventually(ctx, func() error {
		now := e.holding()
		for number, stack := range now.goroutines {
			if _, was := before.goroutines[number]; !was {
				return fmt.Errorf("a goroutine is left:\n%s", stack)
			}
		}
		if now.files > before.files {
			return fmt.Errorf("%d files or connections are open, %d were before", now.files, before.files)
		}
		if now.children > before.children {
			return fmt.Errorf("%d child processes are there, %d were before", now.children, before.children)
		}
		return nil
	})
}

func allStacks() []string {
	const most = 64 << 20
	for size := 64 << 10; ; size *= 2 {
		buf := make([]byte, size)
		if n := runtime.Stack(buf, true); n < size || size >= most {
			return strings.Split(string(buf[:n]), "\n\n")
		}
	}
}

// bubbleOf gives the part of a goroutine's headline that names its bubble; empty: it is in none.
func bubbleOf(stack string) string {
	head, _, _ := strings.Cut(stack, "\n")
	_, bubble, _ := strings.Cut(head, "synctest bubble ")
	number, _, _ := strings.Cut(bubble, "]")
	return number
}

func names(pattern string) []string {
	found, _ := filepath.Glob(pattern) // the pattern is well formed
	return found
}

func children() int {
	n := 0
	for _, name := range names("/proc/self/task/*/children") {
		list, err := os.ReadFile(name) //nolint:gosec // the kernel's own file
		if err == nil {
			n += len(strings.Fields(string(list)))
		}
	}
	return n
}
