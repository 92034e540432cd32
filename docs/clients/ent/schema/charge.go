// Package schema is what the code in the folder above it is generated from.
package schema

import (
	"entgo.io/ent"
	"entgo.io/ent/schema/field"
)

// Charge is a row of the table charges.
type Charge struct {
	ent.Schema
}

// Fields are its columns.
func (Charge) Fields() []ent.Field {
	return []ent.Field{
		field.String("id").NotEmpty(),
		field.String("account"),
		field.Int64("cents"),
	}
}
