package backends

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// MountRefused is the error of a server with a disk of its own where we may not mount one.
type MountRefused struct{ Reason string } //nolint:errname // like Missing

// Error names the right that is missing.
func (e *MountRefused) Error() string {
	return "a disk of its own needs the right to mount a file system (root, CAP_SYS_ADMIN): " + e.Reason
}

// mountMemory mounts a file system in memory. The watchdog unmounts it.
func mountMemory(ctx context.Context, path string, size int64) error {
	if os.Geteuid() != 0 {
		return &MountRefused{Reason: "we are not root"}
	}
	out, err := exec.CommandContext(ctx, "mount", "-t", "tmpfs", "-o", "mode=0700,size="+strconv.FormatInt(size, 10),
		"penstock-test", path).CombinedOutput()
	if err != nil {
		return &MountRefused{Reason: fmt.Sprintf("mount: %v: %s", err, strings.TrimSpace(string(out)))}
	}
	return nil
}
