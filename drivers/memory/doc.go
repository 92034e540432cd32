// Package memory is the reference driver: a broker inside the process, with everything a driver can promise.
//
// A [Network] holds brokers by name. [Network.Open] has the shape that an sdk.Registry takes, so that memory://orders
// opened twice is the same broker; [Network.Driver] is the same for code, and [Network.Broker] gives the operator's view
// of a broker and the faults a test wants to inject.
//
// # What is durable
//
// The durable thing is the network. Messages outlive every driver opened on it, [Broker.Disconnect] and
// [Broker.Restart]; they do not outlive the process. Capabilities.Durable is meant in this sense.
//
// # How messages move
//
// A topic holds one queue for each group. Send copies a message once and puts it on the queues of all groups, or of none.
// A queue is first in, first out. A message that is requeued without a delay, whose lease ends, or whose source ends,
// goes back to its old place. A message that is requeued with a delay gives its place up while it waits: later ones flow,
// those of its own key included; when it is due it is again the oldest.
//
// While a message of an order key is unsettled at one source, later messages of that key go to that source only.
//
// Reject moves a message to the topic "<topic>.dead", where it waits until a first group is prepared, which gets all that
// waits there. A dead-letter topic is a topic like any other, bounded like any other: rejecting from "orders.dead" moves
// to "orders.dead.dead", and a reject into a full one fails and leaves the delivery unsettled.
//
// # Bounds
//
// A queue holds at most Options.Capacity messages and Options.CapacityBytes bytes. Send waits while any group of the
// topic is full, in the order in which the senders came; a group that nobody reads therefore stops the topic's senders,
// until [Broker.DropTopic].
//
// # For maintainers
//
// One mutex per broker guards all its topics, queues and sources; nothing is called out while it is held, and payloads
// are copied outside it. There are no goroutines. A queue has one timer, and only while a Receive waits on it: leases and
// delays that are over are found by whoever touches the queue next.
//
//	network.go  names to brokers          driver.go  sdk.Driver
//	options.go  bounds                    source.go  sdk.Source
//	url.go      memory:// addresses       queue.go   one group's messages
//	broker.go   hooks, dead letters       keys.go    order keys
//	topic.go    storing, senders in line  heap.go, deque.go
package memory
