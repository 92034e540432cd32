package contracttest

func publishClauses() []Clause    { return nil }
func deliveryClauses() []Clause   { return nil }
func settleClauses() []Clause     { return nil }
func orderClauses() []Clause      { return nil }
func groupClauses() []Clause      { return nil }
func lifeClauses() []Clause       { return nil }
func faultClauses() []Clause      { return nil }
func capabilityClauses() []Clause { return nil }
