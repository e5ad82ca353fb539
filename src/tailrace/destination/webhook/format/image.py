"""The content of events: the images and keys of each as JSON, and its id."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.webhook.format.event import QUEUE_SCHEMA
from tailrace.destination.webhook.format.json_value import EventWriter
from tailrace.model.change import Changes, Op, position_texts
from tailrace.model.digest import row_digests

Indexes = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class EventImages:
    """The events of some changes, in their order; the columns have a value for each event.

    place            the index of its change; for a changed key that is sent as one update, that of the second half
    old_place        the same, but for such an update the first half
    op               the operation; such an update is one
    before, after    images; null where there is none
    key, old_key     null for a truncate and a table without key
    """

    changes: Changes
    place: Indexes
    old_place: Indexes
    op: npt.NDArray[np.int8]
    before: pa.Array[Any]
    after: pa.Array[Any]
    key: pa.Array[Any]
    old_key: pa.Array[Any]

    @property
    def moved(self) -> _Mask:
        """Where a changed key is sent as one update."""
        moved: _Mask = self.place != self.old_place
        return moved

    def column(self, name: str) -> pa.Array[Any]:
        """A column of the changes, for the events."""
        return self.changes.batch.column(name).take(pa.array(self.place))

    def ids(self, source: str) -> pa.Array[Any]:
        """`source:schema.table:position`. A copied row has no position of its own; its key stands for the ordinal."""
        commit, ordinal = (self.changes.numpy(name)[self.place] for name in ("commit", "ordinal"))
        copied = self.op == Op.READ
        prefix: Any = f"{source}:{self.changes.table.table}:"
        if copied.any():
            ordinal = np.where(copied, _row_digests(self.changes)[self.place], ordinal)
            prefix = pc.if_else(pa.array(copied), f"{prefix}read:", prefix)
        return pc.binary_join_element_wise(prefix, position_texts(commit, ordinal), "")

    def to_queue(self, ids: pa.Array[Any], texts: pa.Array[Any]) -> pa.RecordBatch:
        """The events as rows of the queue."""
        count = len(self.place)
        return pa.RecordBatch.from_arrays(
            [
                pa.repeat(str(self.changes.table.table), count),
                self.column("commit"),
                self.column("ordinal"),
                pa.array(self.op == Op.READ),
                pa.repeat(False, count),
                self.column("committed_at"),
                ids,
                texts,
            ],
            schema=QUEUE_SCHEMA,
        )


def build_images(
    changes: Changes,
    writer: EventWriter,
    *,
    joins: bool,
    names: Sequence[str] | None = None,
    placeholder: str | None = None,
) -> EventImages:
    """The events of the changes. With `joins`, the two halves of a changed key are one update.

    An image has the columns `names`, in that order; all by default. Those that the upstream did not send are left out,
    or have the JSON `placeholder` as value. Boundaries of transactions and schema versions are not events. A merge
    operand, which only comes where a changelog was asked for, is sent as it is: its row holds the operand.
    """
    op = changes.numpy("op")
    place = np.flatnonzero((op <= Op.TRUNCATE) | (op == Op.MERGE))
    old_place = np.arange(len(changes))
    kind = op
    if joins and len(second := second_halves(changes)):
        place = np.setdiff1d(place, second - 1)
        old_place[second] = second - 1
        kind = op.copy()
        kind[second] = Op.UPDATE
    images = _Images(changes, writer, [column.name for column in changes.table.columns] if names is None else names)
    old, new = images.old(), images.new(placeholder)
    key = images.key()
    origin = old_place[place]
    return EventImages(
        changes,
        place,
        origin,
        kind[place],
        before=old.take(pa.array(origin)),
        after=new.take(pa.array(place)),
        key=key.take(pa.array(place)),
        old_key=key.take(pa.array(origin)),
    )


def second_halves(changes: Changes) -> Indexes:
    """The places of inserts that make one changed key with the delete right before them."""
    op, commit, ordinal = (changes.numpy(name) for name in ("op", "commit", "ordinal"))
    return 1 + np.flatnonzero(
        (op[:-1] == Op.DELETE)
        & (op[1:] == Op.INSERT)
        & (commit[:-1] == commit[1:])
        & (ordinal[:-1] % 2 == 0)
        & (ordinal[:-1] + 1 == ordinal[1:])
    )


def _row_digests(changes: Changes) -> Indexes:
    """A number for each row that stays the same however the table is cut into chunks; without a key, nearly so."""
    columns = dict(zip(changes.table.row_type.names, changes.row.flatten(), strict=True))
    if changes.table.key:
        return row_digests([columns[name] for name in changes.table.key])
    return row_digests([*columns.values(), changes.batch.column("ordinal")])


class _Images:
    def __init__(self, changes: Changes, writer: EventWriter, names: Sequence[str]) -> None:
        self._changes, self._writer, self._names = changes, writer, names
        self._op = changes.numpy("op")
        self._exact = _exact_texts(changes, writer)
        columns = zip(changes.table.row_type.names, changes.row.flatten(), strict=True)
        self._members = {
            name: _unless(self._exact.get(name), writer.value(column))
            for name, column in columns
            if name in names or name in changes.table.key
        }
        self._index = [changes.table.row_type.names.index(name) for name in names]

    def new(self, placeholder: str | None) -> pa.Array[Any]:
        """Of each change the new row, null where there is none."""
        members = {name: self._members[name] for name in self._names}
        left_out = self._changes.unchanged_mask()
        if left_out is not None:
            left_out = left_out[:, self._index]
            if placeholder is not None:
                members = {
                    name: pc.if_else(pa.array(mask), placeholder, members[name])
                    for name, mask in zip(members, left_out.T, strict=True)
                }
                left_out = None
        has_row = (self._op != Op.DELETE) & (self._op != Op.TRUNCATE)
        return _where(has_row, self._writer.join(members, len(self._changes), left_out))

    def old(self) -> pa.Array[Any]:
        """Of each change what is known of the old row, null where that is nothing."""
        before = self._changes.batch.column("before")
        has_before = before.is_valid().to_numpy(zero_copy_only=False)
        places = np.flatnonzero(has_before)
        text = pa.nulls(len(self._changes), pa.string())
        if len(places):
            images = dict(zip(self._changes.table.row_type.names, before.take(pa.array(places)).flatten(), strict=True))
            # The exact texts of an update belong to the new row.
            deleted = self._op[places] == Op.DELETE
            exact = {name: _where(deleted, each.take(pa.array(places))) for name, each in self._exact.items()}
            members = {name: _unless(exact.get(name), self._writer.value(images[name])) for name in self._names}
            text = _spread(self._writer.join(members, len(places)), places, len(self._changes))
        places = np.flatnonzero((self._op == Op.DELETE) & ~has_before)
        if len(places):
            # Outside the key, null means nothing here: the upstream did not send it.
            key = self._changes.table.key
            names = [name for name in self._names if name in key or not key]
            known = {name: self._members[name].take(pa.array(places)) for name in names}
            gone = _spread(self._writer.join(known, len(places)), places, len(self._changes))
            text = pc.coalesce(text, gone)
        return text

    def key(self) -> pa.Array[Any]:
        if not self._changes.table.key:
            return pa.nulls(len(self._changes), pa.string())
        members = {name: self._members[name] for name in self._changes.table.key}
        return _where(self._op != Op.TRUNCATE, self._writer.join(members, len(self._changes)))


def _exact_texts(changes: Changes, writer: EventWriter) -> Mapping[str, pa.Array[Any]]:
    """By column, the JSON of values that its type cannot hold; null where it can. Distinct ones are read once."""
    exact = changes.batch.column("exact")
    if exact.null_count == len(exact):
        return {}
    encoded = exact.dictionary_encode()
    objects: list[dict[str, str]] = [json.loads(text) for text in encoded.dictionary.to_pylist()]
    unfit = {name for each in objects for name in each}
    return {
        column.name: writer.exact(pa.array([each.get(column.name) for each in objects], pa.string()), column.type).take(
            encoded.indices
        )
        for column in changes.table.columns
        if column.name in unfit
    }


def _unless(exact: pa.Array[Any] | None, text: pa.Array[Any]) -> pa.Array[Any]:
    return text if exact is None else pc.coalesce(exact, text)


def _where(mask: _Mask, text: pa.Array[Any]) -> pa.Array[Any]:
    return text if mask.all() else pc.if_else(pa.array(mask), text, None)


def _spread(text: pa.Array[Any], places: Indexes, count: int) -> pa.Array[Any]:
    """The texts at their places, null elsewhere."""
    index = np.full(count, -1)
    index[places] = np.arange(len(places))
    return text.take(pa.array(index, mask=index < 0))
