"""SlateDB: the write-ahead log in object storage as a change stream, key prefixes as tables.

option   the keys of `source:`              rule     a prefix as a table: key layout, value format, columns
store    object store, readers, errors      wal      WAL files as columns; the tail
keep     WAL files kept in a place of ours  operator merge operands folded
expiry   which keys leave when              copy     a checkpoint, scanned by key range
offset   where a stream stands              follower how far the next batch goes
split    what a task reads                  crew     the processes that share the reading; hand is one of them
row      rows as changes of a table         source   the upstream as configuration
"""
