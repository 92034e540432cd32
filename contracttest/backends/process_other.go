//go:build !unix

package backends

import (
	"context"
	"errors"
	"os/exec"
	"syscall"
	"time"
)

// canStart says why private servers are not started on this system.
func canStart() error { return errors.New("private servers are started on Unix alone") }

// process stands for a server that is never started here.
type process struct{ pid int }

func (*process) start(string, []string) error               { return canStart() }
func (*process) ended() bool                                { return true }
func (*process) stop(syscall.Signal, time.Duration) error   { return canStart() }
func (*process) kill() error                                { return canStart() }
func (*process) freeze() error                              { return canStart() }
func (*process) thaw() error                                { return canStart() }
func runTool(_ context.Context, _ string, _ []string) error { return canStart() }
func give(string) error                                     { return canStart() }
func tail(string) string                                    { return "" }
func apart(*exec.Cmd)                                       {}
