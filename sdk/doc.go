// Package sdk is the narrow waist of Penstock: what a broker has to implement ([Driver] and [Source]), and the
// delivery engine that turns any driver into a Watermill publisher and subscriber.
//
// # The flow of one message
//
// [NewPublisher] turns a Watermill message into a [Message] and calls [Driver.Send] until it returns nil or the time is
// up. [NewSubscriber] opens a [Source] for each subscription, keeps at most MaxInFlight deliveries unsettled, hands them
// out as Watermill messages, and turns each Ack or Nack into a [Settlement] that it reports through an [Observer].
//
// An acknowledgement says "I own this now, durably", never "I received the bytes". Redelivery is normal; a Send that
// timed out has an unknown outcome; nothing in this package claims that a message is delivered once.
//
// # Who implements what
//
// A driver author implements Driver and Source, declares [Capabilities], and runs the suite in package contracttest.
// The doc comments of those interfaces are the specification; ids such as P04 or D07 name the clause that tests a rule.
package sdk
