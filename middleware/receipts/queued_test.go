package receipts_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/penstock-mq/penstock/middleware/receipts"
)

func TestMemberErrorKeepsMemberAndCause(t *testing.T) {
	t.Parallel()
	cause := errors.New("duplicate key")
	err := fmt.Errorf("handler: %w", &receipts.MemberError{Member: 3, Err: cause})

	var member *receipts.MemberError
	require.ErrorAs(t, err, &member)
	require.Equal(t, 3, member.Member)
	require.ErrorIs(t, err, cause)
	require.ErrorContains(t, err, "message 3")
}
