"""The shop of `tailrace demo`: a server, its tables and their traffic."""
