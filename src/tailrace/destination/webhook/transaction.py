"""The event stream of a batch as rows of the queue: begin, relation and commit travel with the change next to them.

An event is the text of a row. A begin comes before the text of the first change of its transaction, a relation before
the first change that has its columns, a commit after the last change. So they are sent, sent again and skipped together
with that change, whichever node sends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination import BeginEvent, CopyEndEvent, Event, RelationEvent
from tailrace.destination.webhook.batch_file import as_copied
from tailrace.destination.webhook.format.event import StreamFormat
from tailrace.model.change import Changes, Op, position_texts
from tailrace.model.schema import TableSchema


@dataclass
class TableEvents:
    """What a batch holds of one table, as rows of the queue."""

    copied: list[pa.RecordBatch] = field(default_factory=list)
    log: list[pa.RecordBatch] = field(default_factory=list)
    completes_copy: bool = False


@dataclass
class _Run:
    """Changes of one table with the same columns."""

    table: TableSchema
    copied: list[Changes] = field(default_factory=list)
    log: list[Changes] = field(default_factory=list)


def encode_events(events: Iterable[Event], form: StreamFormat, source: str) -> dict[str, TableEvents]:
    """The rows of all tables, by name; in the order of (commit, ordinal) their texts are the stream. Pure."""
    runs: list[_Run] = []
    latest: dict[str, _Run] = {}
    begins: dict[int, BeginEvent] = {}
    found: dict[str, TableEvents] = {}
    for event in events:
        if isinstance(event, BeginEvent):
            begins[event.commit] = event
        elif isinstance(event, RelationEvent):
            latest[str(event.table.table)] = run = _Run(event.table)
            runs.append(run)
        elif isinstance(event, CopyEndEvent):
            found.setdefault(str(event.table.table), TableEvents()).completes_copy = True
        elif isinstance(event, Changes):
            run = latest[str(event.table.table)]
            (run.copied if event.batch.column("op")[0].as_py() == Op.READ else run.log).append(event)
    logs: list[tuple[str, pa.RecordBatch]] = []
    for run in runs:
        name = str(run.table.table)
        rows = [as_copied(form.encode(chunk, source=source)) for chunk in run.copied]
        encoded = [*rows, *(form.encode(chunk, source=source) for chunk in _joined(run))]
        encoded = _announced([batch for batch in encoded if len(batch)], form, run.table, source)
        for batch in encoded:
            if batch.column("copied")[0].as_py():
                found.setdefault(name, TableEvents()).copied.append(batch)
            else:
                logs.append((name, batch))
    for name, batch in _bounded(logs, begins, form, source):
        found.setdefault(name, TableEvents()).log.append(batch)
    return found


def _joined(run: _Run) -> Iterator[Changes]:
    """All changes of the log in one piece: encoding a piece costs the same for one change and for thousands."""
    if run.log:
        whole = pa.Table.from_batches([chunk.batch for chunk in run.log]).combine_chunks()
        for batch in whole.to_batches():
            yield Changes(run.table, batch)


def _announced(
    encoded: list[pa.RecordBatch], form: StreamFormat, table: TableSchema, source: str
) -> list[pa.RecordBatch]:
    """The batches with the table's columns before the first event."""
    if not encoded:
        return []
    first = encoded[0]
    position = position_texts(*(first.column(name).to_numpy()[:1] for name in ("commit", "ordinal")))[0].as_py()
    relation = form.relation(table, position=position, source=source)
    before = pa.array([relation, *[None] * (len(first) - 1)], pa.string())
    return [_with_texts(first, before, pa.nulls(len(first), pa.string())), *encoded[1:]]


def _bounded(
    logs: list[tuple[str, pa.RecordBatch]], begins: dict[int, BeginEvent], form: StreamFormat, source: str
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The batches with a begin before the first change of each transaction, and a commit after the last."""
    if not logs:
        return
    commit = np.concatenate([batch.column("commit").to_numpy() for _, batch in logs])
    ordinal = np.concatenate([batch.column("ordinal").to_numpy() for _, batch in logs])
    order = np.lexsort((ordinal, commit))
    changes = np.flatnonzero(np.diff(commit[order])) + 1
    firsts, lasts = order[np.append(0, changes)], order[np.append(changes - 1, len(order) - 1)]
    events = [begins[number] for number in commit[firsts].tolist()]
    txn = pa.array([event.txn for event in events], pa.int64())
    at = pa.array([event.committed_at for event in events], pa.timestamp("us", "UTC"))
    texts = []
    for kind, places in (("begin", firsts), ("commit", lasts)):
        positions = position_texts(commit[places], ordinal[places])
        boundary = form.boundary(kind, positions=positions, txn=txn, at=at, source=source)
        index = np.full(len(order), -1)
        index[places] = np.arange(len(places))
        texts.append(boundary.take(pa.array(index, mask=index < 0)))
    start = 0
    for name, batch in logs:
        yield name, _with_texts(batch, *(text.slice(start, len(batch)) for text in texts))
        start += len(batch)


def _with_texts(batch: pa.RecordBatch, before: pa.Array[Any], after: pa.Array[Any]) -> pa.RecordBatch:
    """The rows with these texts around their own, where there are any."""
    texts = pc.binary_join_element_wise(before, batch.column("event"), after, ",", null_handling="skip")
    place = batch.schema.get_field_index("event")
    return batch.set_column(place, batch.schema.field(place), texts)
