"""A replica in one DuckDB file: every upstream table is a table, and every batch is one transaction.

One process at a time has the file open, and only while it writes a batch: in between, others can read it.
"""
