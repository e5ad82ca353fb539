"""PostgreSQL as a source: logical replication for the log, parallel snapshots for the copy.

The path of a change: `receiver` (a process) → journal → `pgoutput/decode` in Spark tasks. The path of a copied row:
`copy` in Spark tasks. `follower` decides on the driver how far each batch goes; `offset` is its state.
"""
