"""Parses and checks what rqlite posts. No I/O here.

    {"service_id": "svc", "node_id": "n1", "payload": [{"index": 6, "commit_timestamp": 1794766424567, "events": [
      {"op": "UPDATE", "table": "t", "new_row_id": 1, "old_row_id": 1, "before": {…}, "after": {…}}]}]}

An event becomes the text that goes into the journal and two digests by which it is recognised: one of what was changed,
one of the images. Numbers keep their value: an integer beyond 64 bits is a REAL that was written without its exponent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

from tailrace.source.rqlite.option import SERVICE

_FIELDS = ("op", "table", "new_row_id", "old_row_id", "before", "after", "error")
_OPS = frozenset({"INSERT", "UPDATE", "DELETE"})
_INTEGERS = range(-(2**63), 2**63)
_ROW_ID = frozenset({int, type(None)})
_SCALARS = frozenset({int, float, str, type(None)})
_FOLDER_BYTES = 200  # file systems take 255 in a name
_RESERVED = (".", "receiver.")  # hidden names, `..`, and the receiver's own files next to the clusters' folders

ColumnSignature = tuple[tuple[str, ...], tuple[type, ...]]
"""The columns of an image and the types of their values, in the same order."""


class NotOursError(ValueError):
    """A body that is not what rqlite posts. The message says what is wrong and where, without any value of it."""


EventId = tuple[int, int]
"""What is remembered of an event: its `identity` and its `image`. A plain tuple, because there are many."""


class CdcEvent(NamedTuple):
    """One changed row. `text` is its JSON without the opening brace; `image` is 0 when it came without images."""

    table: str
    text: str
    identity: int
    image: int
    columns: tuple[ColumnSignature, ...]

    @property
    def known(self) -> EventId:
        return self.identity, self.image

    @property
    def belated(self) -> CdcEvent:
        """The event without its images, which newer changes may have made stale: the row has to be queried.

        A delete becomes an update, as the row may exist again. The event keeps what was sent.
        """
        sent = json.loads("{" + self.text)
        stripped = {name: value for name, value in sent.items() if name not in ("before", "after")}
        if sent["op"] == "DELETE":
            stripped["op"] = "UPDATE"
            if "old_row_id" in sent:
                stripped["new_row_id"] = sent["old_row_id"]
        stripped |= {"error": "it came after newer changes", "sent": sent}
        return self._replace(text=_text(stripped)[1:], columns=())

    def is_same(self, known: EventId) -> bool:
        """Whether it is the known event, as far as can be compared: one of them may lack its images."""
        identity, image = known
        return self.identity == identity and (self.image == image or self.image == 0 or image == 0)


@dataclass(frozen=True, slots=True)
class RaftEntry:
    """The events of one Raft entry. `index` is 0 where rqlite left it out; `at` is its commit time in ms."""

    index: int
    at: int
    events: tuple[CdcEvent, ...]


@dataclass(frozen=True, slots=True)
class PostedRequest:
    """One body. `digest` is equal only for identical bytes, as when a node retries."""

    service: str
    node: str
    entries: tuple[RaftEntry, ...]
    digest: str


def parse(body: bytes, digest: str | None = None) -> PostedRequest:
    """The request in a body, whose digest may be known already. Raises NotOursError."""
    try:
        found = json.loads(body, parse_int=_integer, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        # Leave out the exception's text: it may quote the body.
        where = f" at byte {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise NotOursError(f"the body is not JSON{where}") from None
    if not isinstance(found, dict):
        raise NotOursError("the body is not a JSON object")
    service, node = found.get("service_id", ""), found.get("node_id", "")
    if not isinstance(service, str) or not isinstance(node, str):
        raise NotOursError("service_id or node_id is not a text")
    if "payload" not in found:
        raise NotOursError("there is no payload")
    entries = _list(found["payload"], "payload")
    return PostedRequest(
        checked_service(service or SERVICE),
        node,
        tuple(_entry(entry, f"payload[{at}]") for at, entry in enumerate(entries)),
        digest_of(body) if digest is None else digest,
    )


def digest_of(body: bytes) -> str:
    """Equal only for identical bodies. Much faster than `parse`."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def read_line(line: bytes) -> tuple[dict[str, Any], CdcEvent]:
    """An event of the journal: its line, and what rqlite had sent."""
    found = json.loads(line, parse_int=_integer)
    return found, _event(found.get("sent", found))


def checked_service(name: str) -> str:
    """The name, if a cluster's folder can be named after it. Raises NotOursError."""
    try:
        folder = folder_of(name)
    except UnicodeEncodeError:
        raise NotOursError("service_id is not valid Unicode") from None
    if not name or len(folder) > _FOLDER_BYTES or folder.startswith(_RESERVED):
        raise NotOursError("service_id is too long, or begins with a dot or with `receiver.`")
    return name


def folder_of(service: str) -> str:
    """The name of a cluster's folder in the journal's."""
    return quote(service, safe="")


def _entry(found: object, where: str) -> RaftEntry:
    if not isinstance(found, dict):
        raise NotOursError(f"{where} is not an object")
    index, at = found.get("index", 0), found.get("commit_timestamp", 0)
    if type(index) is not int or index < 0:
        raise NotOursError(f"{where}.index is not a Raft index")
    if type(at) is not int:
        raise NotOursError(f"{where}.commit_timestamp is not a number of milliseconds")
    events = _list(found.get("events"), f"{where}.events")
    return RaftEntry(index, at, tuple(_events(events, f"{where}.events")))


def _events(found: list[Any], where: str) -> Iterator[CdcEvent]:
    for at, event in enumerate(found):
        try:
            yield _event(event)
        except NotOursError as error:
            raise NotOursError(f"{where}[{at}]{error}") from None


def _event(found: object) -> CdcEvent:
    """The event. Raises NotOursError with what is wrong, to be preceded by where it is. There may be very many."""
    if not isinstance(found, dict):
        raise NotOursError(" is not an object")
    op, table, new, old, before, after, error = map(found.get, _FIELDS)
    if not isinstance(op, str) or op not in _OPS:
        raise NotOursError(".op is not INSERT, UPDATE or DELETE")
    if not isinstance(table, str) or not table:
        raise NotOursError(".table is not a name")
    if type(new) not in _ROW_ID or type(old) not in _ROW_ID:
        raise NotOursError(" has a row id that is not a number")
    if error is not None and not isinstance(error, str):
        raise NotOursError(".error is not a text")
    if (before if op == "DELETE" else after) is None and not (before is None and after is None):
        raise NotOursError(" has images, but not the one of its op")
    try:
        what = f'"op": "{op}", "table": {_name(table)}'
        what += f', "new_row_id": {new}' if new is not None else ""
        what += f', "old_row_id": {old}' if old is not None else ""
        # In the order of their names, so that the text is the same from every node.
        texts: list[str] = []
        columns: list[ColumnSignature] = []
        if after is not None:
            columns.append(_columns(after, ".after"))
            texts.append(f'"after": {_text(after)}')
        if before is not None:
            columns.insert(0, _columns(before, ".before"))
            texts.append(f'"before": {_text(before)}')
        images = ", ".join(texts)
        flag = f', "error": {_text(error)}' if error else ""
        flag.encode()
        text = f"{what}, {images}{flag}}}" if images else f"{what}{flag}}}"
        return CdcEvent(table, text, _digest(what), _digest(images) if images else 0, tuple(columns))
    except NotOursError:
        raise
    except ValueError:
        raise NotOursError(" holds half a character or an infinite number") from None


def _columns(image: object, where: str) -> ColumnSignature:
    if not isinstance(image, dict) or not image:
        raise NotOursError(f"{where} is not a row")
    kinds = tuple(map(type, image.values()))
    if not _SCALARS.issuperset(kinds):
        raise NotOursError(f"{where} holds a value that SQLite does not have")
    return tuple(image), kinds


def _list(found: object, where: str) -> list[Any]:
    # Go writes an empty list as null.
    if found is None:
        return []
    if not isinstance(found, list):
        raise NotOursError(f"{where} is not a list")
    return found


@lru_cache(maxsize=4096)
def _name(table: str) -> str:
    return json.dumps(table, ensure_ascii=False)


# Sorted, so that an image has the same text and digest from every node.
_text = json.JSONEncoder(ensure_ascii=False, sort_keys=True, allow_nan=False).encode


def _digest(text: str) -> int:
    # Never 0, which means that the images are missing.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) or 1


def _integer(text: str) -> int | float:
    value = int(text)
    return value if value in _INTEGERS else float(text)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
