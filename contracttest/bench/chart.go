package main

import (
	"encoding/xml"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
)

// draw draws the studies that have a picture into a folder and gives the files.
func draw(dir string, rows []row) (files []string, err error) {
	for _, picture := range []struct {
		file, study string
		x           func(r row) int
		chart       chart
	}{
		{"throughput-batch.svg", batchStudy, func(r row) int { return r.Batch }, chart{
			title: "memory → SQLite: throughput against batch size", x: "messages in one transaction, at most", y: "messages per second",
		}},
		{"throughput-window.svg", windowStudy, func(r row) int { return r.Window }, chart{
			title: "memory → SQLite: throughput against window", x: "window: messages in flight", y: "messages per second",
		}},
	} {
		c := picture.chart
		for _, r := range rows {
			if r.Study == picture.study {
				c.add(r.Contender, point{x: float64(picture.x(r)), y: r.Median, low: r.Min, high: r.Max})
			}
		}
		if len(c.lines) == 0 {
			continue
		}
		file := filepath.Join(dir, picture.file)
		if err := replace(file, []byte(c.svg())); err != nil {
			return files, err
		}
		files = append(files, file)
	}
	return files, nil
}

// chart is a plot of lines over two logarithmic axes. Every point shows its range.
type chart struct {
	title, x, y string
	lines       []line
}

type line struct {
	name   string
	points []point
}

type point struct{ x, y, low, high float64 }

// add appends a point to the line of that name. The same x again is the same measurement.
func (c *chart) add(name string, p point) {
	i := slices.IndexFunc(c.lines, func(l line) bool { return l.name == name })
	if i < 0 {
		i = len(c.lines)
		c.lines = append(c.lines, line{name: name})
	}
	l := &c.lines[i]
	if !slices.ContainsFunc(l.points, func(q point) bool { return q.x == p.x }) {
		l.points = append(l.points, p)
	}
}

// The picture's measures, in pixels.
const (
	chartWidth, chartHeight = 760, 440
	plotLeft, plotRight     = 84, 628
	plotTop, plotBottom     = 52, 380
)

// axis maps values to pixels by their logarithm.
type axis struct{ min, max, from, to float64 }

func (a axis) at(v float64) float64 {
	return a.from + (a.to-a.from)*math.Log(v/a.min)/math.Log(a.max/a.min)
}

// colour gives a contender the same colour in every picture; people with colour-blindness can tell them apart.
func colour(name string) string {
	switch name {
	case watermillName:
		return "#d55e00"
	case penstockName:
		return "#0072b2"
	case penstockBatchName:
		return "#56b4e9"
	case loopName:
		return "#009e73"
	case queuedName:
		return "#e69f00"
	case queuedBatchName:
		return "#999999"
	case pipelineName:
		return "#000000"
	case nothingName:
		return "#f0e442"
	case "0 receipts":
		return "#b3cde3"
	case "1000000 receipts":
		return "#6497b1"
	case "10000000 receipts":
		return "#03396c"
	default:
		return "#cc79a7"
	}
}

// axes chooses ranges that hold all points, and the values to be labelled.
func (c *chart) axes() (x, y axis, xs, ys []float64) {
	low, high := math.Inf(1), 0.0
	for _, l := range c.lines {
		for _, p := range l.points {
			if !slices.Contains(xs, p.x) {
				xs = append(xs, p.x)
			}
			low, high = min(low, p.low), max(high, p.high)
		}
	}
	slices.Sort(xs)
	x = axis{min: xs[0] / 1.2, max: xs[len(xs)-1] * 1.2, from: plotLeft, to: plotRight}
	ys = ticks(low, high)
	y = axis{min: ys[0], max: ys[len(ys)-1], from: plotBottom, to: plotTop}
	return x, y, xs, ys
}

// ticks gives 1, 2 and 5 times the powers of ten from just below low to just above high.
func ticks(low, high float64) []float64 {
	var found []float64
	for power := math.Pow(10, math.Floor(math.Log10(max(low, 1e-3)))); ; power *= 10 {
		for _, digit := range []float64{1, 2, 5} {
			v := digit * power
			if v <= low {
				found = found[:0]
			}
			if found = append(found, v); v > high {
				return found
			}
		}
	}
}

// svg draws.
func (c *chart) svg() string {
	x, y, xs, ys := c.axes()
	var b strings.Builder
	put := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	put(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" `+
		`font-family="sans-serif" font-size="13" fill="#222222">`, chartWidth, chartHeight)
	put(`<title>%s</title>`, escape(c.title))
	put(`<rect width="%d" height="%d" fill="#ffffff"/>`, chartWidth, chartHeight)
	put(`<text x="%d" y="28" font-size="16" font-weight="bold">%s</text>`, plotLeft, escape(c.title))
	for _, v := range ys {
		put(`<line x1="%d" x2="%d" y1="%.1f" y2="%.1[3]f" stroke="#dddddd"/>`, plotLeft, plotRight, y.at(v))
		put(`<text x="%d" y="%.1f" text-anchor="end">%s</text>`, plotLeft-8, y.at(v)+4.5, whole(v))
	}
	for _, v := range xs {
		put(`<line x1="%.1f" x2="%.1[1]f" y1="%d" y2="%d" stroke="#888888"/>`, x.at(v), plotBottom, plotBottom+5)
		put(`<text x="%.1f" y="%d" text-anchor="middle">%s</text>`, x.at(v), plotBottom+20, whole(v))
	}
	put(`<line x1="%d" x2="%d" y1="%d" y2="%[3]d" stroke="#888888"/>`, plotLeft, plotRight, plotBottom)
	put(`<text x="%d" y="%d" text-anchor="middle">%s</text>`, (plotLeft+plotRight)/2, plotBottom+44, escape(c.x))
	put(`<text transform="translate(18 %d) rotate(-90)" text-anchor="middle">%s</text>`, (plotTop+plotBottom)/2, escape(c.y))
	labels := c.labels(y)
	for i, l := range c.lines {
		put(`<g stroke="%s" fill="%[1]s" stroke-width="2">`, colour(l.name))
		var path strings.Builder
		for _, p := range l.points {
			fmt.Fprintf(&path, "%.1f,%.1f ", x.at(p.x), y.at(p.y))
			put(`<line x1="%.1f" x2="%.1[1]f" y1="%.1f" y2="%.1f" stroke-width="1.5"/>`, x.at(p.x), y.at(p.low), y.at(p.high))
			put(`<circle cx="%.1f" cy="%.1f" r="3.5" stroke="none"/>`, x.at(p.x), y.at(p.y))
		}
		put(`<polyline points="%s" fill="none"/>`, strings.TrimSpace(path.String()))
		put(`<text x="%d" y="%.1f" stroke="none">%s</text>`, plotRight+8, labels[i]+4.5, escape(l.name))
		put(`</g>`)
	}
	put(`</svg>`)
	return b.String()
}

// labels places the lines' names beside their last points, apart from each other.
func (c *chart) labels(y axis) []float64 {
	const apart = 17
	at := make([]float64, len(c.lines))
	order := make([]int, len(c.lines))
	for i, l := range c.lines {
		order[i] = i
		at[i] = y.at(l.points[len(l.points)-1].y)
	}
	slices.SortFunc(order, func(i, j int) int { return int(at[i] - at[j]) })
	for n := 1; n < len(order); n++ {
		at[order[n]] = max(at[order[n]], at[order[n-1]]+apart)
	}
	return at
}

// whole shows a value of an axis.
func whole(v float64) string {
	if v < 1 {
		return fmt.Sprint(v)
	}
	return strings.TrimSuffix(strings.TrimSuffix(figure(v), ".00"), ".0")
}

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a strings.Builder takes everything
	return b.String()
}
