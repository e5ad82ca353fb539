"""Parquet files: the changelog of all tables, one entry of its log for each batch."""
