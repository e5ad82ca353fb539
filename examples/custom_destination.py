"""A DuckDB file as a destination, complete: `Pipeline(destination=DuckDbDestination(path="shop.duckdb"), …).run()`."""

from typing import Any, ClassVar, Literal

import duckdb
import pyarrow as pa

from tailrace.extend import Destination, TableBatch, TableSchema, Written, plan_columns

BOOK = "CREATE TABLE IF NOT EXISTS _tailrace (id TEXT PRIMARY KEY, batch TEXT, columns TEXT)"


class DuckDbDestination(Destination):
    type: Literal["notebook"] = "notebook"
    path: str
    lanes: ClassVar[int | None] = 1  # only one process at a time can open the file

    def write_changes(self, batch: TableBatch) -> Written:
        table, place = batch.table, quote(str(batch.table.table))
        match = " AND ".join(f"t.{quote(key)} = k.{quote(key)}" for key in table.key)
        with duckdb.connect(self.path) as db:  # closing it without a commit undoes everything

            def run(sql: str, *values: Any, **tables: pa.Table) -> list[Any]:
                for name, rows in tables.items():
                    db.register(name, rows)
                return db.execute(sql, list(values)).fetchall()

            def lookup(keys: pa.Table) -> pa.Table:
                db.register("k", keys)
                return db.sql(f"SELECT t.* FROM {place} t JOIN k ON {match}").to_arrow_table()

            db.execute(BOOK).begin()
            book_id = f"{batch.pipeline} {table.table}"
            last, columns = (run("SELECT batch, columns FROM _tailrace WHERE id = ?", book_id) or [(None, None)])[0]
            if batch.is_repeat(last):
                return Written(repeated=True)
            before = TableSchema.from_json(columns) if columns and not batch.replaces else None
            plan = plan_columns(before, table)
            if plan.changes:
                run("CREATE TABLE next AS FROM empty", empty=plan.schema.empty_table())
                if before:
                    old = [f"t.{quote(was)}" if was else f"i.{quote(name)}" for name, was in plan.sources.items()]
                    run(f"INSERT INTO next SELECT {', '.join(old)} FROM {place} t, initial i", initial=plan.initial)
                run(f"DROP TABLE IF EXISTS {place}; ALTER TABLE next RENAME TO {place}")
            written = Written()
            for part in batch.parts(lookup):
                if part.clear:
                    run(f"DELETE FROM {place}")
                if table.key:
                    run(f"DELETE FROM {place} t USING k WHERE {match}", k=part.keys)
                run(f"INSERT INTO {place} FROM r", r=part.upserts)
                written += part.written
            if written or batch.replaces or plan.changes:
                run("INSERT OR REPLACE INTO _tailrace VALUES (?, ?, ?)", book_id, batch.mark, plan.table.to_json())
                db.commit()
        return written


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
