package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/contracttest/stage"
	"github.com/penstock-mq/penstock/middleware/receipts"
)

// goodDatabase holds what must be there after some events: three good ones, a conflict and an invalid one.
func goodDatabase(t *testing.T) (db *sql.DB, path string, want expectation) {
	t.Helper()
	clean, err := events(3, 4)
	require.NoError(t, err)
	conflicting := input{id: clean[0].id, payload: bytes.Replace(clean[0].payload, []byte(`"depot":"`), []byte(`"depot":"X`), 1)}
	invalid := input{id: clean[1].id, payload: bytes.Replace(clean[1].payload, []byte(`"status":"`), []byte(`"status":"?`), 1)}
	want = expect(append([]input{invalid, conflicting}, clean...))
	require.Equal(t, []int{3, 1, 1}, []int{len(want.valid), want.conflicts, want.refused})

	path = filepath.Join(t.TempDir(), "parcels.db")
	db, err = openDatabase(t.Context(), path)
	require.NoError(t, err)
	t.Cleanup(func() { _ = db.Close() })
	store, err := receipts.NewSQLite(db, receipts.SQLiteOptions{})
	require.NoError(t, err)
	require.NoError(t, store.Migrate(t.Context()))
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer tx.Rollback()
	for _, in := range clean {
		require.NoError(t, apply(t.Context(), tx, message.NewMessage(in.id, in.payload)))
		_, err := tx.ExecContext(t.Context(), `INSERT INTO penstock_receipts VALUES (x'61', CAST(? AS BLOB), x'62', zeroblob(16), 1, 0)`, in.id)
		require.NoError(t, err)
	}
	letter := `INSERT INTO penstock_dead_letters VALUES (NULL, x'61', x'62', x'63', '%s', ''` + strings.Repeat(`, x''`, 6) + `, 0)`
	for _, query := range []string{
		`INSERT INTO penstock_markers VALUES (zeroblob(16), 1, 0)`,
		fmt.Sprintf(letter, "conflict"),
		fmt.Sprintf(strings.Replace(letter, "x'62'", "x''", 1), "refused"),
	} {
		_, err := tx.ExecContext(t.Context(), query)
		require.NoError(t, err)
	}
	require.NoError(t, tx.Commit())
	return db, path, want
}

// Each way in which a database can be wrong is seen, by the complaint that is meant for it.
func TestTheVerdictSeesEveryFault(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		fault string // SQL
		want  []string
	}{
		"none": {},
		"applied twice": {
			fault: `INSERT INTO scans SELECT * FROM scans LIMIT 1`,
			want: []string{
				"4 effects for 3 distinct events", "1 events took effect more than once",
				"1 parcels are not where their scans say", "3 receipts for 4 effects",
			},
		},
		"applied twice, counted once": {
			fault: `INSERT INTO scans SELECT * FROM scans LIMIT 1;
				UPDATE parcels SET scans = (SELECT count(*) FROM scans s WHERE s.parcel = parcels.parcel)`,
			want: []string{"4 effects for 3 distinct events", "1 events took effect more than once", "3 receipts for 4 effects"},
		},
		"lost": {
			fault: `DELETE FROM parcels WHERE parcel = (SELECT parcel FROM scans ORDER BY id LIMIT 1);
				DELETE FROM scans WHERE id = (SELECT min(id) FROM scans)`,
			want: []string{"2 effects for 3 distinct events", "1 events are lost", "3 receipts for 2 effects"},
		},
		"one lost, one twice": {
			fault: `UPDATE scans SET id = (SELECT max(id) FROM scans) WHERE id = (SELECT min(id) FROM scans)`,
			want:  []string{"1 events took effect more than once", "1 events are lost", "1 effects are not what was sent"},
		},
		"not what was sent": {
			fault: `UPDATE scans SET weight_g = weight_g + 1 WHERE id = (SELECT max(id) FROM scans)`,
			want:  []string{"1 effects are not what was sent"},
		},
		"the parcel's state is old": {
			fault: `UPDATE parcels SET at = '2026-01-01T00:00:00Z' WHERE parcel = (SELECT max(parcel) FROM parcels)`,
			want:  []string{"1 parcels are not where their scans say"},
		},
		"the parcel's state is invented": {
			fault: `UPDATE parcels SET status = 'lost' WHERE parcel = (SELECT max(parcel) FROM parcels)`,
			want:  []string{"1 parcels are not where their scans say"},
		},
		"counted twice": {
			fault: `UPDATE parcels SET scans = scans + 1 WHERE parcel = (SELECT max(parcel) FROM parcels)`,
			want:  []string{"1 parcels are not where their scans say"},
		},
		"a receipt is missing": {
			fault: `DELETE FROM penstock_receipts WHERE identity_key = (SELECT max(identity_key) FROM penstock_receipts)`,
			want:  []string{"2 receipts for 3 effects"},
		},
		"torn": {
			fault: `DELETE FROM penstock_markers`,
			want:  []string{"0 receipts for 3 effects", "3 receipts are torn"},
		},
		"the conflict is missing": {
			fault: `DELETE FROM penstock_dead_letters WHERE kind = 'conflict'`,
			want:  []string{"0 conflicts diverted, 1 sent"},
		},
		"the invalid one is missing": {
			fault: `DELETE FROM penstock_dead_letters WHERE kind = 'refused'`,
			want:  []string{"0 invalid events diverted, 1 sent"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, path, want := goodDatabase(t)
			_, err := db.ExecContext(t.Context(), test.fault)
			require.NoError(t, err)
			result, err := inspect(t.Context(), path, want)
			require.NoError(t, err)
			assert.Equal(t, test.want, result.complaints())

			var out bytes.Buffer
			err = result.print(&out)
			if test.want == nil {
				require.NoError(t, err)
				assert.Contains(t, out.String(), "KEPT")
				return
			}
			require.ErrorIs(t, err, errVerdict)
			assert.Contains(t, out.String(), "BROKEN")
		})
	}
}

// A fault that did not fire proves nothing.
func TestTheVerdictWantsItsKills(t *testing.T) {
	t.Parallel()
	_, path, want := goodDatabase(t)
	result, err := inspect(t.Context(), path, want)
	require.NoError(t, err)
	result.planned, result.kills = 3, map[stage.Point]int{stage.BeforeCommit: 1, stage.AtRandom: 1}
	assert.Equal(t, []string{"2 kills instead of 3: nothing is proved"}, result.complaints())
}

func TestInspectSaysWhatItCannotRead(t *testing.T) {
	t.Parallel()
	_, err := inspect(t.Context(), filepath.Join(t.TempDir(), "none.db"), expectation{})
	require.ErrorContains(t, err, "check the effects")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, path, want := goodDatabase(t)
	_, err = inspect(ctx, path, want)
	require.ErrorIs(t, err, context.Canceled)
}

func TestLastWordsAreProgress(t *testing.T) {
	t.Parallel()
	line, err := json.Marshal(progress{Last: &stage.LastWords{Open: 3}})
	require.NoError(t, err)
	var p progress
	require.NoError(t, json.Unmarshal(line, &p))
	assert.Equal(t, &stage.LastWords{Open: 3}, p.Last)
	line, err = json.Marshal(progress{Replayed: 2})
	require.NoError(t, err)
	assert.NotContains(t, string(line), "Last")
}

func TestTellSaysWhatTheKillsDid(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	(&result{}).tell(&out)
	assert.Empty(t, out.String(), "no kill did anything")
	(&result{words: stage.LastWords{Open: 7, Committed: 4}}).tell(&out)
	assert.Equal(t, "Killed inside a transaction: the work of 7 messages was gone, and was done again.\n"+
		"Killed after COMMIT: 4 messages came again, and changed nothing.\n", out.String())
}
