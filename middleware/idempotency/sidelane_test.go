package idempotency

import (
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// numbered makes n deliveries with the UUIDs 0, 1, 2 …
func numbered(n int) []*message.Message {
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = deliver(fmt.Sprint(i), "p")
	}
	return msgs
}

// T29: an identity that a transaction of another process keeps claimed keeps nobody but its own message waiting, however
// many share its batch and wherever in it it is.
func TestBlockedClaimDelaysNobodyElse(t *testing.T) {
	for _, n := range []int{1, 2, 3, 15, 16, 17, 100, 256} {
		for _, at := range []int{0, n / 2, n - 1} {
			for _, lanes := range []int{1, 2, 4} {
				t.Run(fmt.Sprintf("%d of %d in %d lanes", at, n, lanes), func(t *testing.T) {
					bubble(t, func(c *Config, s *fakeStore) {
						s.several(4)
						c.Lanes = lanes
					}, func(e *env) {
						e.claimElsewhere(fmt.Sprint(at), 5*time.Second)
						c := e.share(e.marking(nil), numbered(n)...)
						c.wantEndings()
						for i, o := range c.all {
							if i == at && (o.took < 5*time.Second || o.took > 5*time.Second+100*time.Millisecond) || i != at && o.took >= time.Second {
								e.Errorf("message %d took %v", i, o.took)
							}
						}
						if r := e.m.Report(); r.Handled != uint64(n) {
							e.Errorf("report %+v", r)
						}
					})
				})
			}
		}
	}
}
