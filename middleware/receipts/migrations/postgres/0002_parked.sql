-- Penstock receipts for PostgreSQL, schema version 2: messages that are set aside. Code of version 1 runs on it.
--
-- Run this file in one transaction, after 0001.

-- One row per message that was acknowledged at its broker before it was handled, because its order key fails. The row goes
-- once it is handled. Positions are never used again: the rows of a key are read from the last known one on.
CREATE TABLE penstock_parked (
    position   BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope      BYTEA  NOT NULL CHECK (octet_length(scope) <= 512),
    order_key  BYTEA  NOT NULL CHECK (octet_length(order_key) BETWEEN 1 AND 512),
    -- SHA-256 over uuid, metadata and payload
    digest     BYTEA  NOT NULL CHECK (octet_length(digest) = 32),
    handler    BYTEA  NOT NULL,
    topic      BYTEA  NOT NULL,
    uuid       BYTEA  NOT NULL,
    metadata   BYTEA  NOT NULL,
    payload    BYTEA  NOT NULL,
    created_at BIGINT NOT NULL,
    UNIQUE (scope, order_key, digest)
);

CREATE INDEX penstock_parked_order ON penstock_parked (scope, order_key, position);

INSERT INTO penstock_schema (version, compatible_from, applied_at)
    VALUES (2, 1, (extract(epoch FROM now()) * 1000000)::bigint);
