"""A destination that fails on purpose, in four ways that a careful caller survives.

    faulty = FaultyDestination(inner=inner, directory=tmp_path)
    faulty.plan(Reject(), FailAfterWrite())        # the next two writes; all later ones go well

The plan is stored in a directory, so it also applies in processes that receive a pickled copy of the destination.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from tailrace.destination import Committer, CopyMode, Destination, Stage, Staged, TableBatch, Written
from tailrace.errors import Finding, UnavailableError
from tailrace.model.change import Changes
from tailrace.model.schema import TableName, TableSchema

Method = Literal["write_rows", "write_changes"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Reject:
    """The write fails before anything is stored."""

    method: Method = "write_changes"


@dataclass(frozen=True)
class FailAfterWrite:
    """Everything is stored, and the caller gets an error."""

    method: Method = "write_changes"


@dataclass(frozen=True)
class HoldResponse:
    """Everything is stored, and the caller gets no answer until `release`."""

    method: Method = "write_changes"


@dataclass(frozen=True)
class RespondSlowly:
    """Everything goes well, `seconds` late."""

    seconds: float
    method: Method = "write_changes"


Fault = Reject | FailAfterWrite | HoldResponse | RespondSlowly
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Reject, FailAfterWrite, HoldResponse, RespondSlowly)}
_LOOK_SECONDS = 0.01


class FaultyDestination(Destination):
    """Passes everything on to `inner`, except what was planned in `directory`."""

    type: Literal["faulty"] = "faulty"
    inner: Destination
    directory: Path

    @property
    def copy_mode(self) -> CopyMode:  # type: ignore[override]
        return self.inner.copy_mode

    @property
    def lanes(self) -> int | None:  # type: ignore[override]
        return self.inner.lanes

    def plan(self, *faults: Fault) -> None:
        """Let the next writes fail like this, in this order per method, after faults planned before."""
        for fault in faults:
            text = json.dumps({"kind": type(fault).__name__, **vars(fault)})
            (self.directory / f"{time.time_ns():020}-{fault.method}.fault").write_text(text)

    def pending(self) -> int:
        """How many planned faults have not happened yet."""
        return len(list(self.directory.glob("*.fault")))

    def holding(self) -> int:
        """How many callers wait for their response now."""
        return len(list(self.directory.glob("*.held")))

    def release(self) -> None:
        """Answer every caller that waits."""
        for held in self.directory.glob("*.held"):
            held.unlink(missing_ok=True)

    @property
    def name(self) -> str:
        return f"faulty {self.inner.name}"

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        return self.inner.check(tables)

    def write_rows(self, table: TableSchema, rows: Iterable[Changes], stage: Stage) -> Staged:
        return self._with_fault("write_rows", lambda: self.inner.write_rows(table, rows, stage))

    def write_changes(self, batch: TableBatch) -> Written:
        return self._with_fault("write_changes", lambda: self.inner.write_changes(batch))

    def drop_table_for_copy(self, table: TableSchema) -> None:
        self.inner.drop_table_for_copy(table)

    def maintain(self, table: TableName) -> str | None:
        return self.inner.maintain(table)

    def committer(self, pipeline: str) -> AbstractContextManager[Committer]:
        return self.inner.committer(pipeline)

    def shutdown(self) -> None:
        self.inner.shutdown()

    def _with_fault(self, method: Method, write: Callable[[], Result]) -> Result:
        fault = self._next(method)
        if isinstance(fault, Reject):
            raise UnavailableError("the destination rejects the write, as planned", fix="write again")
        result = write()
        if isinstance(fault, FailAfterWrite):
            raise UnavailableError(
                "the destination stored the write and lost the answer, as planned", fix="write again"
            )
        if isinstance(fault, RespondSlowly):
            time.sleep(fault.seconds)
        if isinstance(fault, HoldResponse):
            held = self.directory / f"{uuid.uuid4().hex}.held"
            held.touch()
            while held.exists():
                time.sleep(_LOOK_SECONDS)
        return result

    def _next(self, method: Method) -> Fault | None:
        for path in sorted(self.directory.glob(f"*-{method}.fault")):
            taken = path.with_suffix(f".{os.getpid()}")
            try:
                # A rename succeeds for one process only.
                path.rename(taken)
            except FileNotFoundError:
                continue
            raw = json.loads(taken.read_text())
            taken.unlink()
            kind = _KINDS[raw.pop("kind")]
            return kind(**raw)  # type: ignore[no-any-return]
        return None
