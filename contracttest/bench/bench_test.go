package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/penstock-mq/penstock/contracttest/memstore"
	"github.com/penstock-mq/penstock/sdk"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The shape of bench.json, as a reader of it would write it down.
type file struct {
	Machine struct {
		Cores      int       `json:"cores"`
		GOMAXPROCS int       `json:"gomaxprocs"`
		CPU        string    `json:"cpu"`
		OS         string    `json:"os"`
		Arch       string    `json:"arch"`
		Go         string    `json:"go"`
		Date       time.Time `json:"date"`
		FlushUS    int       `json:"flush_us"`
	} `json:"machine"`
	Rounds int  `json:"rounds"`
	Quick  bool `json:"quick"`
	Rows   []struct {
		Study, Pair       string
		Window, Batch     int
		Contender, Metric string
		Unit              string
		Median, Min, Max  float64
		Rival             string
		Ratio             float64
	} `json:"rows"`
}

func TestQuickRunWritesAllItPromises(t *testing.T) {
	t.Parallel()
	out := t.TempDir()
	var stdout, stderr strings.Builder
	require.Zero(t, run([]string{"-quick", "-o", out}, &stdout, &stderr), stderr.String())

	content, err := os.ReadFile(filepath.Join(out, "bench.json"))
	require.NoError(t, err)
	decoder := json.NewDecoder(strings.NewReader(string(content)))
	decoder.DisallowUnknownFields()
	var got file
	require.NoError(t, decoder.Decode(&got))
	assert.Equal(t, 1, got.Rounds)
	assert.True(t, got.Quick)
	assert.Positive(t, got.Machine.Cores)
	assert.NotEmpty(t, got.Machine.Go)
	assert.NotZero(t, got.Machine.Date)

	found := map[string]int{}
	for _, r := range got.Rows {
		found[strings.Join([]string{r.Study, r.Contender, r.Unit, r.Rival}, " ")]++
		assert.NotEmpty(t, r.Pair)
		assert.NotEmpty(t, r.Metric)
		assert.Positive(t, r.Median, r.Metric)
		assert.LessOrEqual(t, r.Min, r.Median)
		assert.GreaterOrEqual(t, r.Max, r.Median)
		assert.Equal(t, r.Rival != "", r.Ratio > 0, "a ratio needs a rival, and a rival gives one")
	}
	want := map[string]int{
		"throughput nothing msg/s ": 1, "unprepared nothing msg/s ": 1,
		"throughput watermill msg/s ": 1, "throughput penstock msg/s watermill": 1, "throughput penstock msg/s loop": 1,
		"throughput penstock-batch msg/s watermill": 1, "throughput penstock-batch msg/s loop": 1, "throughput loop msg/s ": 1,
		"unprepared watermill msg/s ": 1, "unprepared penstock msg/s watermill": 1, "unprepared penstock msg/s loop": 1,
		"unprepared penstock-batch msg/s watermill": 1, "unprepared penstock-batch msg/s loop": 1, "unprepared loop msg/s ": 1,
		"batch-size penstock msg/s loop": 5, "batch-size penstock-batch msg/s loop": 5, "batch-size loop msg/s ": 5,
		"window watermill msg/s ": 5, "window penstock msg/s watermill": 5, "window penstock msg/s loop": 5, "window loop msg/s ": 5,
		"latency watermill ms ": 2, "latency penstock ms watermill": 2,
		"overhead penstock ns ": 2, "overhead penstock count ": 2, "overhead penstock bytes ": 2,
	}
	want["sleeping watermill msg/s "], want["sleeping penstock msg/s watermill"] = 1, 1 // on memstore
	for study, rows := range map[string][]string{
		"postgres": serverRows(), "mariadb": serverRows(),
		"pgx": {
			"nothing", "penstock", "penstock-queued/penstock", "penstock-queued/pipelined-loop",
			"penstock-queued-batch/penstock", "penstock-queued-batch/pipelined-loop", "pipelined-loop",
		},
		"sleeping": {"watermill", "penstock/watermill"},
		"receipts": {"0 receipts", "1000000 receipts/0 receipts"},
		"distance": {
			"watermill-16", "penstock/watermill-16", "penstock/loop", "penstock-queued/watermill-16", "penstock-queued/loop",
			"penstock-queued/pipelined-loop", "loop", "pipelined-loop",
		},
	} {
		if strings.Contains(stdout.String(), "not run: "+study) {
			assert.NotEqual(t, "all", os.Getenv("PENSTOCK_REQUIRE"), stdout.String())
			continue
		}
		for _, row := range rows {
			contender, rival, _ := strings.Cut(row, "/")
			want[study+" "+contender+" msg/s "+rival]++
			if study == "distance" {
				want[study+" "+contender+" msg/s "+rival]++
			}
		}
	}
	assert.Equal(t, want, found)
	assert.Contains(t, stdout.String(), "Its numbers mean nothing")
	for _, r := range got.Rows {
		assert.Contains(t, stdout.String(), r.Metric)
	}
	assertFolder(t, out, "bench.json", "throughput-batch.svg", "throughput-window.svg")
}

func serverRows() []string {
	rows := []string{"watermill", "watermill-16", "loop"}
	for _, plain := range []string{"watermill", "watermill-16", "loop"} {
		rows = append(rows, "penstock/"+plain, "penstock-batch/"+plain)
	}
	return rows
}

// assertFolder finds exactly these files: what was temporary is gone.
func assertFolder(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	assert.ElementsMatch(t, want, names)
}

// quick gives the options of a short run into a folder.
func quick(out string) options { return options{rounds: 1, quick: true, out: out} }

// with gives a study whose only contender is this one.
func with(c contender) []study {
	return []study{{name: "planted", pair: "memory → SQLite", window: 4, warmUp: 8, messages: 8, contenders: []contender{c}}}
}

// bump is the effect, without preparation.
func bump(ctx context.Context, tx *sql.Tx, payload []byte) error {
	_, err := tx.ExecContext(ctx, `UPDATE counters SET value = value + 1 WHERE name = ?`, counterOf(payload))
	return err
}

// A contender that is wrong ends the run, and nothing is written, so that its numbers get nowhere.
func TestWrongResultsFailTheRun(t *testing.T) {
	t.Parallel()
	bad := func(apply func(ctx context.Context, tx *sql.Tx, msg *message.Message) error) handlerOn {
		return func(_ context.Context, db *sql.DB, _ work, _ sdk.Limits) (message.NoPublishHandlerFunc, func() error, error) {
			return func(msg *message.Message) error {
				ctx := msg.Context()
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				_, err = tx.ExecContext(ctx, `INSERT INTO seen (id, at) VALUES (?, 0)`, msg.UUID)
				return errors.Join(err, apply(ctx, tx, msg), tx.Commit())
			}, func() error { return nil }, nil
		}
	}
	third := func(msg *message.Message) bool { return strings.HasSuffix(msg.UUID, "3") }
	for name, c := range map[string]struct {
		handler handlerOn
		want    string
	}{
		"an effect is missing": {bad(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			if third(msg) {
				return nil
			}
			return bump(ctx, tx, msg.Payload)
		}), "8 messages left 7 effects"},
		"an effect came twice": {bad(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			if third(msg) {
				return errors.Join(bump(ctx, tx, msg.Payload), bump(ctx, tx, msg.Payload))
			}
			return bump(ctx, tx, msg.Payload)
		}), "8 messages left 9 effects"},
		"an effect went elsewhere": {bad(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			if third(msg) {
				return bump(ctx, tx, []byte("c0000"))
			}
			return bump(ctx, tx, msg.Payload)
		}), "in 7 counters instead of 8"},
		"a receipt is missing": {bad(func(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
			var err error
			if third(msg) {
				_, err = tx.ExecContext(ctx, `DELETE FROM seen WHERE id = ?`, msg.UUID)
			}
			return errors.Join(err, bump(ctx, tx, msg.Payload))
		}), "8 messages left 7 receipts"},
		"a handler fails": {bad(func(_ context.Context, _ *sql.Tx, msg *message.Message) error {
			return errors.New("not today")
		}), "message message-00000"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out := t.TempDir()
			list := with(contender{name: "bad", round: sqlite().on(handWritten(), drain(c.handler))})
			err := bench(t.Context(), quick(out), list, io.Discard, io.Discard)
			require.ErrorContains(t, err, c.want)
			require.ErrorContains(t, err, "study planted, bad")
			assertFolder(t, out)
		})
	}
}

// Without a database the effects are counted, too.
func TestWrongResultsOnMemstoreFailTheRun(t *testing.T) {
	t.Parallel()
	list := with(contender{name: "bad", round: onMemstore(func(*memstore.Database, sdk.Limits) (message.NoPublishHandlerFunc, error) {
		return func(*message.Message) error { return nil }, nil
	})})
	err := bench(t.Context(), quick(t.TempDir()), list, io.Discard, io.Discard)
	require.ErrorContains(t, err, "8 messages left 0 effects")
}

func TestInterruptEndsCleanly(t *testing.T) {
	t.Parallel()
	for _, c := range studies(quick(""))[0].contenders {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			out := t.TempDir()
			began := false
			list := with(contender{name: c.name, round: func(ctx context.Context, w work) (outcome, error) {
				began = true
				time.AfterFunc(20*time.Millisecond, cancel)
				w.messages = 2000
				return c.round(ctx, w)
			}})
			require.Error(t, bench(ctx, quick(out), list, io.Discard, io.Discard))
			assert.True(t, began)
			assertFolder(t, out)
		})
	}
}

func TestContendersTakeTurns(t *testing.T) {
	t.Parallel()
	var order []string
	one := func(name string, rivals ...string) contender {
		calls := 0
		return contender{name: name, rivals: rivals, round: func(_ context.Context, w work) (outcome, error) {
			order = append(order, name)
			calls++
			amount := map[string]float64{"a": 10, "b": 40}[name] * float64(calls)
			return outcome{values: []value{{"speed", "km/h", amount}}, effects: sentTo(w.messages), receipts: noReceipts}, nil
		}}
	}
	r := runner{opts: options{rounds: 3}, dir: t.TempDir(), show: newDisplay(io.Discard, nil, 3)}
	rows, err := r.all(t.Context(), []study{{name: "s", warmUp: 1, messages: 2, contenders: []contender{one("a"), one("b", "a")}}})
	require.NoError(t, err)
	assert.Equal(t, "abababab", strings.Join(order, ""))
	require.Len(t, rows, 2)
	assert.Equal(t, row{Study: "s", Contender: "a", Metric: "speed", Unit: "km/h", Median: 30, Min: 20, Max: 40}, rows[0])
	assert.Equal(t, row{Study: "s", Contender: "b", Metric: "speed", Unit: "km/h", Median: 120, Min: 80, Max: 160, Rival: "a", Ratio: 4}, rows[1])
}

func TestRoundsTakeAboutTheirSpan(t *testing.T) {
	t.Parallel()
	s := study{warmUp: 500, span: 2 * time.Second}
	for took, want := range map[time.Duration]int{
		time.Second: 1000, 100 * time.Millisecond: 10_000, time.Minute: 125, time.Microsecond: mostMessages,
	} {
		assert.Equal(t, want, s.size(500, took), took)
	}
	assert.Equal(t, 4000, s.size(2000, time.Second))
	s.messages = 7
	assert.Equal(t, 7, s.size(500, time.Second))
}

// A warm-up that is over at once says nothing: it grows.
func TestWarmUpGrows(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		speed float64
		want  []int
		size  int
	}{
		"slow":     {1000, []int{500}, 1000},
		"fast":     {20_000, []int{500, 2000, 8000}, 20_000},
		"too fast": {1e7, []int{500, 2000, 8000, 32_000, mostMessages}, mostMessages},
	} {
		var got []int
		r := runner{opts: options{rounds: 1}, dir: t.TempDir(), show: newDisplay(io.Discard, nil, 1)}
		size, err := r.warmUp(t.Context(), study{warmUp: 500, span: time.Second}, contender{round: func(_ context.Context, w work) (outcome, error) {
			got = append(got, w.messages)
			return outcome{took: time.Duration(float64(w.messages) / c.speed * 1e9), effects: sentTo(w.messages), receipts: noReceipts}, nil
		}})
		require.NoError(t, err, name)
		assert.Equal(t, c.want, got, name)
		assert.InDelta(t, c.size, size, 1, name)
	}
}

// sentTo are the effects of so many messages.
func sentTo(messages int) map[string]int64 {
	effects := map[string]int64{}
	for i := range messages {
		effects[counterName(i)]++
	}
	return effects
}

// The loop takes as many connections as it is given, and still applies each message once.
func TestLoopOnSeveralConnections(t *testing.T) {
	t.Parallel()
	const messages = 500
	several := func(ctx context.Context, w work, db *sql.DB) (time.Duration, []value, error) {
		db.SetMaxOpenConns(3)
		driver, err := openBroker(ctx, w.messages)
		require.NoError(t, err)
		defer func() { assert.NoError(t, driver.Close(ctx)) }()
		require.NoError(t, driver.Send(ctx, topic, workload(w)))
		h, err := prepareByHand(ctx, db, w)
		require.NoError(t, err)
		defer func() { assert.NoError(t, h.close()) }()
		l := looping{driver: driver, apply: h.applyAll(db), window: 16, batch: 8, sorts: true}
		l.left.Store(int64(w.messages))
		took, err := l.run(ctx, 3)
		return took, nil, err
	}
	o, err := sqlite().on(handWritten(), several)(t.Context(), work{dir: t.TempDir(), messages: messages})
	require.NoError(t, err)
	require.NoError(t, o.verify(messages))
	assert.Positive(t, o.took)
}

// A batch size that a study gives reaches Penstock: so many messages need so many transactions.
func TestBatchSizeBoundsTransactions(t *testing.T) {
	t.Parallel()
	for name, with := range map[string]handlerOn{penstockName: withPenstock, penstockBatchName: withPenstockBatch} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const messages = 48
			for batch, least := range map[int]int{1: messages, 16: messages / 16} {
				transactions := 0
				count := func(ctx context.Context, w work, db *sql.DB) (time.Duration, []value, error) {
					took, values, err := drain(with)(ctx, w, db)
					return took, values, errors.Join(err, db.QueryRowContext(ctx, `SELECT count(*) FROM penstock_markers`).Scan(&transactions))
				}
				o, err := sqlite().on(penstock(), count)(t.Context(), work{dir: t.TempDir(), messages: messages, window: messages, batch: batch})
				require.NoError(t, err)
				require.NoError(t, o.verify(messages))
				assert.GreaterOrEqual(t, transactions, least, "batch %d", batch)
				assert.LessOrEqual(t, transactions, messages)
			}
		})
	}
}

func TestMedian(t *testing.T) {
	t.Parallel()
	assert.InDelta(t, 2, median([]float64{3, 1, 2}), 0)
	assert.InDelta(t, 2.5, median([]float64{4, 3, 1, 2}), 0)
	assert.InDelta(t, 1, median([]float64{1}), 0)
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	var trips trips
	for i := range 200 {
		trips.took = append(trips.took, time.Duration(200-i)*time.Millisecond)
	}
	assert.InDelta(t, 100, trips.percentile(50), 0)
	assert.InDelta(t, 198, trips.percentile(99), 0)
	trips.took = trips.took[:1]
	assert.InDelta(t, 1, trips.percentile(50), 0)
}

func TestCommandLine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"-help"}, 0, "-rounds"},
		{[]string{"-rounds", "0"}, exitUsage, "at least 1"},
		{[]string{"-messages", "-1"}, exitUsage, "-messages is -1"},
		{[]string{"-only", "nobody"}, exitUsage, "matches no study"},
		{[]string{"-only", "("}, exitUsage, "missing closing"},
		{[]string{"fast"}, exitUsage, `unexpected argument "fast"`},
		{[]string{"-fast"}, exitUsage, "-help lists the flags"},
		{[]string{"-quick", "-only", "overhead", "-o", "/dev/null/out"}, exitFailed, "make the folder of -o"},
	} {
		var stdout, stderr strings.Builder
		assert.Equal(t, c.code, run(c.args, &stdout, &stderr), c.args)
		assert.Contains(t, stdout.String()+stderr.String(), c.says)
	}
}

func TestOptionsChooseStudies(t *testing.T) {
	t.Parallel()
	opts, err := parseOptions([]string{"-only", "throughput|sleeping", "-messages", "300"})
	require.NoError(t, err)
	list := studies(opts)
	require.Len(t, list, 3)
	assert.Equal(t, []string{"throughput", "sleeping", "sleeping"}, []string{list[0].name, list[1].name, list[2].name})
	assert.Equal(t, 300, list[0].messages)
	assert.Equal(t, defaultRounds, opts.rounds)
	opts, err = parseOptions([]string{"-quick"})
	require.NoError(t, err)
	assert.Equal(t, 1, opts.rounds)
	for _, s := range studies(opts) {
		assert.LessOrEqual(t, s.messages, 200, s.name)
	}
}

func TestFigure(t *testing.T) {
	t.Parallel()
	for f, want := range map[float64]string{
		0: "0.00", 1.234: "1.23", 12.34: "12.3", 123.4: "123", 1234: "1,234", 1234567: "1,234,567", -1234: "-1,234", 999.9: "1,000",
	} {
		assert.Equal(t, want, figure(f))
	}
}

func TestTicksHoldTheRange(t *testing.T) {
	t.Parallel()
	assert.Equal(t, []float64{200, 500, 1000, 2000}, ticks(260, 1900))
	assert.Equal(t, []float64{200, 500}, ticks(200, 200), "both ends are apart")
	assert.Equal(t, []float64{1, 2, 5, 10}, ticks(1, 9))
}

func TestChartIsWellFormedAndNamesItsLines(t *testing.T) {
	t.Parallel()
	c := chart{title: "a < b & c", x: "x", y: "y"}
	for _, x := range []float64{1, 16, 256} {
		c.add("up", point{x, 100 * x, 90 * x, 110 * x})
		c.add("up", point{x, 1, 1, 1}) // the same measurement, compared with another rival
		c.add("flat", point{x, 100, 100, 100})
		c.add("close", point{x, 101, 100, 102})
	}
	drawing := c.svg()
	assert.NotContains(t, drawing, "%!", "a format and its arguments")
	decoder := xml.NewDecoder(strings.NewReader(drawing))
	var texts []string
	circles := 0
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		switch token := token.(type) {
		case xml.StartElement:
			if token.Name.Local == "circle" {
				circles++
			}
		case xml.CharData:
			texts = append(texts, string(token))
		}
	}
	assert.Equal(t, 9, circles)
	for _, want := range []string{"a < b & c", "up", "flat", "close", "256", "10,000"} {
		assert.Contains(t, texts, want)
	}
	_, y, _, _ := c.axes()
	at := c.labels(y)
	slices.Sort(at)
	for i := 1; i < len(at); i++ {
		assert.GreaterOrEqual(t, at[i]-at[i-1], 17.0, "labels do not cover each other")
	}
	drawn, err := draw(t.TempDir(), nil)
	require.NoError(t, err)
	assert.Empty(t, drawn, "nothing to draw")
}

// A contender looks the same in both pictures, and unlike the others.
func TestContendersHaveTheirColours(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	for _, s := range studies(quick("")) {
		for _, c := range s.contenders {
			if other := seen[colour(c.name)]; other != "" {
				assert.Equal(t, other, c.name)
			}
			seen[colour(c.name)] = c.name
		}
	}
	assert.Len(t, seen, 11)
	dir := t.TempDir()
	point := func(study, name string, window, batch int) row {
		return row{Study: study, Contender: name, Window: window, Batch: batch, Median: 2, Min: 1, Max: 3}
	}
	files, err := draw(dir, []row{
		point(batchStudy, loopName, 512, 16), point(batchStudy, penstockName, 512, 4), point(windowStudy, penstockName, 64, 0),
	})
	require.NoError(t, err)
	require.Equal(t, []string{filepath.Join(dir, "throughput-batch.svg"), filepath.Join(dir, "throughput-window.svg")}, files)
	for i, want := range []string{">4<", ">64<"} {
		drawing, err := os.ReadFile(files[i])
		require.NoError(t, err)
		assert.Contains(t, string(drawing), colour(penstockName))
		assert.Contains(t, string(drawing), want)
	}
}
