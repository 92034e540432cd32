package main

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// TestPageIsCurrent compares the page in the repository with what the clauses say now.
func TestPageIsCurrent(t *testing.T) {
	text, err := os.ReadFile("../../../docs/contract.md")
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != page() {
		t.Error("docs/contract.md is out of date: go run ./contracttest/internal/gendocs docs/contract.md")
	}
}

// TestEveryNumberIsThere: the contract's numbers have no holes, so a clause that is neither checked nor planned shows.
func TestEveryNumberIsThere(t *testing.T) {
	want := strings.Fields(`
		P01 P02 P03 P04 P05 P06 P07 P08 P09
		D01 D02 D03 D04 D05 D06 D07 D08 D09 D10 D11 D12 D13 D14 D15 D16 D17 D18
		O01 O02 O03 O04 G01 G02 G03 L01 L02 L03 L04 L05 L06 F01 F02 F03 F04 F05 H01
		T01 T02 T03 T04 T05 T06 T07 T08 T09 T10 T11 T12 T13 T14 T15 T16 T17 T18 T19 T20 T21 T22 T23 T24 T25 T26 T27 T28
		T29 T30 T31 T32 T33
		S01 S02 S03 S04 S05 S06 S07 S08 S09 S10 S11 S12 S13 S14 S15 S16 S17 S18 S19 S20 S21 S22 S23 S24 S25 S26 S27 S28 S29
		S30 S31 S32`)
	slices.Sort(want)
	var got []string
	for _, r := range contents() {
		got = append(got, r.id)
		if r.text == "" {
			t.Errorf("%s has no text", r.id)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("clauses %q, want %q", got, want)
	}
}

func TestEveryClauseHasItsChapter(t *testing.T) {
	for _, r := range contents() {
		if !strings.Contains(page(), "| "+r.id+" |") {
			t.Errorf("%s is not on the page", r.id)
		}
	}
}
