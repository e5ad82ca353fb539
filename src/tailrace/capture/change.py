"""One change as stored on the tape, and the operation that applies it to a database or undoes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailrace.capture import layout
from tailrace.capture.layout import COMMIT, DELETE, INSERT, SCHEMA_TABLE, UPDATE
from tailrace.capture.record import MalformedRecordError, Value, decode, join, split
from tailrace.errors import DamagedError, PreflightError

RecordRow = tuple[Value, ...]
RecordPart = tuple[int, bytes]
_UNKNOWN: RecordPart = (-1, b"")


@dataclass(frozen=True)
class Insert:
    table: str
    id: int
    row: RecordRow


@dataclass(frozen=True)
class Update:
    """Write a row again. `changed` says for each column of `row` whether to write it; None means all."""

    table: str
    id: int
    row: RecordRow
    changed: tuple[bool, ...] | None


@dataclass(frozen=True)
class Delete:
    table: str
    id: int


@dataclass(frozen=True)
class Schema:
    """A row of sqlite_schema (type, name, tbl_name, rootpage, sql) is added, removed or changed, by `statement`, if
    that is known."""

    before: RecordRow | None
    after: RecordRow | None
    statement: str | None


@dataclass(frozen=True)
class Commit:
    """The end of a transaction. It does not change data."""


Operation = Insert | Update | Delete | Schema | Commit


@dataclass(frozen=True)
class CapturedChange:
    """A row of the capture table, with its images as records. `txn_id` is None if the tape has no transaction ids."""

    change_id: int
    change_time: int | None
    txn_id: int | None
    type: int
    table: str | None
    id: Value
    before: bytes | None
    after: bytes | None
    updates: bytes | None

    @property
    def is_schema(self) -> bool:
        return self.table == SCHEMA_TABLE

    def normal(self) -> CapturedChange:
        """The same change in standard form. Turso differs in two cases: when a key changes, it stores the new row in
        `before`; and when an upsert updates a row, it stores the new row in `before` too, and the old row nowhere."""
        if self.type == INSERT and self.after is None and self.before is not None:
            return replace(self, before=None, after=self.before)
        if self.type == UPDATE and self.updates is None and self.before is not None and self.before == self.after:
            return replace(self, before=None)
        return self

    def reversed(self) -> CapturedChange:
        """The change that undoes this one. Raises PreflightError if the tape does not hold the old row."""
        match self.type:
            case layout.COMMIT:
                return self
            case layout.INSERT:
                return replace(self, type=DELETE, before=self.after, after=None, updates=None)
        if self.before is None:
            raise self._lacking("before")
        if self.type == DELETE:
            return replace(self, type=INSERT, before=None, after=self.before, updates=None)
        updates = None if self.is_schema else compare_images(self.after, self.before)
        return replace(self, before=self.after, after=self.before, updates=updates)

    def into_apply(self) -> Operation:
        """The operation that applies this change to a database.

        Raises PreflightError if the capture mode left out an image that is needed, DamagedError for a bad record.
        """
        if self.type == COMMIT:
            return Commit()
        if self.is_schema:
            before, after = self.row("before"), self.row("after")
            if before is None and after is None:
                raise self._lacking("after")
            return Schema(before, after, self._statement())
        if self.table is None or not isinstance(self.id, int):
            raise DamagedError("a change has no rowid", position=str(self.change_id))
        if self.type == DELETE:
            return Delete(self.table, self.id)
        after = self.row("after")
        if after is None:
            raise self._lacking("after")
        if self.type == INSERT:
            return Insert(self.table, self.id, after)
        return Update(self.table, self.id, after, self._changed(len(after)))

    def into_revert(self) -> Operation:
        """The operation that undoes this change in a database. Raises as `into_apply` and `reversed` do."""
        return self.reversed().into_apply()

    def row(self, image: str) -> RecordRow | None:
        """The values of `before`, `after` or `updates`. Raises DamagedError for bytes that are not a record."""
        record: bytes | None = getattr(self, image)
        if record is None:
            return None
        try:
            return decode(record)
        except MalformedRecordError as error:
            raise DamagedError(f"{image}: {error}", table=self.table, position=str(self.change_id)) from None

    def _changed(self, width: int) -> tuple[bool, ...] | None:
        updates = self.row("updates")
        if updates is None or len(updates) != 2 * width:
            return None
        return tuple(flag == 1 for flag in updates[:width])

    def _statement(self) -> str | None:
        updates = self.row("updates")
        last = updates[-1] if updates and self.type == UPDATE else None
        return last if isinstance(last, str) else None

    def _lacking(self, image: str) -> PreflightError:
        return PreflightError(
            f"the tape does not hold the {image} image of this change",
            fix="capture in mode full; an upsert captured by Turso has no old row and cannot be undone",
            table=self.table,
            position=str(self.change_id),
        )


def compare_images(before: bytes | None, after: bytes | None) -> bytes | None:
    """The `updates` record of an update; None if an image is missing."""
    if before is None or after is None:
        return None
    return describe_update(split(decode(before)), split(decode(after)))[2]


def describe_update(old: list[RecordPart], new: list[RecordPart]) -> tuple[bytes, bytes, bytes]:
    """The three records of an update: before, after, and updates (which columns differ, then their new values)."""
    known = [*old, *[_UNKNOWN] * (len(new) - len(old))]
    differs = [a != b for a, b in zip(known, new, strict=False)]
    flags = [(8 + differ, b"") for differ in differs]
    values = [part if differ else (0, b"") for part, differ in zip(new, differs, strict=True)]
    return join(old), join(new), join([*flags, *values])
