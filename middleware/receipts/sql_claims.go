package receipts

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// identity is a claim's identity as a map key.
type identity struct{ scope, key string }

// freshClaim is a receipt that this transaction inserted, as far as Commit has to know it.
type freshClaim struct {
	scope string
	key   []byte
	at    int64
	call  int // of Claim
}

// freshClaims are the receipts that a transaction inserted and has not given up.
type freshClaims []freshClaim

// claimOrder checks the claims and gives the order to insert them in: by scope and key.
func claimOrder(claims []Claim) ([]int, error) {
	order := make([]int, len(claims))
	for i := range claims {
		if err := checkClaim(&claims[i]); err != nil {
			return nil, err
		}
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(strings.Compare(claims[a].Scope, claims[b].Scope), bytes.Compare(claims[a].Key, claims[b].Key))
	})
	for i := 1; i < len(order); i++ {
		if a, b := &claims[order[i-1]], &claims[order[i]]; a.Scope == b.Scope && bytes.Equal(a.Key, b.Key) {
			return nil, fmt.Errorf("identity key %q in scope %q is claimed twice in one call", b.Key, b.Scope)
		}
	}
	return order, nil
}

func checkClaim(c *Claim) error {
	switch {
	case len(c.Scope) > MaxScope:
		return fmt.Errorf("scope of %d bytes: the most is %d", len(c.Scope), MaxScope)
	case len(c.Key) == 0:
		return fmt.Errorf("empty identity key in scope %q", c.Scope)
	case len(c.Key) > MaxKey:
		return fmt.Errorf("identity key of %d bytes in scope %q: the most is %d", len(c.Key), c.Scope, MaxKey)
	case c.State != StateDone && c.State != StateDiverted:
		return fmt.Errorf("identity key %q in scope %q: unknown state %d", c.Key, c.Scope, c.State)
	}
	return nil
}

// claimRun gives how many claims at the head of order have one scope and state: what one statement takes.
func claimRun(claims []Claim, order []int) int {
	first, n := &claims[order[0]], 1
	for n < len(order) && claims[order[n]].Scope == first.Scope && claims[order[n]].State == first.State {
		n++
	}
	return n
}

// scopeRun gives how many claims at the head have one scope.
func scopeRun(claims []Claim) int {
	n := 1
	for n < len(claims) && claims[n].Scope == claims[0].Scope {
		n++
	}
	return n
}

// remember keeps the fresh claims for Commit, with keys of its own.
func (f *freshClaims) remember(claims []Claim, order []int, results []ClaimResult) {
	rows, size := 0, 0
	for _, i := range order {
		if results[i].Status == ClaimFresh {
			rows, size = rows+1, size+len(claims[i].Key)
		}
	}
	call := 1
	if n := len(*f); n > 0 {
		call = (*f)[n-1].call + 1
	}
	*f = slices.Grow(*f, rows)
	keys := make([]byte, 0, size)
	for _, i := range order {
		if results[i].Status == ClaimFresh {
			c := &claims[i]
			from := len(keys)
			keys = append(keys, c.Key...)
			*f = append(*f, freshClaim{scope: c.Scope, key: keys[from:len(keys):len(keys)], at: c.At.UnixMicro(), call: call})
		}
	}
}

// forget takes claims out that were given up.
func (f *freshClaims) forget(claims []Claim) {
	given := make(map[identity]bool, len(claims))
	for i := range claims {
		given[identity{claims[i].Scope, string(claims[i].Key)}] = true
	}
	*f = slices.DeleteFunc(*f, func(f freshClaim) bool { return given[identity{f.scope, string(f.key)}] })
}

// earlier are the identities that earlier calls of a transaction claimed; the set is made when somebody asks.
type earlier struct {
	fresh freshClaims
	set   map[identity]bool
}

func (e *earlier) has(claim *Claim) bool {
	if len(e.fresh) == 0 {
		return false
	}
	if e.set == nil {
		e.set = make(map[identity]bool, len(e.fresh))
		for _, f := range e.fresh {
			e.set[identity{f.scope, string(f.key)}] = true
		}
	}
	return e.set[identity{claim.Scope, string(claim.Key)}]
}

// heldResult is the answer to a claim whose receipt was found. One with this transaction's nonce was inserted just now,
// unless an earlier call did it.
func heldResult(nonce Nonce, earlier *earlier, claim *Claim, receipt Receipt, whole bool) ClaimResult {
	switch own := receipt.Nonce == nonce; {
	case own && !earlier.has(claim):
		return ClaimResult{Status: ClaimFresh}
	case own || whole: // the marker of this very transaction comes at the end
		return ClaimResult{Status: ClaimHeld, Receipt: receipt}
	default:
		return ClaimResult{Status: ClaimTorn, Receipt: receipt}
	}
}

// scanHeld reads a receipt, and which of the claims asked for it.
func scanHeld(scan scanFunc) (row int, r Receipt, whole bool, err error) {
	var nonce []byte
	var at int64
	if err := scan(&row, &r.Fingerprint, &nonce, &r.State, &at, &whole); err != nil {
		return 0, Receipt{}, false, err
	}
	if copy(r.Nonce[:], nonce) != len(r.Nonce) {
		return 0, Receipt{}, false, errors.New("a stored nonce is too short")
	}
	r.Fingerprint, r.At = blob(r.Fingerprint), time.UnixMicro(at).UTC()
	return row, r, whole, nil
}
