package sdk

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

// One lost source is one error in the log; what follows from it, and what is tried again, is information.
func TestTheLogTellsFaultsFromTheirConsequences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := watermill.NewCaptureLogger()
		d := newFake(confirming())
		r := subscribed(t, d, SubscriberConfig{Logger: log})
		d.putIDs("t", "g", "a", "b")
		a, b := r.next(), r.next()
		time.Sleep(time.Second)
		d.cut()
		synctest.Wait()
		a.Ack()
		b.Nack()
		r.next().Ack()
		r.next().Ack()
		r.close()
		captured := log.Captured()
		failures, notes := captured[watermill.ErrorLogLevel], captured[watermill.InfoLogLevel]
		if len(failures) != 1 || failures[0].Fields["topic"] != "t" || failures[0].Fields["group"] != "g" {
			t.Errorf("errors %+v", failures)
		}
		if len(notes) != 2 || notes[0].Fields["message_uuid"] == nil {
			t.Errorf("notes %+v", notes)
		}
	})
}
