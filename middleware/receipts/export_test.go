package receipts

import "fmt"

// FlowQueries gives the statements of the flow of messages, for a look at their plans.
func (s *SQLite) FlowQueries() map[string]string {
	pairs := tuples(3, 2)
	return map[string]string{
		"claim one":      s.q.claimOne,
		"claim many":     fmt.Sprintf(s.q.claimMany, tuples(3, 6)),
		"held one":       s.q.heldOne,
		"held many":      fmt.Sprintf(s.q.heldMany, pairs),
		"marker one":     s.q.markerOne,
		"count many":     fmt.Sprintf(s.q.countMany, pairs),
		"unsent":         s.q.unsent,
		"unsent of one":  s.q.unsentOf,
		"outputs of one": s.q.outputsOf,
		"mark sent one":  s.q.markSentOne,
		"mark sent many": fmt.Sprintf(s.q.markSentMany, pairs),
		"dead letters":   s.q.deadLetters,
		"resolve":        s.q.resolve,
	}
}

// EncodeMetadata and DecodeMetadata are the stored form of metadata.
var (
	EncodeMetadata = encodeMetadata
	DecodeMetadata = decodeMetadata
)
