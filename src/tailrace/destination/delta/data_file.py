"""The Parquet files of a Delta table: written once, never changed, and described by the log."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from tailrace.destination.delta.deletion_vector import Descriptor

# A random update rewrites the file that holds its row, so the file's size is the price of a small batch; but a table
# should not fall into thousands of files either. docs/decisions/0002-delta-engine.md has the measurements.
LEAST_ROWS = 32_768
MOST_ROWS = 1_048_576
FILES = 400
GROUP_ROWS = 131_072
"""How many rows a row group has."""
_VECTOR_BYTES = "tailrace.vector_bytes"
"""The tag of a file in the log for `DataFile.vector_bytes`."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


# A vector is rewritten with each batch that marks a row of its file, and the log names the file again: the price of a
# small batch is the number of files and the size of their vectors. docs/decisions/0008-merge-on-read.md measures both.
LEAST_MARKED_ROWS = 131_072
MARKED_FILES = 64


def rows_per_file(table_rows: int, *, marks: bool = False) -> int:
    """How many rows a file of a table of this size should hold: one whose rows are marked, or one that is rewritten."""
    if marks:
        return min(max(table_rows // MARKED_FILES, LEAST_MARKED_ROWS), MOST_ROWS)
    return min(max(table_rows // FILES, LEAST_ROWS), MOST_ROWS)


@dataclass(frozen=True)
class DataFile:
    """A file of the table, written or to be. `partition` holds Delta's text of the partition's values.

    rows           all rows in the file, those that `vector` marks as deleted included
    low, high      the bounds of the key, if it is one whole number or date
    modified       when the file was written, in milliseconds; 0: now
    vector_bytes   the bytes of all vectors that were ever written for the file
    """

    path: str
    size: int
    rows: int
    stats: str = ""
    partition: Mapping[str, str | None] = field(default_factory=dict)
    low: Any = None
    high: Any = None
    vector: Descriptor | None = None
    modified: int = 0
    vector_bytes: int = 0

    @property
    def identity(self) -> tuple[str, str]:
        """What the log knows the file by: the same file with another vector counts as another one."""
        return self.path, self.vector.unique_id if self.vector is not None else ""

    @property
    def dead(self) -> int:
        return self.vector.cardinality if self.vector is not None else 0

    @property
    def alive(self) -> int:
        return self.rows - self.dead

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "size": self.size,
            "rows": self.rows,
            "stats": self.stats,
            "partition": dict(self.partition),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any], key: Sequence[str | None]) -> DataFile:
        """The inverse of `to_json`, with the bounds of a key, by its names in the file, that is one whole number."""
        return cls(raw["path"], raw["size"], raw["rows"], raw["stats"], raw["partition"]).bounded_by(key)

    @classmethod
    def from_add(cls, add: Mapping[str, Any], count: Callable[[str], int]) -> DataFile:
        """A file as the log describes it. `count` gives the rows of one whose number the log does not have."""
        stats, vector = add.get("stats") or "", add.get("deletionVector")
        rows = _parsed(stats).get("numRecords")
        return cls(
            add["path"],
            add["size"],
            count(unquote(add["path"])) if rows is None else rows,
            stats,
            # The empty text means null there.
            {name: value or None for name, value in (add.get("partitionValues") or {}).items()},
            vector=Descriptor.from_json(vector) if vector else None,
            modified=add.get("modificationTime") or 0,
            vector_bytes=int((add.get("tags") or {}).get(_VECTOR_BYTES) or 0),
        )

    def bounded_by(self, key: Sequence[str | None]) -> DataFile:
        """The same file with the bounds of a key, by its names in the file, that is one whole number or date."""
        if len(key) != 1 or key[0] is None:
            return self
        low, high = bounds_of(self.stats, key[0])
        return self if (low, high) == (self.low, self.high) else replace(self, low=low, high=high)

    def may_share_keys(self, other: DataFile) -> bool:
        """Whether two files can hold the same key, judged by their bounds."""
        if None in (self.low, self.high, other.low, other.high):
            return True
        return bool(self.low <= other.high and other.low <= self.high)

    def with_vector(self, vector: Descriptor) -> DataFile:
        """The same file with these rows marked as deleted. Its bounds are wide from now on: a marked row may be one."""
        parsed = _parsed(self.stats)
        # A file with a vector must say how many rows it has, which another writer may have left out.
        fields = {"numRecords": str(self.rows), "tightBounds": "false"}
        missing = {name: value for name, value in fields.items() if str(parsed.get(name)).lower() != value}
        stats = self.stats
        if missing:
            # As text: numbers must keep their digits.
            rest = stats.strip()[1:] if parsed else "}"
            stats = json_object(missing)[:-1] + ("," if parsed else "") + rest
        written = self.vector_bytes + vector.size_in_bytes
        return replace(self, vector=vector, stats=stats, vector_bytes=written)

    def add(self, now: int, *, data_change: bool = True) -> dict[str, Any]:
        """The action that adds the file."""
        return {
            "path": self.path,
            "partitionValues": dict(self.partition),
            "size": self.size,
            "modificationTime": self.modified or now,
            "dataChange": data_change,
            "stats": self.stats,
            **({"tags": {_VECTOR_BYTES: str(self.vector_bytes)}} if self.vector_bytes else {}),
            **self._marked(),
        }

    def remove(self, now: int, *, data_change: bool = True) -> dict[str, Any]:
        """The action that removes the file. Without its vector it would name another file, and the rows would stay."""
        return {
            "path": self.path,
            "deletionTimestamp": now,
            "dataChange": data_change,
            "extendedFileMetadata": True,
            "partitionValues": dict(self.partition),
            "size": self.size,
            **self._marked(),
        }

    def _marked(self) -> dict[str, Any]:
        return {} if self.vector is None else {"deletionVector": self.vector.to_json()}

    def is_removed_by(self, remove: Mapping[str, Any]) -> bool:
        """Whether an action removes this very file."""
        vector = remove.get("deletionVector")
        return self.identity[1] == (Descriptor.from_json(vector).unique_id if vector else "")


def json_object(values: Mapping[str, str | None]) -> str:
    """A JSON object of values that are JSON already."""
    return "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{value}" for name, value in values.items()) + "}"


def mean_row_bytes(files: Sequence[DataFile]) -> int:
    """The approximate memory that one row of these files takes."""
    return 3 * sum(file.size for file in files) // max(total_rows(files), 1)


def total_rows(files: Iterable[DataFile]) -> int:
    return sum(file.alive for file in files)


@lru_cache(maxsize=65_536)
def _parsed(stats: str) -> dict[str, Any]:
    try:
        found = json.loads(stats or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@lru_cache(maxsize=65_536)
def bounds_of(stats: str, column: str) -> tuple[int | None, int | None]:
    """The bounds of a column in a file's statistics, as whole numbers; None where they are not, or not there."""
    parsed = _parsed(stats)
    low, high = (_number((parsed.get(side) or {}).get(column)) for side in ("minValues", "maxValues"))
    return (None, None) if low is None or high is None else (low, high)


def _number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _DATE.fullmatch(value):
        # A text may look like a date and be none.
        with suppress(ValueError):
            return (datetime.date.fromisoformat(value) - datetime.date(1970, 1, 1)).days
    return None
