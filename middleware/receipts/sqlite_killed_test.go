package receipts_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

const killedEnv = "PENSTOCK_KILLED_IN_HANDLER"

// A process that dies right after its handler executed COMMIT: nothing of the batch is durable, or, without the hook, all of
// it is torn, so that nothing is taken for handled.
func TestKilledAfterHandlersCommit(t *testing.T) {
	if spec := os.Getenv(killedEnv); spec != "" {
		dieAfterCommit(t, strings.Split(spec, ","))
	}
	for mode, torn := range map[string]int{"prevented": 0, "found": 3} {
		t.Run(mode, func(t *testing.T) {
			onEachDriver(t, func(t *testing.T, d sqliteDriver) {
				path := d.file(t)
				db := d.open(t, path)
				s := checked(t, db)
				child := exec.Command(os.Args[0], "-test.run=^TestKilledAfterHandlersCommit$") //nolint:gosec // this very binary
				child.Env = append(os.Environ(), killedEnv+"="+strings.Join([]string{d.name, path, mode}, ","))
				out, err := child.CombinedOutput()
				if err == nil || strings.Contains(string(out), "FAIL") || !strings.Contains(string(out), "committed") {
					t.Fatalf("the child did not die in its handler: %v\n%s", err, out)
				}
				wantStats(t, s, 0, 0, torn)
				if got := effect(t, db, "a"); got != torn/3 {
					t.Errorf("the effect is %d, want %d", got, torn/3)
				}
				tx := begin(t, s)
				for i, r := range claimed(t, tx, claim("a"), claim("b"), claim("c")) {
					if torn := r.Status == receipts.ClaimTorn; torn != (mode == "found") {
						t.Errorf("claim %d of the redelivery has status %d", i, r.Status)
					}
				}
			})
		})
	}
}

func dieAfterCommit(t *testing.T, spec []string) {
	name, path, mode := spec[0], spec[1], spec[2]
	d := modernc()
	if name != d.name {
		d = mattn()
	}
	s, err := receipts.NewSQLite(d.open(t, path), receipts.SQLiteOptions{LeaveCommitHook: mode == "found"})
	must(t, err)
	tx, err := s.Begin(t.Context(), receipts.TxOptions{})
	must(t, err)
	claimed(t, tx, claim("a"), claim("b"), claim("c"))
	must(t, tx.Part(t.Context()))
	increment(t, tx, "a")
	_, _ = tx.Raw().Exec("COMMIT")
	_, _ = os.Stdout.WriteString("committed\n")
	self, err := os.FindProcess(os.Getpid())
	must(t, err)
	must(t, self.Kill())
	select {}
}
