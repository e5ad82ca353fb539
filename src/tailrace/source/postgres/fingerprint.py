"""What the catalog shows of a table next to its columns, to notice that rows changed without being logged.

`ALTER TABLE` can rewrite every row, and neither the log nor the columns show it. But Postgres then puts the rows into a
new file, and the transaction leaves its id on the catalog's row of each column that it changed. `VACUUM FULL` and
`TRUNCATE` also take a new file, but change no column; most commands change a column but keep the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from tailrace.model.schema import TableSchema


class ColumnMark(NamedTuple):
    """The type of a column, and the transaction that last changed its row in the catalog."""

    type_oid: int
    typmod: int
    changed: int


@dataclass(frozen=True)
class Fingerprint:
    """`TableSchema.fingerprint` of this source, as JSON.

    file      a hash of the names of the files with the table's rows
    width     the highest number that a column of the table ever had
    columns   by number, the published columns
    types     what user-defined types of the columns are made of: `enum <oid>` has the label of a value,
              `field <table> <number>` the type of a field of a composite type
    key       the OID of the constraint, or index, that is the key; 0 when there is none or it is not known
    recopy    why the table needs a new copy when this version begins; None when it does not
    """

    file: str
    width: int
    columns: Mapping[int, ColumnMark] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    key: int = 0
    recopy: str | None = None

    def __str__(self) -> str:
        columns = {str(number): list(mark) for number, mark in self.columns.items()}
        raw: dict[str, Any] = {"file": self.file, "width": self.width, "columns": columns}
        if self.types:
            raw["types"] = dict(sorted(self.types.items()))
        if self.key:
            raw["key"] = self.key
        if self.recopy:
            raw["recopy"] = self.recopy
        return json.dumps(raw)

    @staticmethod
    def of(schema: TableSchema) -> Fingerprint | None:
        """The fingerprint of a version; None for one that was stored without."""
        return _parse(schema.fingerprint) if schema.fingerprint else None

    def prints_as(self, later: Fingerprint) -> bool:
        """Whether the values of user-defined types still have the text that they had."""
        shared = self.types.keys() & later.types.keys()
        if any(self.types[name] != later.types[name] for name in shared):
            return False
        composites = {_composite(name) for name in shared} - {None}
        return all(
            (name in self.types) == (name in later.types)
            for name in self.types.keys() | later.types.keys()
            if _composite(name) in composites
        )


@lru_cache(maxsize=4096)
def _parse(text: str) -> Fingerprint:
    raw = json.loads(text)
    columns = {int(number): ColumnMark(*mark) for number, mark in raw["columns"].items()}
    return Fingerprint(raw["file"], raw["width"], columns, raw.get("types", {}), raw.get("key", 0), raw.get("recopy"))


def _composite(name: str) -> str | None:
    kind, _, rest = name.partition(" ")
    return rest.partition(" ")[0] if kind == "field" else None
