"""A replica in a Postgres database: every upstream table is a table, and every batch of one is one transaction."""
