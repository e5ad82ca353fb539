"""Iceberg tables, one per table of the upstream, through PyIceberg.

Every batch is one commit that carries the pipeline and the batch as a table property, so the table itself records which
batches it holds. Changed rows are marked in position deletes; see docs/decisions/0015-iceberg.md.
"""
