"""The column that records when a row last changed: how it writes a time, and which of two values is later."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa

from tailrace.errors import UnfitError
from tailrace.model.schema import Column
from tailrace.source.poll.keyset import KeyValue

DAY_US = 86_400_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FAR = 1 << 62
_TICKS = {"TIMESTAMP_S": 1_000_000, "TIMESTAMP_MS": 1_000}
_ISO = re.compile(
    r"\d{4}-\d\d-\d\d(?:(?P<between>[ T])\d\d:\d\d(?P<seconds>:\d\d(?:\.(?P<fraction>\d+))?)?)?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?"
)


class VersionKind(Enum):
    INSTANT = "a time with its zone"
    LOCAL = "a time without zone"
    DAY = "a date"
    NUMBER = "a number that grows with every change of any row"
    TEXT = "ISO 8601 text, in UTC"


def kind_of(column: Column) -> VersionKind | None:
    """The kind of a column, from its type; None if its values cannot be ordered by time of change."""
    if pa.types.is_timestamp(column.type):
        return VersionKind.INSTANT if column.type.tz else VersionKind.LOCAL
    if pa.types.is_date(column.type):
        return VersionKind.DAY
    if pa.types.is_integer(column.type):
        return VersionKind.NUMBER
    return None


def tick_of(column: Column) -> int:
    """The column's resolution in microseconds, as far as its declared type shows."""
    if pa.types.is_date(column.type):
        return DAY_US
    if column.upstream_type in _TICKS:
        return _TICKS[column.upstream_type]
    digits = re.search(r"\((\d)\)", column.upstream_type)
    return 10 ** (6 - int(digits[1])) if digits and pa.types.is_timestamp(column.type) else 1


@dataclass(frozen=True)
class Scale:
    """How times (microseconds since 1970, UTC) are written in one column.

    `latest` is the highest value of a column whose type does not define how times are written: None when it is empty.
    Texts are written in the same form as `latest`, as texts are compared letter by letter.
    """

    kind: VersionKind
    tick: int = 1
    zone: str = "UTC"
    latest: KeyValue | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no value yet that shows how times are written."""
        return self.kind in (VersionKind.TEXT, VersionKind.NUMBER) and self.latest is None

    @property
    def timed(self) -> bool:
        return self.kind is not VersionKind.NUMBER

    def fits(self, value: KeyValue) -> bool:
        """Whether a value can be one of this column, whose kind may have been different when the value was stored."""
        text = str(value)
        if self.kind is VersionKind.NUMBER:
            return text.lstrip("-").isdecimal()
        return self.kind is not VersionKind.TEXT or _ISO.fullmatch(text) is not None

    def at(self, moment: int) -> KeyValue:
        """The latest value that is not after this time."""
        aware = _EPOCH + timedelta(microseconds=moment // self.tick * self.tick)
        match self.kind:
            case VersionKind.INSTANT:
                return aware.isoformat(" ")
            case VersionKind.LOCAL | VersionKind.DAY:
                local = (_EPOCH + timedelta(microseconds=moment)).astimezone(ZoneInfo(self.zone)).replace(tzinfo=None)
                if self.kind is VersionKind.DAY:
                    return local.date().isoformat()
                return (local - timedelta(microseconds=_of_day(local) % self.tick)).isoformat(" ")
            case VersionKind.TEXT:
                return _written(aware, str(self.latest))
            case VersionKind.NUMBER:
                raise TypeError("a number is not a time")

    def after(self, moment: int) -> KeyValue:
        """A value after every value that is not after this time."""
        step = {VersionKind.DAY: DAY_US, VersionKind.TEXT: _text_tick(str(self.latest))}.get(self.kind, self.tick)
        return self.at(moment + step)

    def place(self, value: KeyValue) -> Any:
        """A key that sorts like the values of the column."""
        text = str(value)
        match self.kind:
            case VersionKind.NUMBER:
                return int(value)
            case VersionKind.TEXT:
                return text
            case VersionKind.DAY | VersionKind.LOCAL | VersionKind.INSTANT:
                try:
                    parsed = datetime.fromisoformat(text) if self.kind is not VersionKind.DAY else _midnight(text)
                except ValueError:  # infinity, years BC or past 9999
                    return -_FAR if text.startswith("-") or text.endswith("BC") else _FAR
                return round((parsed.replace(tzinfo=parsed.tzinfo or UTC) - _EPOCH) / timedelta(microseconds=1))


def _midnight(text: str) -> datetime:
    return datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC)


def _of_day(moment: datetime) -> int:
    return ((moment.hour * 60 + moment.minute) * 60 + moment.second) * 1_000_000 + moment.microsecond


def require_iso(value: str, table: str, column: str) -> str:
    """The value itself. Raises UnfitError for text that does not sort by time."""
    found = _ISO.fullmatch(value)
    if found is None or found["zone"] not in (None, "Z", "+00:00", "+0000"):
        raise UnfitError(
            f"column {column} holds text that is not a time in UTC such as 2026-11-15 12:00:00",
            fix=f"write {column} with CURRENT_TIMESTAMP or strftime('%Y-%m-%dT%H:%M:%fZ', 'now'), or as an integer",
            table=table,
        )
    return value


def _text_tick(like: str) -> int:
    found = _ISO.fullmatch(like)
    if found is None or found["between"] is None:
        return DAY_US
    if found["seconds"] is None:
        return 60_000_000
    return int(10 ** max(6 - len(found["fraction"] or ""), 0))


def _written(moment: datetime, like: str) -> str:
    found = _ISO.fullmatch(like)
    if found is None or found["between"] is None:
        return f"{moment:%Y-%m-%d}"
    text = f"{moment:%Y-%m-%d}{found['between']}{moment:%H:%M}"
    if found["seconds"] is not None:
        text += f":{moment:%S}"
    if found["fraction"] is not None:
        text += "." + f"{moment:%f}".ljust(len(found["fraction"]), "0")[: len(found["fraction"])]
    return text + (found["zone"] or "")
