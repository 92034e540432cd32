// Command gendocs writes docs/contract.md from the clauses: go run ./contracttest/internal/gendocs docs/contract.md.
// Without an argument it writes to standard output.
package main

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/penstock-mq/penstock/contracttest"
)

func main() {
	text := page()
	if len(os.Args) < 2 {
		fmt.Print(text)
		return
	}
	if err := os.WriteFile(os.Args[1], []byte(text), 0o644); err != nil { //nolint:gosec // a page of documentation
		fmt.Fprintln(os.Stderr, "gendocs:", err)
		os.Exit(1)
	}
}

const intro = `<!-- Written by contracttest/internal/gendocs. Change the clauses, not this page. -->
# The contract, clause by clause

Ids never change their meaning; clauses are added, not renumbered. A clause observes from outside (what was delivered, what
the broker still holds, what the database holds), never by trusting a return value. Where it needs a capability that a driver
does not declare, or a hook that a harness does not have, it is not run, and the report says so.

An id with a suffix is a further check of the same clause. P, D, O, G, F02–F04 and H test a driver; D05, D12, D16, L, F01
and F05 the engine above it; T the middleware, with a store and a driver; S a receipts store alone.

`

// chapter is a part of the page: the clauses of one letter.
type chapter struct{ letter, title string }

func chapters() []chapter {
	return []chapter{
		{"P", "Publish"},
		{"D", "Delivery and settlement"},
		{"O", "Order"},
		{"G", "Groups"},
		{"L", "Life"},
		{"F", "Faults"},
		{"H", "Honesty"},
		{"T", "Transactions"},
		{"S", "Receipts stores"},
	}
}

// row is a clause with its checks: the plain one and those with a suffix.
type row struct {
	id, text string
	checks   []contracttest.Clause // none: planned
	waitsFor string
}

func page() string {
	var b strings.Builder
	b.WriteString(intro)
	rows := contents()
	for _, ch := range chapters() {
		fmt.Fprintf(&b, "## %s\n\n| clause | rule | checked as |\n|---|---|---|\n", ch.title)
		for _, r := range rows {
			if strings.HasPrefix(r.id, ch.letter) {
				fmt.Fprintf(&b, "| %s | %s | %s |\n", r.id, escape(r.text), escape(r.checked()))
			}
		}
		b.WriteString("\n")
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

func contents() []row {
	var rows []row
	for _, c := range slices.Concat(contracttest.Clauses(), contracttest.TxClauses(), contracttest.StoreClauses()) {
		base, _, _ := strings.Cut(c.ID, "/")
		i := slices.IndexFunc(rows, func(r row) bool { return r.id == base })
		if i < 0 {
			i = len(rows)
			rows = append(rows, row{id: base, text: c.Text})
		}
		rows[i].checks = append(rows[i].checks, c)
	}
	for _, c := range contracttest.Planned() {
		rows = append(rows, row{id: c.ID, text: c.Text, waitsFor: c.Name})
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(a.id, b.id) })
	return rows
}

// checked tells under which ids a clause is checked, and what each of them needs.
func (r row) checked() string {
	if len(r.checks) == 0 {
		return "not yet: comes with " + r.waitsFor
	}
	var parts []string
	for _, c := range r.checks {
		part := "`" + c.ID + "`"
		var needs []string
		if c.Capability != "" {
			needs = append(needs, "["+c.Capability+"]")
		}
		needs = append(needs, c.Hooks...)
		if len(needs) > 0 {
			part += " " + strings.Join(needs, ", ")
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, "; ")
}

func escape(s string) string { return strings.ReplaceAll(s, "|", `\|`) }
