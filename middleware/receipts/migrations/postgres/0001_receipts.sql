-- Penstock receipts for PostgreSQL, schema version 1. For PostgreSQL 13 and newer.
--
-- Run this file in one transaction. Names, topics and ids are BYTEA because they are compared byte by byte; read them with
-- convert_from(topic, 'UTF8'). Times are microseconds since 1970 UTC.

CREATE TABLE penstock_schema (
    version         INTEGER NOT NULL PRIMARY KEY,
    -- the oldest version of the code that may run on this schema
    compatible_from INTEGER NOT NULL,
    applied_at      BIGINT  NOT NULL
);

-- One row per identity that was processed. It proves something only while its nonce is in penstock_markers, with claims.
CREATE TABLE penstock_receipts (
    scope        BYTEA    NOT NULL,
    identity_key BYTEA    NOT NULL CHECK (identity_key <> ''),
    fingerprint  BYTEA    NOT NULL,
    nonce        BYTEA    NOT NULL,
    -- 1 done, 2 diverted
    state        SMALLINT NOT NULL CHECK (state BETWEEN 1 AND 2),
    created_at   BIGINT   NOT NULL,
    PRIMARY KEY (scope, identity_key)
);

-- One row per transaction with fresh receipts, written just before its COMMIT: claims says how many. One with 0 claims is a
-- fence: it was written later, to make sure that a transaction whose COMMIT got no answer does not commit any more.
CREATE TABLE penstock_markers (
    nonce      BYTEA   NOT NULL PRIMARY KEY CHECK (octet_length(nonce) = 16),
    -- a transaction whose receipts are not all there offers a negative number, and fails
    claims     INTEGER NOT NULL CHECK (claims >= 0),
    created_at BIGINT  NOT NULL
);

-- Messages a handler produced, stored with its effect and sent after the commit.
CREATE TABLE penstock_outputs (
    nonce        BYTEA    NOT NULL CHECK (octet_length(nonce) = 16),
    position     INTEGER  NOT NULL,
    scope        BYTEA    NOT NULL,
    identity_key BYTEA    NOT NULL,
    topic        BYTEA    NOT NULL,
    uuid         BYTEA    NOT NULL,
    metadata     BYTEA    NOT NULL,
    payload      BYTEA    NOT NULL,
    created_at   BIGINT   NOT NULL,
    -- 1: the router publishes it, the relay leaves it alone
    via_router   SMALLINT NOT NULL,
    -- NULL: not sent yet
    sent_at      BIGINT,
    PRIMARY KEY (nonce, position)
);

CREATE INDEX penstock_outputs_unsent ON penstock_outputs (created_at, nonce, position)
    WHERE sent_at IS NULL AND via_router = 0;
CREATE INDEX penstock_outputs_receipt ON penstock_outputs (scope, identity_key);

-- Messages taken out of the flow.
CREATE TABLE penstock_dead_letters (
    id           BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope        BYTEA  NOT NULL,
    identity_key BYTEA  NOT NULL,
    fingerprint  BYTEA  NOT NULL,
    kind         TEXT   NOT NULL,
    reason       TEXT   NOT NULL,
    consumer     BYTEA  NOT NULL,
    handler      BYTEA  NOT NULL,
    topic        BYTEA  NOT NULL,
    uuid         BYTEA  NOT NULL,
    metadata     BYTEA  NOT NULL,
    payload      BYTEA  NOT NULL,
    created_at   BIGINT NOT NULL,
    UNIQUE (scope, identity_key, fingerprint)
);

CREATE INDEX penstock_letters_age ON penstock_dead_letters (created_at, id);

INSERT INTO penstock_schema (version, compatible_from, applied_at)
    VALUES (1, 1, (extract(epoch FROM now()) * 1000000)::bigint);
