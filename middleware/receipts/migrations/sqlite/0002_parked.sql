-- Penstock receipts for SQLite, schema version 2: messages that are set aside. Code of version 1 runs on it.
--
-- Run this file in one transaction, after 0001.

-- One row per message that was acknowledged at its broker before it was handled, because its order key fails. The row goes
-- once it is handled. Positions are never used again: the rows of a key are read from the last known one on.
CREATE TABLE penstock_parked (
    position   INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    scope      BLOB    NOT NULL CHECK (length(scope) <= 512),
    order_key  BLOB    NOT NULL CHECK (length(order_key) BETWEEN 1 AND 512),
    -- SHA-256 over uuid, metadata and payload
    digest     BLOB    NOT NULL CHECK (length(digest) = 32),
    handler    BLOB    NOT NULL,
    topic      BLOB    NOT NULL,
    uuid       BLOB    NOT NULL,
    metadata   BLOB    NOT NULL,
    payload    BLOB    NOT NULL,
    created_at INTEGER NOT NULL,
    UNIQUE (scope, order_key, digest)
) STRICT;

CREATE INDEX penstock_parked_order ON penstock_parked (scope, order_key, position);

INSERT INTO penstock_schema (version, compatible_from, applied_at)
    VALUES (2, 1, CAST(strftime('%s', 'now') AS INTEGER) * 1000000);
