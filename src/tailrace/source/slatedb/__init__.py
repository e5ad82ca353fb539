"""SlateDB: the write-ahead log in object storage as a change stream, key prefixes as tables.

option          the keys of `source:`              table_mapping   a prefix as a table: its columns
object_store    opening it, its errors             key_layout      keys as columns
wal             WAL files as columns; the tail     value_layout    values as columns
wal_archive     WAL files copied to our own folder merge_operator  merge operands folded
expiry_index    which keys expire when             copy            a checkpoint, scanned by key range
offset          how far a stream is                follower        how far the next batch goes
log_split       what a task reads                  reader_pool     the processes that share the reads
row             rows as changes of a table         reader_process  one of them
source          the upstream as configuration      preflight       whether it can be followed
"""
