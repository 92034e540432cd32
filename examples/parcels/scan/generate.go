package scan

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// How often the input itself is wrong, in events: a scanner whose counter was reset reuses an id for another parcel, a
// scale reports nonsense, and of those some scans are sent again, corrected, under the same id.
const (
	everyConflict  = 180
	everyInvalid   = 250
	everyCorrected = 2 // of the invalid ones
)

// Generate writes n events as JSON lines, oldest first. The same n and seed give the same bytes. It holds the events in
// memory, about 300 bytes each.
func Generate(w io.Writer, n int, seed uint64) error {
	out := bufio.NewWriter(w)
	for _, e := range Events(n, seed) {
		line, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("encode event %s: %w", e.ID, err)
		}
		if _, err := out.Write(append(line, '\n')); err != nil {
			return fmt.Errorf("write event %s: %w", e.ID, err)
		}
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("write events: %w", err)
	}
	return nil
}

// Events makes n events, oldest first.
func Events(n int, seed uint64) []Event {
	g := generator{rnd: rand.New(rand.NewPCG(seed, 0x9e3779b97f4a7c15)), counters: map[string]int{}}
	events := make([]Event, 0, n+8)
	for len(events) < n {
		events = append(events, g.journey()...)
	}
	slices.SortStableFunc(events, func(a, b Event) int {
		return cmp.Or(a.At.Compare(b.At), strings.Compare(a.Parcel, b.Parcel))
	})
	events = events[:max(n, 0)]
	for i := range events {
		events[i].ID = g.scanID(events[i].Depot)
	}
	g.spoil(events)
	return events
}

type generator struct {
	rnd      *rand.Rand
	counters map[string]int // scans made so far, by scanner
	parcels  int
}

type depot struct{ code, city, country string }

func depots() []depot {
	return []depot{
		{"BER2", "Berlin", "DE"},
		{"CGN1", "Köln", "DE"},
		{"LDZ1", "Łódź", "PL"},
		{"ATH1", "Αθήνα", "GR"},
		{"KBP3", "Київ", "UA"},
		{"CAI1", "القاهرة", "EG"},
		{"NRT2", "東京", "JP"},
		{"ICN1", "서울", "KR"},
		{"SCQ1", "A Coruña", "ES"},
		{"REK1", "Reykjavík", "IS"},
		{"HAN1", "Hà Nội", "VN"},
		{"DUB1", "Dublin", "IE"},
	}
}

func recipients() []string {
	return []string{
		"Jürgen Weiß", "Żaneta Wójcik", "Ελένη Παπαδοπούλου", "Олександр Шевченко", "ليلى حسن", "佐藤 花子", "김민준",
		"Iñaki Núñez", "Þórdís Björnsdóttir", "Nguyễn Thị Hoa", "Aoife O’Sullivan", "Zoë d’Hondt", "François Lefèvre",
		"Ana \"Nina\" Kovač", "Lars Sørensen", "Maria do Céu",
	}
}

// journey makes one parcel's scans: accepted, over one to three depots, perhaps through customs, to the door.
func (g *generator) journey() []Event {
	all := depots()
	from, to := all[g.rnd.IntN(len(all))], all[g.rnd.IntN(len(all))]
	names := recipients()
	base := Event{
		Parcel:      g.tracking(from.country),
		Recipient:   names[g.rnd.IntN(len(names))],
		WeightGrams: 20 + int(g.rnd.ExpFloat64()*1800)%31_000,
	}
	// A parcel is accepted every 90 s on average, so that journeys overlap and any number of events keeps the same density.
	at := time.Date(2026, time.March, 2, 5, 30, 0, 0, time.UTC).Add(time.Duration(g.parcels) * 90 * time.Second)
	g.parcels++

	var journey []Event
	add := func(status string, d depot, after time.Duration) {
		at = at.Add(time.Minute + time.Duration(g.rnd.Int64N(int64(after)))).Truncate(time.Second)
		e := base
		e.Status, e.Depot, e.City, e.At = status, d.code, d.city, at
		journey = append(journey, e)
	}
	add("accepted", from, time.Hour)
	add("sorted", from, 2*time.Hour)
	if from != to {
		add("departed", from, 3*time.Hour)
		add("arrived", to, 9*time.Hour)
		if from.country != to.country && g.rnd.IntN(2) == 0 {
			add("customs", to, 6*time.Hour)
		}
	}
	add("out_for_delivery", to, 4*time.Hour)
	if g.rnd.IntN(8) == 0 {
		add("delivery_attempted", to, 3*time.Hour)
		add("out_for_delivery", to, 20*time.Hour)
	}
	add("delivered", to, 5*time.Hour)
	return journey
}

func (g *generator) tracking(country string) string {
	digits := fmt.Sprintf("%08d", g.rnd.IntN(100_000_000))
	return fmt.Sprintf("R%c%s%c%s", 'A'+rune(g.rnd.IntN(26)), digits, checkDigit(digits), country)
}

// scanID names the scanner and counts its scans.
func (g *generator) scanID(depotCode string) string {
	scanner := fmt.Sprintf("%s-%02d", depotCode, 1+g.rnd.IntN(6))
	g.counters[scanner]++
	return fmt.Sprintf("%s-%06d", scanner, g.counters[scanner])
}

// spoil gives some events an id that is taken, and makes some invalid; every second invalid one is followed by the same
// scan, corrected.
func (g *generator) spoil(events []Event) {
	for i := everyConflict - 1; i < len(events); i += everyConflict {
		events[i].ID = events[i-1-g.rnd.IntN(min(i, 40))].ID
	}
	for i, nth := everyInvalid-1, 0; i < len(events)-1; i, nth = i+everyInvalid, nth+1 {
		if nth%everyCorrected == 0 {
			corrected := events[i]
			corrected.At = events[i+1].At
			events[i+1] = corrected
		}
		switch nth % 3 {
		case 0:
			events[i].WeightGrams = -1
		case 1:
			events[i].Status = "???"
		default:
			events[i].Parcel = strings.ToLower(events[i].Parcel)
		}
	}
}
