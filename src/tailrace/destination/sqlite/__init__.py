"""A replica in one SQLite file: every upstream table is a table, and every batch is one transaction.

The file is in WAL mode, so readers see whole batches and block no one. There is one write transaction at a time; the
lanes of a batch wait for each other.
"""
