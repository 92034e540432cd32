package contracttest

func lifeClauses() []Clause { return nil }
