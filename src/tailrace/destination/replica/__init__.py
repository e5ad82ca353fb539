"""What destinations share that keep each upstream table as a table of a SQL database.

`write` takes one table's batch through one transaction. The database is behind two interfaces: `Replica`, an open
connection, and `ReplicaTable`, the table that the batch writes to.
"""
