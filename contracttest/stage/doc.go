// Package stage holds what programs need that show consumers being killed: a child process that is this program again
// ([Start], [Consumer]), its end at an exact point of its work ([Trigger]), counts at the broker's side, where no kill
// reaches ([Tally]), and the progress of it all ([Display]). examples/parcels and examples/ledger are such programs.
package stage
