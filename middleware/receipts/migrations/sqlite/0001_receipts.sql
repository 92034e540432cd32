-- Penstock receipts for SQLite, schema version 1.
--
-- Run this file in one transaction. Names, topics and ids are BLOBs because they are compared byte by byte; read them with
-- CAST(topic AS TEXT). Times are microseconds since 1970 UTC.

CREATE TABLE penstock_schema (
    version         INTEGER NOT NULL PRIMARY KEY,
    -- the oldest version of the code that may run on this schema
    compatible_from INTEGER NOT NULL,
    applied_at      INTEGER NOT NULL
) STRICT;

-- One row per identity that was processed. It proves something only while its nonce is in penstock_markers. Its checks call
-- no function: with one, SQLite would keep a journal of its own for each statement that inserts many rows, and copy every
-- page there, which made a batch of claims up to four times as slow.
CREATE TABLE penstock_receipts (
    scope        BLOB    NOT NULL,
    identity_key BLOB    NOT NULL CHECK (identity_key <> x''),
    fingerprint  BLOB    NOT NULL,
    nonce        BLOB    NOT NULL CHECK (nonce <> x''),
    -- 1 done, 2 diverted
    state        INTEGER NOT NULL CHECK (state BETWEEN 1 AND 2),
    created_at   INTEGER NOT NULL,
    PRIMARY KEY (scope, identity_key)
) STRICT, WITHOUT ROWID;

-- One row per transaction with fresh receipts, written just before its COMMIT.
CREATE TABLE penstock_markers (
    nonce      BLOB    NOT NULL PRIMARY KEY CHECK (length(nonce) = 16),
    claims     INTEGER NOT NULL,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Messages a handler produced, stored with its effect and sent after the commit.
CREATE TABLE penstock_outputs (
    nonce        BLOB    NOT NULL CHECK (length(nonce) = 16),
    position     INTEGER NOT NULL,
    scope        BLOB    NOT NULL,
    identity_key BLOB    NOT NULL,
    topic        BLOB    NOT NULL,
    uuid         BLOB    NOT NULL,
    metadata     BLOB    NOT NULL,
    payload      BLOB    NOT NULL,
    created_at   INTEGER NOT NULL,
    -- 1: the router publishes it, the relay leaves it alone
    via_router   INTEGER NOT NULL,
    -- NULL: not sent yet
    sent_at      INTEGER,
    PRIMARY KEY (nonce, position)
) STRICT;

CREATE INDEX penstock_outputs_unsent ON penstock_outputs (created_at, nonce, position)
    WHERE sent_at IS NULL AND via_router = 0;
CREATE INDEX penstock_outputs_receipt ON penstock_outputs (scope, identity_key);

-- Messages taken out of the flow.
CREATE TABLE penstock_dead_letters (
    id           INTEGER NOT NULL PRIMARY KEY,
    scope        BLOB    NOT NULL,
    identity_key BLOB    NOT NULL,
    fingerprint  BLOB    NOT NULL,
    kind         TEXT    NOT NULL,
    reason       TEXT    NOT NULL,
    consumer     BLOB    NOT NULL,
    handler      BLOB    NOT NULL,
    topic        BLOB    NOT NULL,
    uuid         BLOB    NOT NULL,
    metadata     BLOB    NOT NULL,
    payload      BLOB    NOT NULL,
    created_at   INTEGER NOT NULL,
    UNIQUE (scope, identity_key, fingerprint)
) STRICT;

CREATE INDEX penstock_dead_letters_age ON penstock_dead_letters (created_at, id);

INSERT INTO penstock_schema (version, compatible_from, applied_at)
    VALUES (1, 1, CAST(strftime('%s', 'now') AS INTEGER) * 1000000);
