"""Decode raw pgoutput messages (protocol version 1, text format) to `Changes`, many rows at a time.

The messages of one relation are read column by column for all rows at once; texts become Arrow strings over the
message buffer, and Arrow casts do the rest. There is no Python loop over rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.errors import RESYNC, DamagedError, TableError
from tailrace.model.change import START, Changes, Op, Position, pack_unchanged
from tailrace.model.schema import TableSchema
from tailrace.source.follower import SchemaHistory
from tailrace.source.postgres.pgoutput import message
from tailrace.source.postgres.pgoutput.message import MalformedError, MessageKind, Relation, Truncate
from tailrace.source.postgres.pgoutput.message_batch import Indexes, MessageBatch, OpenTransaction, Placement
from tailrace.source.postgres.pgoutput.row import Images, PostgresImage
from tailrace.source.postgres.schema_diff import check_identity, require_fit

__all__ = ["OpenTransaction", "decode", "only"]


def only(table: TableSchema) -> SchemaHistory:
    """The history of a table that never changed."""
    return ((START, table),)


def decode(
    messages: pa.Array[Any],
    *,
    relations: Mapping[int, Relation],
    transaction: OpenTransaction | None,
    tables: Mapping[int, SchemaHistory],
    bounds: Mapping[int, tuple[Position, Position]] | None = None,
    skips: Mapping[int, Collection[Position]] | None = None,
) -> Iterator[Changes]:
    """The changes in `messages`, a binary array in stream order that may begin and end within a transaction.

    `relations` are those known before the first message, `transaction` the one open there. `tables` holds, by
    relation OID, the versions of each table to read: a row is read with the version of its position. Other tables
    are skipped, and so are changes outside a table's `bounds` (after, upto] and those at the positions in
    `skips`. Pure: a repeat gives the same.

    Yields at least once per table with changes, each table's changes in stream order. Ordinals are even and count
    every change of the transaction, also of tables that are not read. An update that moves a row to another key, and
    any update of a table without key, is a delete (even ordinal) directly followed by an insert (the odd one after it).
    If the upstream sent only the old key, such an insert may have `unchanged` columns: their value is that of the row
    under the key that the delete before it names, and applying the two must carry it over.

    `exact` is about `row`; a value of `before` that its type cannot hold is null.

    A table whose rows cannot be read raises SchemaChangedError or UnfitError with the position and the bytes of the
    first such row, after all changes of the other tables, and some of its own before that row, were yielded. Raises
    DamagedError for bytes that are not pgoutput.
    """
    try:
        yield from _decode(messages, relations, transaction, tables, bounds or {}, skips or {})
    except (MalformedError, IndexError) as error:
        raise DamagedError(
            f"messages that are not pgoutput of version 1 in text format: {error}",
            fix=RESYNC,
        ) from error


def _decode(
    messages: pa.Array[Any],
    relations: Mapping[int, Relation],
    transaction: OpenTransaction | None,
    tables: Mapping[int, SchemaHistory],
    bounds: Mapping[int, tuple[Position, Position]],
    skips: Mapping[int, Collection[Position]],
) -> Iterator[Changes]:
    frame = MessageBatch.of(messages)
    placement = Placement.of(frame, transaction)
    first_error: TableError | None = None
    failed: set[int] = set()
    for whole in _pieces(frame, relations, tables):
        after, upto = bounds.get(whole.oid, (None, None))
        inside = whole.between(placement.upto(after), placement.upto(upto)) if after and upto else whole
        for table, piece in _by_version(inside, placement, tables[whole.oid]) if inside.size else ():
            if piece.oid in failed:
                continue
            kept = piece.without(_found(placement, skips.get(piece.oid, ())))
            if not kept.size:
                continue
            try:
                changes = _read(frame, placement, kept, table)
            except TableError as error:
                _locate(error, frame, placement, kept, table)
                first_error = first_error or error
                failed.add(piece.oid)
            else:
                yield changes
    if first_error is not None:
        raise first_error


def _by_version(piece: _Piece, placement: Placement, history: SchemaHistory) -> Iterator[tuple[TableSchema, _Piece]]:
    """The piece split where a version of its table begins, each part with its version."""
    if len(history) == 1:
        yield history[0][1], piece
        return
    cuts = [0, *(placement.before(position) for position, _ in history[1:]), len(placement.commit)]
    for (begin, end), (_, table) in zip(pairwise(cuts), history, strict=True):
        part = piece.between(begin, end)
        if part.size:
            yield table, part


def _found(placement: Placement, positions: Collection[Position]) -> Indexes:
    """The changes at these positions; the second half of a key change selects both halves."""
    whole = [Position(at.commit, at.ordinal & ~1) for at in positions]
    # Nothing for a position before or after these messages.
    return np.array([each for at in whole for each in range(placement.before(at), placement.upto(at))], np.int64)


def _locate(error: TableError, frame: MessageBatch, placement: Placement, piece: _Piece, table: TableSchema) -> None:
    """Set the position and the bytes of the first unreadable row in the error. Finds that row by bisection."""
    while piece.size > 1:
        middle = int(np.sort(np.concatenate([piece.rows, piece.truncates]))[piece.size // 2])
        first = piece.between(0, middle)
        try:
            _read(frame, placement, first, table)
        except TableError:
            piece = first
        else:
            piece = piece.between(middle, len(placement.commit))
    error.position = str(Position(int(placement.commit[piece.first]), int(placement.ordinal[piece.first])))
    error.raw = frame.message(int(frame.changes[piece.first]))


@dataclass(frozen=True)
class _Piece:
    """Changes of one table under one Relation message. `rows` and `truncates`: indexes into `MessageBatch.changes`."""

    oid: int
    relation: Relation | None
    rows: Indexes
    truncates: Indexes

    @property
    def first(self) -> int:
        return int(min(each[0] for each in (self.rows, self.truncates) if len(each)))

    @property
    def size(self) -> int:
        return len(self.rows) + len(self.truncates)

    def between(self, begin: int, end: int) -> _Piece:
        """Its changes from `begin` up to, but not including, `end`."""
        rows, truncates = (each[(each >= begin) & (each < end)] for each in (self.rows, self.truncates))
        return _Piece(self.oid, self.relation if len(rows) else None, rows, truncates)

    def without(self, changes: Indexes) -> _Piece:
        if not len(changes):
            return self
        rows = self.rows[~np.isin(self.rows, changes)]
        return _Piece(self.oid, self.relation if len(rows) else None, rows, self.truncates)


def _pieces(
    frame: MessageBatch, relations: Mapping[int, Relation], tables: Mapping[int, SchemaHistory]
) -> Iterator[_Piece]:
    is_truncate = frame.kinds[frame.changes] == MessageKind.TRUNCATE
    rows = np.flatnonzero(~is_truncate)
    by_oid = _group(rows, frame.relation_oids(frame.changes[rows]))
    truncates: dict[int, list[int]] = {}
    for change in np.flatnonzero(is_truncate):
        parsed = message.parse(frame.message(int(frame.changes[change])))
        assert isinstance(parsed, Truncate)
        for oid in parsed.oids:
            truncates.setdefault(oid, []).append(int(change))
    shapes = _shapes(frame, relations)
    none = np.empty(0, np.int64)
    for oid in sorted(tables.keys() & (by_oid.keys() | truncates.keys())):
        own_truncates = np.array(truncates.get(oid, []), np.int64)
        yield from _cut(frame, oid, shapes.get(oid, []), by_oid.get(oid, none), own_truncates)


def _group(rows: Indexes, oids: Indexes) -> dict[int, Indexes]:
    if not len(rows):
        return {}
    order = np.argsort(oids, kind="stable")
    found, begins = np.unique(oids[order], return_index=True)
    return dict(zip(found.tolist(), np.split(rows[order], begins[1:]), strict=True))


def _shapes(frame: MessageBatch, relations: Mapping[int, Relation]) -> dict[int, list[tuple[int, Relation]]]:
    """By OID, the Relations and the change from which each one is valid; repeats of the same one are left out."""
    shapes = {oid: [(0, relation)] for oid, relation in relations.items()}
    for index in frame.places(MessageKind.RELATION).tolist():
        relation = message.parse(frame.message(index))
        assert isinstance(relation, Relation)
        known = shapes.setdefault(relation.oid, [])
        if not known or known[-1][1] != relation:
            known.append((int(np.searchsorted(frame.changes, index)), relation))
    return shapes


def _cut(
    frame: MessageBatch, oid: int, shapes: list[tuple[int, Relation]], rows: Indexes, truncates: Indexes
) -> Iterator[_Piece]:
    if len(rows) and (not shapes or rows[0] < shapes[0][0]):
        raise MalformedError(f"rows of relation {oid} come before its Relation message")
    # Only truncates can come before the first Relation; they need none.
    bounds = [0, *(begin for begin, _ in shapes[1:]), len(frame.changes)]
    held: list[Relation | None] = [shape for _, shape in shapes]
    for (begin, end), relation in zip(pairwise(bounds), held or [None], strict=True):
        part = _Piece(oid, relation, rows, truncates).between(begin, end)
        if part.size:
            yield part


def _read(frame: MessageBatch, placement: Placement, piece: _Piece, table: TableSchema) -> Changes:
    if piece.relation is None:
        columns = [pa.nulls(len(piece.truncates), column.type) for column in table.columns]
        return _build(table, placement, piece.truncates, 0, Op.TRUNCATE, columns)
    require_fit(table, piece.relation)
    images = Images(frame, frame.changes[piece.rows], piece.relation, table)
    if (images.kinds != MessageKind.INSERT).any():
        check_identity(table, piece.relation, images_lack_key=images.has_lost_key())
    return _assemble(table, placement, piece, images)


_OPS = np.zeros(256, np.int8)
_OPS[[MessageKind.INSERT, MessageKind.UPDATE, MessageKind.DELETE]] = [Op.INSERT, Op.UPDATE, Op.DELETE]


def _assemble(table: TableSchema, placement: Placement, piece: _Piece, images: Images) -> Changes:
    ops = _OPS[images.kinds]
    new = images.read()
    moved = images.old_rows[:0]
    if len(images.old_rows):
        moves = images.key_changed() if table.key else np.ones(len(images.old_rows), bool)
        moved = np.flatnonzero(moves)
    if not len(moved) and not len(piece.truncates) and not images.is_full.any():
        return _build(table, placement, piece.rows, 0, ops, new.columns, new.exact, unchanged=images.unchanged)
    return _weave(table, placement, piece, images, ops, new, moved)


def _weave(
    table: TableSchema,
    placement: Placement,
    piece: _Piece,
    images: Images,
    ops: npt.NDArray[np.int8],
    new: PostgresImage,
    moved: Indexes,
) -> Changes:
    """Changes where some updates become two, or truncates come between rows, or old images are kept.

    `moved` are indexes into `images.old_rows`. Images are numbered: first the new ones, then the old ones; -1 is none.
    """
    count, old_count, truncated = len(piece.rows), len(images.old_rows), len(piece.truncates)
    splits = images.old_rows[moved]
    half = np.zeros(count, np.int64)
    half[splits] = 1
    ops[splits] = Op.INSERT
    before = np.full(count, -1)
    before[images.old_rows] = np.where(images.is_full[images.old_rows], count + np.arange(old_count), -1)
    deleted = ops == Op.DELETE
    before[deleted] = np.where(images.is_full[deleted], np.flatnonzero(deleted), -1)
    split_before = before[splits]
    before[splits] = -1

    change = np.concatenate([piece.rows, piece.rows[splits], piece.truncates])
    halves = np.concatenate([half, np.zeros(len(splits) + truncated, np.int64)])
    order = np.lexsort((halves, change))
    nothing = np.full(truncated, -1)
    image = np.concatenate([np.arange(count), count + moved, nothing])[order]
    before = np.concatenate([before, split_before, nothing])[order]
    op = np.concatenate([ops, np.full(len(splits), Op.DELETE), np.full(truncated, Op.TRUNCATE)])[order].astype(np.int8)

    unchanged = images.unchanged
    if unchanged is not None:
        blank = np.zeros((old_count + 1, len(table.columns)), bool)
        unchanged = np.concatenate([unchanged, blank])[image]
    old = images.read_old() if old_count else None
    pools = [_pool(column, old.columns[index] if old else None) for index, column in enumerate(new.columns)]
    columns, exacts = new.columns, new.exact
    if len(order) > count:
        columns = [pool.take(_indexes(image)) for pool in pools]
        exacts = _pool(_texts(new.exact, count), _texts(old.exact if old else None, old_count)).take(_indexes(image))
    befores = None
    if (before >= 0).any():
        befores = pa.StructArray.from_arrays(
            [pool.take(_indexes(before)) for pool in pools], fields=list(table.row_type), mask=pa.array(before < 0)
        )
    return _build(
        table,
        placement,
        change[order],
        halves[order],
        op,
        columns,
        exacts,
        unchanged=unchanged,
        before=befores,
    )


def _pool(new: pa.Array[Any], old: pa.Array[Any] | None) -> pa.Array[Any]:
    return new if old is None else pa.concat_arrays([new, old])


def _texts(exact: pa.Array[Any] | None, count: int) -> pa.Array[Any]:
    return pa.nulls(count, pa.string()) if exact is None else exact


def _indexes(places: Indexes) -> pa.Array[Any]:
    return pa.array(places, mask=places < 0)


def _build(
    table: TableSchema,
    placement: Placement,
    changes: Indexes,
    half: Indexes | int,
    op: npt.NDArray[np.int8] | Op,
    columns: list[pa.Array[Any]],
    exact: pa.Array[Any] | None = None,
    *,
    unchanged: npt.NDArray[np.bool_] | None = None,
    before: pa.StructArray | None = None,
) -> Changes:
    xid = placement.xid[changes]
    # A message outside any transaction has neither.
    nothing = None if xid.all() else xid == 0
    return Changes.build(
        table,
        table.rows(columns, len(changes)),
        op=op,
        commit=placement.commit[changes],
        ordinal=placement.ordinal[changes] + half,
        txn=pa.array(xid, mask=nothing),
        committed_at=pa.array(placement.committed_at_us[changes], mask=nothing).view(pa.timestamp("us", "UTC")),
        unchanged=None if unchanged is None else pack_unchanged(unchanged),
        exact=exact,
        before=before,
    )
