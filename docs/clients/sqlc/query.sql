-- name: InsertCharge :exec
INSERT INTO charges (id, account, cents) VALUES (?, ?, ?);
