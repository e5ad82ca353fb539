"""Delta tables, one directory per table: `<path>/<schema>/<table>`.

Every batch is one commit that carries `(pipeline, batch id)` as Delta's own application transaction, so the table
itself records which batches it holds. Files are written by copy on write; see docs/decisions/0002-delta-engine.md.
"""
