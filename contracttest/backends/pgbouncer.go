package backends

import "context"

func (s *Set) findBouncer(_ context.Context, tried []string) (Database, string, error) {
	return Database{}, "", &Missing{Kind: PgBouncer, Tried: tried}
}
