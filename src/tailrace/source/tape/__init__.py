"""A changelog as a source: what the destination `parquet` wrote is read from any place."""
