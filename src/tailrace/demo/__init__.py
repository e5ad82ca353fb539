"""The demo shop of `tailrace demo`: a Postgres server, its tables and their traffic."""
