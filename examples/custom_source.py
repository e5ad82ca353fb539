"""A source of your own: a file of JSON lines, each of them a transaction on one table.

    {"put": {"1": "first", "2": "second"}, "remove": []}
    {"put": {"1": "changed"}, "remove": [2]}

Run it with `python examples/custom_source.py FOLDER`: it writes such a file, and follows it into a Delta table.
To use it in a pipeline's YAML file, as `source: {type: lines, path: notes.jsonl}`, a package has an entry point:

    [project.entry-points."tailrace.sources"]
    lines = "my_package:LineSource"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from tailrace import Changes, Column, Op, Position, TableName, TableSchema
from tailrace.extend import FilePath, LogSource, SourceOptions, end_of

# By `upstream_id` a table is known, by `number` a column, even if they are renamed one day.
NOTES = TableSchema(
    TableName("main", "notes"),
    (Column("id", pa.int64(), nullable=False, number=1), Column("text", pa.string(), number=2)),
    key=("id",),
    upstream_id="notes",
)


class LineOptions(SourceOptions):
    """The keys of `source:`, a pydantic model. A relative path starts from the pipeline's file."""

    type: Literal["lines"] = "lines"
    path: FilePath


# Only configuration, as Spark sends it to other processes: frozen, and without anything open.
@dataclass(frozen=True)
class LineSource(LogSource):
    """The three methods of a source that reads a log. Copies, restarts, pauses and resyncs follow from them."""

    Options = LineOptions

    options: LineOptions

    def tables(self) -> list[TableSchema]:
        """What there is to follow; `wanted` leaves out what the pipeline's `tables` does not select."""
        return self.wanted([NOTES])

    def head(self) -> Position:
        """Where the log ends now. Here a commit is a line, counted from 1."""
        return end_of(len(self._lines()))

    def read_log(self, table: TableSchema, after: Position, upto: Position) -> Iterator[Changes]:
        """The changes in (after, upto], which are whole commits. Asked again, it gives the same."""
        for commit, line in enumerate(self._lines()[after.commit : upto.commit], after.commit + 1):
            transaction = json.loads(line)
            put, remove = transaction["put"], transaction["remove"]
            rows = [{"id": int(key), "text": text} for key, text in put.items()]
            rows += [{"id": key, "text": None} for key in remove]  # of a deleted row the key is enough
            # The file does not say whether a row is new: an update of a row that is not there inserts it.
            op = np.array([Op.UPDATE] * len(put) + [Op.DELETE] * len(remove), np.int8)
            if rows:
                yield Changes.build(table, pa.array(rows, table.row_type), op=op, commit=commit)

    def _lines(self) -> list[str]:
        path = self.options.path
        # What comes after the last line break is still being written.
        return path.read_text().split("\n")[:-1] if path.exists() else []


def main(folder: Path) -> None:
    from tailrace import Pipeline  # only here: Spark comes with it

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "notes.jsonl"
    file.write_text('{"put": {"1": "first", "2": "second"}, "remove": []}\n{"put": {"1": "changed"}, "remove": [2]}\n')
    pipeline = Pipeline(
        name="notes",
        source=LineSource(LineOptions(path=file)),
        destination={"type": "delta", "path": str(folder / "lake")},
        state=str(folder / "state"),
    )
    pipeline.run(once=True)
    for table in pipeline.status().tables:
        print(f"{table.name}: {table.state.value}, {table.changes_applied} changes")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
