"""The columns of a table that keeps the versions of its rows, each with when it held (a slowly changing dimension of
type 2).

_tailrace_valid_from, _tailrace_valid_to   commit times: the version holds from the first until just before the second
_tailrace_is_current                       whether the row is like this now; `valid_to` is null then
_tailrace_from, _tailrace_to               the same bounds as positions, which are never null and never tie
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.model.change import Changes, position_texts
from tailrace.model.schema import Column, TableSchema

VALID_FROM = "_tailrace_valid_from"
VALID_TO = "_tailrace_valid_to"
IS_CURRENT = "_tailrace_is_current"
FROM = "_tailrace_from"
TO = "_tailrace_to"
OPEN = "f" * 32
"""What `_tailrace_to` holds in a current version: later than every position."""

_INSTANT = pa.timestamp("us", "UTC")
COLUMNS = (
    Column(VALID_FROM, _INSTANT),
    Column(VALID_TO, _INSTANT),
    Column(IS_CURRENT, pa.bool_(), False),
    Column(FROM, pa.string(), False),
    Column(TO, pa.string(), False),
)


def version_table(table: TableSchema, retained: Sequence[Column] = ()) -> TableSchema:
    """The table that keeps the versions of another one's rows. A row has one version that ends at a position.

    `retained` are columns that the upstream dropped: older versions still hold their values.
    """
    return replace(table, columns=(*table.columns, *retained, *COLUMNS), key=(*table.key, TO))


def first_versions(copied: Changes) -> list[pa.Array[Any]]:
    """The values of `COLUMNS` for copied rows: each is current since its copy."""
    count = len(copied)
    return [
        copied.batch.column("committed_at"),
        pa.nulls(count, _INSTANT),
        pa.repeat(True, count),
        commit_texts(copied.numpy("commit")),
        pa.repeat(OPEN, count),
    ]


def commit_texts(commit: npt.NDArray[np.int64], ordinal: npt.NDArray[np.int64] | None = None) -> pa.Array[Any]:
    """Bounds of versions: a version begins with a commit, whatever the ordinal of its change was."""
    return position_texts(commit, np.zeros(len(commit), np.int64) if ordinal is None else ordinal)


def parsed_positions(texts: pa.ChunkedArray[Any]) -> npt.NDArray[np.int64]:
    """The (commit, ordinal) pairs of position texts: the inverse of `position_texts`."""
    digits = "".join(texts.to_pylist())
    return np.frombuffer(bytes.fromhex(digits), ">i8").astype(np.int64).reshape(-1, 2)
