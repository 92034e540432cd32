-- Penstock receipts for MySQL and MariaDB, schema version 1.
--
-- Each statement commits by itself here, so every one of them can be run again: a run that was interrupted is repeated from
-- the beginning. Names, topics and ids are binary because they are compared byte by byte; read them with CONVERT(topic USING
-- utf8mb4). Times are microseconds since 1970 UTC.

-- One row per identity that was processed. It proves something only while its nonce is in penstock_markers, with claims.
CREATE TABLE IF NOT EXISTS penstock_receipts (
    scope        VARBINARY(512)  NOT NULL,
    identity_key VARBINARY(512)  NOT NULL,
    fingerprint  VARBINARY(1024) NOT NULL,
    nonce        BINARY(16)      NOT NULL,
    -- 1 done, 2 diverted
    state        TINYINT         NOT NULL,
    created_at   BIGINT          NOT NULL,
    PRIMARY KEY (scope, identity_key)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

-- One row per transaction with fresh receipts, written just before its COMMIT. One without claims is a fence: somebody asked
-- what had become of that transaction, found that it had not committed, and keeps it from doing so late.
CREATE TABLE IF NOT EXISTS penstock_markers (
    nonce      BINARY(16) NOT NULL PRIMARY KEY,
    claims     INT        NOT NULL,
    created_at BIGINT     NOT NULL
) ENGINE = InnoDB;

-- Messages a handler produced, stored with its effect and sent after the commit.
CREATE TABLE IF NOT EXISTS penstock_outputs (
    nonce        BINARY(16)     NOT NULL,
    position     BIGINT         NOT NULL,
    scope        VARBINARY(512) NOT NULL,
    identity_key VARBINARY(512) NOT NULL,
    topic        BLOB           NOT NULL,
    uuid         BLOB           NOT NULL,
    metadata     LONGBLOB       NOT NULL,
    payload      LONGBLOB       NOT NULL,
    created_at   BIGINT         NOT NULL,
    -- 1: the router publishes it, the relay leaves it alone
    via_router   TINYINT        NOT NULL,
    -- NULL: not sent yet
    sent_at      BIGINT         NULL,
    PRIMARY KEY (nonce, position),
    KEY penstock_outputs_unsent (via_router, sent_at, created_at, nonce, position),
    KEY penstock_outputs_receipt (scope, identity_key)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

-- Messages taken out of the flow.
CREATE TABLE IF NOT EXISTS penstock_dead_letters (
    id           BIGINT          NOT NULL AUTO_INCREMENT PRIMARY KEY,
    scope        VARBINARY(512)  NOT NULL,
    identity_key VARBINARY(512)  NOT NULL,
    fingerprint  VARBINARY(1024) NOT NULL,
    kind         VARBINARY(64)   NOT NULL,
    reason       BLOB            NOT NULL,
    consumer     BLOB            NOT NULL,
    handler      BLOB            NOT NULL,
    topic        BLOB            NOT NULL,
    uuid         BLOB            NOT NULL,
    metadata     LONGBLOB        NOT NULL,
    payload      LONGBLOB        NOT NULL,
    created_at   BIGINT          NOT NULL,
    UNIQUE KEY penstock_dead_letters_once (scope, identity_key, fingerprint),
    KEY penstock_dead_letters_age (created_at, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

-- One row per message that was acknowledged at its broker before it was handled, because its order key fails. The row goes
-- once it is handled. Positions are never used again: the rows of a key are read from the last known one on.
CREATE TABLE IF NOT EXISTS penstock_parked (
    position   BIGINT         NOT NULL AUTO_INCREMENT PRIMARY KEY,
    scope      VARBINARY(512) NOT NULL,
    order_key  VARBINARY(512) NOT NULL,
    -- SHA-256 over uuid, metadata and payload
    digest     BINARY(32)     NOT NULL,
    handler    BLOB           NOT NULL,
    topic      BLOB           NOT NULL,
    uuid       BLOB           NOT NULL,
    metadata   LONGBLOB       NOT NULL,
    payload    LONGBLOB       NOT NULL,
    created_at BIGINT         NOT NULL,
    UNIQUE KEY penstock_parked_once (scope, order_key, digest),
    KEY penstock_parked_order (scope, order_key, position)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

-- The last one, so that what is recorded is there.
CREATE TABLE IF NOT EXISTS penstock_schema (
    version         INT    NOT NULL PRIMARY KEY,
    -- the oldest version of the code that may run on this schema
    compatible_from INT    NOT NULL,
    applied_at      BIGINT NOT NULL
) ENGINE = InnoDB;

INSERT INTO penstock_schema (version, compatible_from, applied_at)
    VALUES (1, 1, UNIX_TIMESTAMP() * 1000000) ON DUPLICATE KEY UPDATE version = version;
