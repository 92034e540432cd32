//go:build !unix

package backends

import (
	"context"
	"errors"
	"os/exec"
	"syscall"
	"time"
)

// cannotStart says why private servers are not started on this system.
func cannotStart() string { return "private servers are started on Unix alone" }

func refused() error { return errors.New(cannotStart()) }

// process stands for a server that is never started here.
type process struct{ pid int }

func (*process) start(string, []string) error               { return refused() }
func (*process) ended() bool                                { return true }
func (*process) stop(syscall.Signal, time.Duration) error   { return refused() }
func (*process) kill() error                                { return refused() }
func (*process) freeze() error                              { return refused() }
func (*process) thaw() error                                { return refused() }
func runTool(_ context.Context, _ string, _ []string) error { return refused() }
func give(string) error                                     { return refused() }
func tail(string) string                                    { return "" }
func apart(*exec.Cmd)                                       {}
