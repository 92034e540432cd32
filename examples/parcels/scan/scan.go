// Package scan holds the demo's input: the scan events of a parcel carrier, their validation, and a generator that makes
// any number of them, the same ones for the same seed.
package scan

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Event is one scan of one parcel at one depot. ID is the business identity: it names the scanner and its running
// number, so two events with one ID claim to be the same scan.
type Event struct {
	ID          string    `json:"id"`
	Parcel      string    `json:"parcel"`
	Status      string    `json:"status"`
	Depot       string    `json:"depot"`
	City        string    `json:"city"`
	Recipient   string    `json:"recipient"`
	WeightGrams int       `json:"weight_g"`
	At          time.Time `json:"at"`
}

// Statuses lists what a scan can say, in the order a parcel usually goes through them.
func Statuses() []string {
	return []string{
		"accepted", "sorted", "departed", "arrived", "customs", "out_for_delivery", "delivery_attempted", "delivered",
	}
}

// Parse decodes one event and validates it. The error says what is wrong with it; the event is usable only with nil.
func Parse(line []byte) (Event, error) {
	var e Event
	if err := json.Unmarshal(line, &e); err != nil {
		return Event{}, fmt.Errorf("scan event: %w", err)
	}
	if err := e.Validate(); err != nil {
		return e, fmt.Errorf("scan event %s: %w", e.ID, err)
	}
	return e, nil
}

// Validate tells why an event cannot be applied, whatever the database holds; nil where it can.
func (e Event) Validate() error {
	switch {
	case e.ID == "":
		return errors.New("no id")
	case !ValidTracking(e.Parcel):
		return errors.New("the tracking number's check digit is wrong")
	case !slices.Contains(Statuses(), e.Status):
		return errors.New("unknown status")
	case e.Depot == "":
		return errors.New("no depot")
	case e.WeightGrams <= 0 || e.WeightGrams > 31_500:
		return errors.New("weight is not between 1 g and 31.5 kg")
	case e.At.IsZero():
		return errors.New("no time")
	}
	return nil
}

// ValidTracking checks a tracking number in the form of the postal union's standard S10: two letters, eight digits, a
// check digit, two letters for the country.
func ValidTracking(s string) bool {
	if len(s) != 13 {
		return false
	}
	for i := range len(s) {
		digit := i >= 2 && i < 11
		if digit != (s[i] >= '0' && s[i] <= '9') || !digit && (s[i] < 'A' || s[i] > 'Z') {
			return false
		}
	}
	return s[10] == checkDigit(s[2:10])
}

// checkDigit weighs eight digits as S10 says.
func checkDigit(digits string) byte {
	sum := 0
	for i, weight := range []int{8, 6, 4, 2, 3, 5, 9, 7} {
		sum += int(digits[i]-'0') * weight
	}
	switch check := 11 - sum%11; check {
	case 10:
		return '0'
	case 11:
		return '5'
	default:
		return byte('0' + check)
	}
}
