"""Collapse the changes of a keyed table to the last change per key.

Applying a `Collapsed` gives the same table as replaying its changes one by one. Columns that an update left out are
filled from earlier changes of the row. A value that no change in the batch holds must come from the row that the
destination has now (`unchanged`, `lookup`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import SchemaChangedError, TableError
from tailrace.model import key as keys
from tailrace.model.change import Changes, Op, pack_unchanged
from tailrace.model.schema import TableSchema
from tailrace.system.phase import phase

Indexes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Marks:
    """For each row, the operation, position and commit time of the change that decided it, and its unfit values."""

    op: npt.NDArray[np.int8]
    commit: Indexes
    ordinal: Indexes
    committed_at: pa.ChunkedArray[Any]
    exact: pa.ChunkedArray[Any]

    @classmethod
    def of(cls, changes: Changes) -> Marks:
        """The marks of changes that are not collapsed: one per change."""
        return cls(
            changes.numpy("op"),
            changes.numpy("commit"),
            changes.numpy("ordinal"),
            pa.chunked_array([changes.batch.column("committed_at")]),
            pa.chunked_array([changes.batch.column("exact")]),
        )

    def __len__(self) -> int:
        return len(self.op)

    def take(self, at: Indexes) -> Marks:
        pick = pa.array(at)
        return Marks(
            self.op[at], self.commit[at], self.ordinal[at], self.committed_at.take(pick), self.exact.take(pick)
        )


_NO_MARKS = Marks(
    np.zeros(0, np.int8),
    np.zeros(0, np.int64),
    np.zeros(0, np.int64),
    pa.chunked_array([], pa.timestamp("us", "UTC")),
    pa.chunked_array([], pa.string()),
)


@dataclass(frozen=True)
class Collapsed:
    """A collapsed batch. To apply it: empty the table if `truncated`, delete `deletes`, upsert `rows`.

    rows, marks          the rows to upsert, each key once, with `table.arrow`'s columns
    unchanged            (rows, columns): values to take from the row that the destination had before this batch;
                         None when every row is complete
    incomplete, lookup   the indices of rows with such values, and the key under which the destination has them: the
                         row's own key, or its old key if the key changed; null if the destination cannot have the row
    deletes              the keys to delete (key columns only); none of them is a key of `rows`
    truncate_marks       the marks of the last truncate; empty when there was none
    changes              the number of changes that were collapsed
    """

    table: TableSchema
    rows: pa.Table
    marks: Marks
    unchanged: Mask | None
    incomplete: Indexes
    lookup: pa.Table
    deletes: pa.Table
    truncate_marks: Marks
    changes: int

    @property
    def truncated(self) -> bool:
        return len(self.truncate_marks) > 0

    @property
    def has_exact(self) -> bool:
        """Whether a row has a value that its column's type cannot hold."""
        return bool(self.marks.exact.null_count < len(self.marks.exact))


@phase("collapse")
def collapse(
    changes: Iterable[Changes], table: TableSchema, *, keep_deleted: bool = False, each: bool = False
) -> Collapsed:
    """Keep the last change per key. `table` is the schema version of the result; older changes are fitted to it.

    With `keep_deleted`, a delete counts as an update that leaves every column except the key as it was: its row is in
    `rows` with `Op.DELETE`, and `deletes` is empty. With `each`, `rows` are all changes, deletes with their key.
    A pure function. Raises TableError for a merge operand, which only its source can fold, and SchemaChangedError for a
    value of an older version that the newer type cannot hold.
    """
    chunks = [slim(fit(chunk, table)) for chunk in changes if len(chunk)]
    count = sum(len(chunk) for chunk in chunks)
    chunks, truncate_marks = _after_truncate(chunks)
    chunks = [_rows_only(chunk) for chunk in chunks]
    if not chunks:
        chunks = [_empty(table)]
    op = _joined(chunks, "op")
    key = keys.codes(keys.comparable([_column(chunks, table, name) for name in table.key]))
    last = np.arange(len(op)) if each else _last_per_key(key)
    history = _History.of(chunks, table, op, key, keep_deleted)

    gone = op == Op.DELETE
    kept = last if keep_deleted or each else last[~gone[last]]
    dropped = last[:0] if keep_deleted or each else last[gone[last]]
    deletes = _take_columns(chunks, dropped, _key_columns(table), table)
    unchanged: Mask | None = None
    incomplete = np.zeros(0, np.int64)
    lookup = np.zeros(0, np.int64)
    sources: dict[int, Indexes] = {}
    if history is not None:
        sources, unchanged, lookup_of = history.fold(kept)
        if unchanged is not None:
            incomplete = np.flatnonzero(unchanged.any(axis=1))
            lookup = lookup_of[incomplete]
    lookups = _take_keys(chunks, table, lookup)
    marks = _marks(chunks, kept)
    if sources and any_exact(chunks):
        marks = _with_folded_exact(marks, chunks, table, kept, sources, unchanged)
    rows = _take_columns(chunks, kept, list(range(len(table.columns))), table, sources)
    return Collapsed(table, rows, marks, unchanged, incomplete, lookups, deletes, truncate_marks, count)


def origins(old: Sequence[tuple[str, int]], new: Sequence[tuple[str, int]]) -> list[int | None]:
    """For each new column (name, number), the index of the same column among the old ones; None for an added column.

    Columns are matched by number where both have one, so a column that was dropped and added again is a different
    column. Otherwise they are matched by name.
    """
    numbered = {number: at for at, (_, number) in enumerate(old) if number}
    named = {name: at for at, (name, _) in enumerate(old)}
    found: list[int | None] = []
    for name, number in new:
        at = numbered.get(number) if number else None
        if at is None and name in named and not (number and old[named[name]][1]):
            at = named[name]
        found.append(at)
    return found


def fit(changes: Changes, table: TableSchema) -> Changes:
    """Convert changes of another version of the table to changes of `table`.

    A column that the changes' version lacks counts as unchanged in an updated row, because the destination may already
    hold a value that was copied later. In a new row it has its initial value if it was added after that version, and
    is null if it was dropped. Columns that `table` lacks are left out. Raises SchemaChangedError when the key consists
    of other columns, or a value does not fit its type in `table`.
    """
    if changes.table is table:
        return changes
    theirs = [(column.name, column.number) for column in changes.table.columns]
    found = origins(theirs, [(column.name, column.number) for column in table.columns])
    if {found[at] for at in _key_columns(table)} != set(_key_columns(changes.table)):
        raise SchemaChangedError(
            "the key is no longer made of the same columns",
            table=str(table.table),
            position=str(changes.first),
            fix=f"tailrace resync FILE {table.table}",
        )
    if found == list(range(len(theirs))) and changes.table.row_type.equals(table.row_type):
        return Changes(table, changes.batch)
    op, batch, before = changes.numpy("op"), changes.batch, changes.batch.column("before")
    given = changes.unchanged_mask()
    mask = np.zeros((len(changes), len(found)), bool)
    for index, at in enumerate(found):
        if at is None:
            mask[:, index] = (op == Op.UPDATE) & bool(table.key)
        elif given is not None:
            mask[:, index] = given[:, at]
    # Without a key, a delete is matched by its whole row, so that row must equal the one that was inserted.
    whole = pa.array((op == Op.INSERT) | (op == Op.READ) | ((op <= Op.READ) & (not table.key)))
    return Changes.build(
        table,
        _fitted(changes, changes.row, found, table, whole),
        op=op,
        commit=changes.numpy("commit"),
        ordinal=changes.numpy("ordinal"),
        txn=batch.column("txn"),
        committed_at=batch.column("committed_at"),
        unchanged=pack_unchanged(mask),
        exact=renamed_exact(batch.column("exact"), _new_names(theirs, found, table)),
        before=None if before.null_count == len(before) else _fitted(changes, before, found, table, before.is_valid()),
    )


def slim(changes: Changes) -> Changes:
    """Drop what `collapse` does not use: old images (which are as large as the rows) and transaction ids."""
    spare = [name for name in ("before", "txn") if name in changes.batch.schema.names]
    return Changes(changes.table, changes.batch.drop_columns(spare)) if spare else changes


def _key_columns(table: TableSchema) -> list[int]:
    return [table.arrow.get_field_index(name) for name in table.key]


def _new_names(theirs: Sequence[tuple[str, int]], found: list[int | None], table: TableSchema) -> dict[str, str]:
    return {theirs[at][0]: column.name for column, at in zip(table.columns, found, strict=True) if at is not None}


def _fitted(
    changes: Changes, images: pa.StructArray, found: list[int | None], table: TableSchema, whole: pa.Array[Any]
) -> pa.StructArray:
    """Row images with the columns of `table`. In `whole` images, added columns hold their initial values."""
    fields = images.flatten()
    arrays: list[pa.Array[Any]] = []
    for column, at in zip(table.columns, found, strict=True):
        if at is not None:
            try:
                arrays.append(fields[at].cast(column.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise SchemaChangedError(
                    f"a {fields[at].type} value of another version does not fit column {column.name} of type "
                    f"{column.type}",
                    table=str(table.table),
                    position=str(changes.first),
                    fix=f"tailrace resync FILE {table.table}",
                ) from error
        elif column.initial is not None and changes.table.version <= table.version:
            nothing = pa.scalar(None, column.type)
            arrays.append(pc.if_else(whole, column.initial.cast(column.type), nothing))
        else:
            arrays.append(pa.nulls(len(images), column.type))
    return pa.StructArray.from_arrays(arrays, fields=list(table.row_type), mask=images.is_null())


def renamed_exact(exact: pa.Array[Any], names: Mapping[str, str]) -> pa.Array[Any]:
    """Rename the columns in `exact` (`names`: old to new name); values of columns not in `names` are dropped."""
    if exact.null_count == len(exact):
        return exact
    # Values that do not fit their type are rare, so a loop over rows is fast enough.
    texts = exact.to_pylist()
    for row in np.flatnonzero(exact.is_valid().to_numpy(zero_copy_only=False)):
        kept = {names[name]: text for name, text in json.loads(texts[row]).items() if name in names}
        texts[row] = json.dumps(kept, ensure_ascii=False) if kept else None
    return pa.array(texts, pa.string())


@dataclass(frozen=True)
class _History:
    """The partial changes (those that leave columns out), each with the previous change of the same row.

    at           indices of the partial changes
    unchanged    (len(at), columns): the columns that each one leaves out
    before       the index of the previous change of the row within the batch, or -1
    lookup       where `before` is -1: a change whose key finds the row at the destination, or -1 if no row can be there
    """

    count: int
    at: Indexes
    unchanged: Mask
    before: Indexes
    lookup: Indexes

    @classmethod
    def of(
        cls, chunks: list[Changes], table: TableSchema, op: npt.NDArray[np.int8], key: Indexes, keep_deleted: bool
    ) -> _History | None:
        found: list[Indexes] = []
        masks: list[Mask] = []
        key_columns = _key_columns(table)
        start = 0
        for chunk in chunks:
            mask = chunk.unchanged_mask()
            deleted = chunk.numpy("op") == Op.DELETE
            if mask is None and keep_deleted and deleted.any():
                mask = np.zeros((len(chunk), len(table.columns)), bool)
            if mask is not None:
                mask[deleted] = keep_deleted
                mask[:, key_columns] = False
                some = np.flatnonzero(mask.any(axis=1))
                found.append(some + start)
                masks.append(mask[some])
            start += len(chunk)
        if not sum(map(len, found)):
            return None
        at = np.concatenate(found)
        unchanged = np.concatenate(masks)
        previous = _previous_of_key(key)
        # A changed key is a delete directly followed by an insert; before that, the row had the deleted key.
        commit, ordinal = _joined(chunks, "commit"), _joined(chunks, "ordinal")
        ahead = np.maximum(at - 1, 0)
        moved = (
            (op[at] == Op.INSERT)
            & (at > 0)
            & (op[ahead] == Op.DELETE)
            & (commit[ahead] == commit[at])
            & (ordinal[ahead] + 1 == ordinal[at])
        )
        own = np.where(moved, ahead, at)
        before = previous[own]
        lookup = np.where(before < 0, own, -1)
        if not keep_deleted:
            before = np.where((before >= 0) & (op[before] == Op.DELETE), -1, before)
        return cls(len(op), at, unchanged, before, lookup)

    def fold(self, kept: Indexes) -> tuple[dict[int, Indexes], Mask | None, Indexes]:
        """For the kept changes, find where each left-out value comes from.

        Returns, per column, the change that holds the value; a mask of the values that no change holds; and the
        change whose key finds those at the destination.
        """
        node = np.full(self.count, -1, np.int64)
        node[self.at] = np.arange(len(self.at))
        kept_node = node[kept]
        partial = np.flatnonzero(kept_node >= 0)
        before_node = np.where(self.before >= 0, node[self.before], -1)
        unchanged = np.zeros((len(kept), self.unchanged.shape[1]), bool)
        lookup = np.full(len(kept), -1, np.int64)
        sources: dict[int, Indexes] = {}
        for column in np.flatnonzero(self.unchanged.any(axis=0)):
            left_out = self.unchanged[:, column]
            step = np.where(left_out & (before_node >= 0), before_node, np.arange(len(self.at)))
            # Each round doubles the distance that is followed back, so a row changed n times takes log n rounds.
            while not np.array_equal(further := step[step], step):
                step = further
            root = step[kept_node[partial]]
            missing = left_out[root] & (self.before[root] < 0)
            source = kept.copy()
            source[partial] = np.where(left_out[root] & ~missing, self.before[root], self.at[root])
            unchanged[partial[missing], column] = True
            lookup[partial[missing]] = self.lookup[root[missing]]
            sources[int(column)] = source
        return sources, unchanged if unchanged.any() else None, lookup


def _after_truncate(chunks: list[Changes]) -> tuple[list[Changes], Marks]:
    for number in range(len(chunks) - 1, -1, -1):
        at = np.flatnonzero(chunks[number].numpy("op") == Op.TRUNCATE)
        if len(at):
            chunk = chunks[number]
            rest = Changes(chunk.table, chunk.batch.slice(int(at[-1]) + 1))
            return [rest, *chunks[number + 1 :]] if len(rest) else chunks[number + 1 :], _marks([chunk], at[-1:])
    return chunks, _NO_MARKS


def _rows_only(chunk: Changes) -> Changes:
    op = chunk.numpy("op")
    if (op == Op.MERGE).any():
        raise TableError(
            "a merge operand cannot be written as a row",
            table=str(chunk.table.table),
            position=str(chunk.first),
            fix="change the source: it must fold merge operands into rows before they are written",
        )
    rows = op <= Op.READ
    return chunk if rows.all() else Changes(chunk.table, chunk.batch.filter(pa.array(rows)))


def _empty(table: TableSchema) -> Changes:
    nothing = pa.StructArray.from_arrays(
        [pa.nulls(0, column.type) for column in table.columns], fields=list(table.row_type)
    )
    return Changes.build(table, nothing, op=Op.READ, commit=0)


def _joined(chunks: list[Changes], name: str) -> npt.NDArray[Any]:
    return np.concatenate([chunk.numpy(name) for chunk in chunks])


def _column(chunks: list[Changes], table: TableSchema, name: str) -> pa.ChunkedArray[Any]:
    at = table.arrow.get_field_index(name)
    return pa.chunked_array([chunk.row.field(at) for chunk in chunks], table.columns[at].type)


def _last_per_key(key: Indexes) -> Indexes:
    """The last row of each key, in stream order."""
    if not len(key):
        return np.zeros(0, np.int64)
    low, high = int(key.min()), int(key.max())
    if high - low <= 8 * len(key) + 1024 < 2**31:
        # Keys that are close together can index an array of last occurrences, which needs no sort.
        seen = np.full(high - low + 1, -1, np.int32)
        seen[key - low] = np.arange(len(key), dtype=np.int32)
        mask = np.zeros(len(key), bool)
        mask[seen[seen >= 0]] = True
        return np.flatnonzero(mask)
    order = np.argsort(key, kind="stable")
    ends = np.append(key[order][1:] != key[order][:-1], True)
    return np.sort(order[ends])


def _previous_of_key(key: Indexes) -> Indexes:
    """For each row, the previous row with the same key, or -1."""
    order = np.argsort(key, kind="stable")
    same = key[order][1:] == key[order][:-1]
    previous = np.full(len(key), -1, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _bounds(chunks: list[Changes]) -> Indexes:
    return np.cumsum([0, *(len(chunk) for chunk in chunks)])


def _take_columns(
    chunks: list[Changes],
    at: Indexes,
    columns: list[int],
    table: TableSchema,
    sources: dict[int, Indexes] | None = None,
) -> pa.Table:
    """The given columns of the rows `at` (ascending). A column in `sources` takes its values from there instead."""
    starts = _bounds(chunks)
    cut = np.searchsorted(at, starts)
    result: list[pa.ChunkedArray[Any]] = []
    # A chunk of which all rows are taken is not copied.
    picks = [
        None if cut[i + 1] - cut[i] == len(chunk) else pa.array(at[cut[i] : cut[i + 1]] - starts[i])
        for i, chunk in enumerate(chunks)
    ]
    for column in columns:
        kind = table.columns[column].type
        if sources and column in sources:
            joined = pa.concat_arrays([chunk.row.field(column) for chunk in chunks])
            result.append(pa.chunked_array([joined.take(pa.array(sources[column]))], kind))
            continue
        pieces = [
            chunk.row.field(column) if pick is None else chunk.row.field(column).take(pick)
            for chunk, pick in zip(chunks, picks, strict=True)
            if pick is None or len(pick)
        ]
        result.append(pa.chunked_array(pieces, kind))
    return pa.table(result, schema=pa.schema([table.arrow.field(column) for column in columns]))


def _take_keys(chunks: list[Changes], table: TableSchema, at: Indexes) -> pa.Table:
    """The keys of the rows `at`, in any order; -1 gives a null key."""
    pick = pa.array(at, mask=at < 0)
    fields = [pa.field(name, table.column(name).type) for name in table.key]
    arrays = [_column(chunks, table, name).combine_chunks().take(pick) for name in table.key]
    return pa.table(arrays, schema=pa.schema(fields))


def _marks(chunks: list[Changes], at: Indexes) -> Marks:
    starts = _bounds(chunks)
    cut = np.searchsorted(at, starts)

    def take(name: str) -> pa.ChunkedArray[Any]:
        pieces = [
            chunk.batch.column(name).take(pa.array(at[cut[i] : cut[i + 1]] - starts[i]))
            for i, chunk in enumerate(chunks)
        ]
        return pa.chunked_array(pieces)

    def number(name: str) -> npt.NDArray[Any]:
        return _joined(chunks, name)[at]

    return Marks(number("op"), number("commit"), number("ordinal"), take("committed_at"), take("exact"))


def any_exact(chunks: Iterable[Changes]) -> bool:
    """Whether any change has a value that its column's type cannot hold."""
    return any(chunk.batch.column("exact").null_count < len(chunk) for chunk in chunks)


def _with_folded_exact(
    marks: Marks,
    chunks: list[Changes],
    table: TableSchema,
    kept: Indexes,
    sources: dict[int, Indexes],
    unchanged: Mask | None,
) -> Marks:
    """Marks with the unfit values of folded rows, each taken from the change that its column came from."""
    every = pa.chunked_array([chunk.batch.column("exact") for chunk in chunks]).combine_chunks()
    unfit = ~np.asarray(every.is_null().to_numpy(zero_copy_only=False), bool)
    touched = np.zeros(len(kept), bool)
    for source in sources.values():
        touched |= (source != kept) & (unfit[source] | unfit[kept])
    exact = marks.exact.to_pylist()
    # Values that do not fit their type are rare, and in folded rows rarer, so a loop over rows is fast enough.
    for row in np.flatnonzero(touched):
        merged: dict[str, str] = json.loads(exact[row] or "{}")
        for column, source in sources.items():
            if source[row] != kept[row] and not (unchanged is not None and unchanged[row, column]):
                name = table.columns[column].name
                merged.pop(name, None)
                text = every[int(source[row])].as_py()
                if text and name in (given := json.loads(text)):
                    merged[name] = given[name]
        exact[row] = json.dumps(merged, ensure_ascii=False) if merged else None
    return replace(marks, exact=pa.chunked_array([pa.array(exact, pa.string())]))
