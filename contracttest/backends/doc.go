// Package backends finds or starts the real servers that tests need: PostgreSQL, the MySQL family, PgBouncer.
//
// For each kind a [Set] looks in this order, and takes the first that answers:
//
//  1. the address in an environment variable (see [Kind.Variable]); one that does not answer is an error, not a reason to
//     look further;
//  2. the usual local port, where a server lets us in and lets us make databases;
//  3. a private server from the installed programs: a child process with a port and folder of its own, unprivileged even
//     if we are root, with fsync on;
//  4. a private server in a container, where docker or podman answers;
//  5. else it is [Missing], which names the command that installs it.
//
// The server is looked for, or started, when the first test asks for it, and shared by the tests of the process. Each test
// gets a database of its own with a random name, which is dropped afterwards; nothing else of a server is touched. A test
// that stops, kills, freezes or fills a server gets one for itself ([Set.TestServer]).
//
// Nothing is left over after [Set.Close], nor after the test process was killed: a small shell beside each private server
// waits for the end of a pipe, then ends the server and removes its folder.
package backends
