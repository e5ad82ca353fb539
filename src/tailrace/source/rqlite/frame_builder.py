"""New events as a frame of the journal: one line of JSON each, and a summary, so that planning need not read the lines.

    line   {"index": …, "ordinal": …, "at": …, the event as it came}
           with "zero": [index, place] if it came with index 0, and where it belongs; with "entry": index if
           that index came after newer ones; either kind of late event has no images and holds the whole event
           in "sent"
    meta   {"request": digest, "node": …, "tables": {name: {"rows", "bytes", "missing", "shapes"}}}
           with "gap": {"follows": node, "after": index, "at": …} if indexes are missing after this one, which came from
           `follows` and was committed at `at`; all of it is empty where nothing came before

`missing` counts the events without images. A shape is a run of events of one table whose images have the same
columns: the position of the first of them, and for each column the letters of the kinds of values in that run:
i integer, f float, s text, n null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tailrace.journal import Frame
from tailrace.model.change import Position
from tailrace.source.rqlite.deduplication import DeduplicationWindow, Placed, Zero
from tailrace.source.rqlite.request import ColumnSignature, PostedRequest, read_line

_LETTERS = {int: "i", float: "f", str: "s", type(None): "n"}


@dataclass
class _Shape:
    first: Position
    names: frozenset[str]
    signatures: set[ColumnSignature] = field(default_factory=set)

    def describe(self) -> list[Any]:
        kinds: dict[str, set[str]] = {name: set() for name in sorted(self.names)}
        for names, types in self.signatures:
            for name, kind in zip(names, types, strict=True):
                kinds[name].add(_LETTERS[kind])
        return [str(self.first), {name: "".join(sorted(letters)) for name, letters in kinds.items()}]


@dataclass
class _Summary:
    rows: int = 0
    bytes: int = 0
    missing: int = 0
    shapes: list[_Shape] = field(default_factory=list)

    def add(self, position: Position, columns: tuple[ColumnSignature, ...], length: int) -> None:
        self.rows += 1
        self.bytes += length
        self.missing += not columns
        for signature in columns:
            shape = self.shapes[-1] if self.shapes else None
            if shape is None or signature not in shape.signatures:
                names = frozenset(signature[0])
                if shape is None or shape.names != names:
                    shape = _Shape(position, names)
                    self.shapes.append(shape)
                shape.signatures.add(signature)

    def describe(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "bytes": self.bytes,
            "missing": self.missing,
            "shapes": [shape.describe() for shape in self.shapes],
        }


@dataclass(frozen=True)
class LastEntry:
    """The last Raft entry that came before a request: its index, the node that sent it, and when it was committed."""

    index: int
    node: str
    at: int

    def gap_before(self, request: PostedRequest) -> dict[str, Any] | None:
        """The first gap that a request leaves. Before or in it a leader was elected, which takes one index."""
        if not self.node:
            return {"follows": "", "after": 0, "at": 0}
        last, at = self.index, self.at
        for entry in request.entries:
            if entry.events and entry.index > last:
                if entry.index > last + 2:
                    return {"follows": self.node, "after": last, "at": at}
                last, at = entry.index, entry.at
        return None


NOTHING = LastEntry(0, "", 0)


def build(placed: list[Placed], request: PostedRequest, before: LastEntry = NOTHING) -> Frame:
    """The frame of one request's new events, of which there is at least one."""
    gap = before.gap_before(request)
    tables: dict[str, _Summary] = {}
    lines: list[bytes] = []
    for one in placed:
        commit, ordinal = one.position
        zero = "" if one.zero is None else f'"zero": {list(one.zero)}, '
        zero += "" if one.entry is None else f'"entry": {one.entry}, '
        event = one.event.belated if one.late else one.event
        line = f'{{"index": {commit}, "ordinal": {ordinal}, "at": {one.at}, {zero}{event.text}\n'.encode()
        lines.append(line)
        tables.setdefault(event.table, _Summary()).add(one.position, event.columns, len(line))
    last = placed[-1].position
    described = {name: summary.describe() for name, summary in tables.items()}
    return Frame(
        placed[0].position,
        # A changed key becomes two changes; the frame holds both halves of the last one.
        Position(last.commit, last.ordinal + 1),
        True,
        len(lines),
        json.dumps(
            {"request": request.digest, "node": request.node, "tables": described} | ({"gap": gap} if gap else {})
        ).encode(),
        b"".join(lines),
    )


def remember(frame: Frame, window: DeduplicationWindow) -> None:
    """Add the events of a frame after it to a window."""
    meta = json.loads(frame.meta)
    for line in bytes(frame.payload).splitlines():
        found, event = read_line(line)
        zero = Zero(*found["zero"]) if "zero" in found else None
        position = Position(found["index"], found["ordinal"])
        entry, request, node = found.get("entry"), meta["request"], meta["node"]
        window.remember(position, event.known, zero, entry, request, node, found["at"])
