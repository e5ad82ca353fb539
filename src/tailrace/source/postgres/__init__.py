"""PostgreSQL as a source: logical replication for the log, parallel snapshots for the copy.

The way of a change: `receiver` (a process) → journal → `pgoutput/decode` in Spark tasks. The way of a copied row:
`copy` in Spark tasks. `follower` decides on the driver how far each batch goes; `offset` is what it remembers.
"""
