package receipts_test

import (
	"database/sql"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func parked(scope, key, uuid string) receipts.Parked {
	return receipts.Parked{
		Scope: scope, OrderKey: key, Handler: "charge", Topic: "orders", UUID: uuid,
		Metadata: map[string]string{"kind": "scan"}, Payload: []byte("payload of " + uuid), At: noon,
	}
}

func parkedUUIDs(t *testing.T, s *receipts.SQLite, scope, key string, after int64, limit int) []string {
	t.Helper()
	rows, err := s.Parked(t.Context(), scope, key, after, limit)
	must(t, err)
	uuids := []string{}
	for i, row := range rows {
		if row.Position <= after || i > 0 && row.Position <= rows[i-1].Position {
			t.Errorf("position %d of %s after %d", row.Position, row.UUID, after)
		}
		uuids = append(uuids, row.UUID)
	}
	return uuids
}

func TestParkedMessagesKeepTheirOrder(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t), "synchronous=OFF")
		s := migrated(t, db)
		must(t, s.Park(t.Context(), []receipts.Parked{
			parked("s", "b", "b1"), parked("s", "a", "a1"), parked("s", "a", "a2"), parked("other", "a", "x1"),
		}))
		must(t, s.Park(t.Context(), []receipts.Parked{parked("s", "a", "a3"), parked("s", "A", "A1")}))
		must(t, s.Park(t.Context(), nil))
		keys, err := s.ParkedKeys(t.Context(), "s")
		must(t, err)
		if want := []receipts.ParkedKey{{OrderKey: "b", Messages: 1}, {OrderKey: "a", Messages: 3}, {OrderKey: "A", Messages: 1}}; !reflect.DeepEqual(keys, want) {
			t.Errorf("keys %v, want %v", keys, want)
		}
		if got := parkedUUIDs(t, s, "s", "a", 0, 9); !slices.Equal(got, []string{"a1", "a2", "a3"}) {
			t.Errorf("parked %v", got)
		}
		if got := parkedUUIDs(t, s, "s", "a", 0, 2); !slices.Equal(got, []string{"a1", "a2"}) {
			t.Errorf("the first two are %v", got)
		}
		rows, err := s.Parked(t.Context(), "s", "a", 0, 1)
		must(t, err)
		first := rows[0].Position
		if got := parkedUUIDs(t, s, "s", "a", first, 9); !slices.Equal(got, []string{"a2", "a3"}) {
			t.Errorf("behind the first are %v", got)
		}
		must(t, s.Unpark(t.Context(), []int64{first}))
		must(t, s.Unpark(t.Context(), []int64{first, 1 << 40})) // again, and one that never was
		must(t, s.Unpark(t.Context(), nil))
		if got := parkedUUIDs(t, s, "s", "a", 0, 9); !slices.Equal(got, []string{"a2", "a3"}) {
			t.Errorf("left are %v", got)
		}
		stats, err := s.Stats(t.Context())
		must(t, err)
		if stats.Parked != 5 {
			t.Errorf("%d messages are parked, want 5", stats.Parked)
		}
		for _, scope := range []string{"S", "s ", ""} {
			if keys, err := s.ParkedKeys(t.Context(), scope); err != nil || len(keys) != 0 {
				t.Errorf("scope %q: %v, %v", scope, keys, err)
			}
		}
	})
}

// A position is never used again: who reads behind the last one it knows must not miss what came later.
func TestParkedPositionsGrow(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		s := migrated(t, d.open(t, d.file(t), "synchronous=OFF"))
		last := int64(0)
		for _, uuid := range []string{"1", "2", "3"} {
			must(t, s.Park(t.Context(), []receipts.Parked{parked("s", "a", uuid)}))
			rows, err := s.Parked(t.Context(), "s", "a", last, 9)
			must(t, err)
			if len(rows) != 1 || rows[0].UUID != uuid {
				t.Fatalf("behind position %d: %+v, want %s", last, rows, uuid)
			}
			last = rows[0].Position
			must(t, s.Unpark(t.Context(), []int64{last})) // the table is empty again
		}
	})
}

// What a broker brings again, because it never learned that it was parked, is not parked twice. What only looks like it is.
func TestParkingTwice(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		s := migrated(t, d.open(t, d.file(t), "synchronous=OFF"))
		first := parked("s", "a", "1")
		same := parked("s", "a", "1")
		same.At, same.Handler = noon.Add(1), "renamed"
		otherPayload, otherMetadata := parked("s", "a", "1"), parked("s", "a", "1")
		otherPayload.Payload = []byte("other")
		otherMetadata.Metadata = map[string]string{"kind": "scan", "n": "2"}
		shifted := parked("s", "a", "1p") // the same bytes in a row, cut elsewhere
		shifted.Payload = []byte(strings.TrimPrefix("payload of 1", "p"))
		must(t, s.Park(t.Context(), []receipts.Parked{first, parked("s", "a", "2")}))
		must(t, s.Park(t.Context(), []receipts.Parked{same, otherPayload, otherMetadata, shifted, parked("s", "b", "1"), first}))
		if got := parkedUUIDs(t, s, "s", "a", 0, 9); !slices.Equal(got, []string{"1", "2", "1", "1", "1p"}) {
			t.Errorf("parked %v", got)
		}
		if got := parkedUUIDs(t, s, "s", "b", 0, 9); !slices.Equal(got, []string{"1"}) {
			t.Errorf("parked for another key %v", got)
		}
	})
}

// Every byte survives.
func TestParkedBytes(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		s := migrated(t, d.open(t, d.file(t), "synchronous=OFF"))
		for i, o := range hostileOutputs() {
			p := receipts.Parked{
				Scope: o.Scope, OrderKey: "k\x00\xff " + itoa(i), Handler: "h\xff", Topic: o.Topic, UUID: o.UUID,
				Metadata: o.Metadata, Payload: o.Payload, At: noon,
			}
			must(t, s.Park(t.Context(), []receipts.Parked{p}))
			rows, err := s.Parked(t.Context(), p.Scope, p.OrderKey, 0, 9)
			must(t, err)
			p.Position = int64(i + 1)
			if len(rows) != 1 || !reflect.DeepEqual(rows[0], p) {
				t.Errorf("parked %d: %.200v, want %.200v", i, rows, p)
			}
		}
		nothing := parked("s", "k", "")
		nothing.Metadata, nothing.Payload = nil, nil
		must(t, s.Park(t.Context(), []receipts.Parked{nothing}))
		rows, err := s.Parked(t.Context(), "s", "k", 0, 1)
		must(t, err)
		if rows[0].Metadata == nil || rows[0].Payload == nil || len(rows[0].Metadata)+len(rows[0].Payload) != 0 {
			t.Errorf("nothing came back as %v, %v", rows[0].Metadata, rows[0].Payload)
		}
	})
}

// Park is all or nothing.
func TestParkIsOneTransaction(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		s := migrated(t, db)
		for name, bad := range map[string]receipts.Parked{
			"no order key": parked("s", "", "x"), "long order key": parked("s", strings.Repeat("k", 513), "x"),
			"long scope": parked(strings.Repeat("s", 513), "a", "x"),
		} {
			if err := s.Park(t.Context(), []receipts.Parked{parked("s", "a", "1"), bad}); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
		if n := count(t, db, "SELECT count(*) FROM penstock_parked"); n != 0 {
			t.Errorf("%d messages are parked", n)
		}
		if _, err := s.Parked(t.Context(), "s", "a", 0, 0); err == nil {
			t.Error("limit 0: no error")
		}
		wantFreeLock(t, db)
		mustExec(t, db, "DROP TABLE penstock_parked")
		for name, err := range map[string]error{
			"Park":   s.Park(t.Context(), []receipts.Parked{parked("s", "a", "1")}),
			"Unpark": s.Unpark(t.Context(), []int64{1}),
		} {
			if err == nil {
				t.Errorf("%s without the table: no error", name)
			}
		}
		if _, err := s.ParkedKeys(t.Context(), "s"); err == nil {
			t.Error("ParkedKeys without the table: no error")
		}
		if _, err := s.Parked(t.Context(), "s", "a", 0, 1); err == nil {
			t.Error("Parked without the table: no error")
		}
		if _, err := s.Check(t.Context()); !errors.Is(err, receipts.ErrSchemaMissing) {
			t.Errorf("Check without the table: %v", err)
		}
	})
}

func TestDamagedParkedMetadata(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		s := migrated(t, db)
		must(t, s.Park(t.Context(), []receipts.Parked{parked("s", "a", "1")}))
		mustExec(t, db, "UPDATE penstock_parked SET metadata = x'ff'")
		if _, err := s.Parked(t.Context(), "s", "a", 0, 1); err == nil || !strings.Contains(err.Error(), "position 1") {
			t.Errorf("error %v", err)
		}
	})
}

// Version 1 of the code runs on version 2 of the schema, and version 2 of the code asks for it.
func TestSchemaTwo(t *testing.T) {
	onEachDriver(t, func(t *testing.T, d sqliteDriver) {
		db := d.open(t, d.file(t))
		migrations, err := receipts.SQLiteMigrations("")
		must(t, err)
		mustExec(t, db, migrations[0].SQL)
		s := storeOn(t, db)
		if _, err := s.Check(t.Context()); !errors.Is(err, receipts.ErrSchemaMissing) || !strings.Contains(err.Error(), "version 1") {
			t.Errorf("Check on version 1: %v", err)
		}
		must(t, s.Migrate(t.Context()))
		info, err := s.Check(t.Context())
		must(t, err)
		if info.Schema != len(migrations) {
			t.Errorf("schema %d after Migrate", info.Schema)
		}
		var compatible int
		must(t, db.QueryRow("SELECT compatible_from FROM penstock_schema WHERE version = 2").Scan(&compatible))
		if compatible != 1 {
			t.Errorf("version 2 says that code from version %d on can run on it", compatible)
		}
		mustExec(t, db, counters)
		process(t, s, "a")
		wantStats(t, s, 1, 0, 0)
		var none sql.NullString
		must(t, db.QueryRow("SELECT max(scope) FROM penstock_parked").Scan(&none))
		if none.Valid {
			t.Error("something is parked")
		}
	})
}
