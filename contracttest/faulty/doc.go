// Package faulty holds drivers and stores with one planted fault each. It proves the contract suite: run over a fault, the
// clauses that the fault breaks have to fail, and over the healthy reference everything has to pass.
package faulty
