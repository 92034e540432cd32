// Package handlertest is an application's test of its own handler. It drives the handler through the real middleware, the
// delivery engine and an in-memory broker, makes attempts fail at the moments that matter, and compares the application's
// state with that of a single, undisturbed run.
//
//	func TestCharge(t *testing.T) {
//		handlertest.Run(t, func(t *testing.T) handlertest.Case[*sql.Tx] {
//			db, store := openTestDatabase(t)
//			return handlertest.Case[*sql.Tx]{
//				Store:   store,
//				Handler: charge,
//				Message: func() *message.Message { return message.NewMessage("m-1", []byte(`{"account":"a","cents":10}`)) },
//				State:   func(ctx context.Context) (any, error) { return balances(ctx, db) },
//			}
//		})
//	}
//
// The middleware promises that an effect commits with its receipt or not at all. The handler has a part in that: it writes
// through the transaction it is given and nothing else, leaves ending it to the middleware, returns the errors it meets,
// and may run again after a rollback. Nobody but a test like this one sees whether it does.
package handlertest
