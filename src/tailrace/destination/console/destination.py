"""`ConsoleDestination`: every change as a line on the standard output of the process that runs the pipeline.

A task has no standard output that anyone sees. It writes the lines of a batch to a file, and the driver prints it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Literal

from tailrace.destination import Batch, Committer, CopyMode, Event, EventDestination, Stage, Staged, Written
from tailrace.destination.console.line import lines_of
from tailrace.destination.console.option import ConsoleOptions
from tailrace.errors import Finding, UnavailableError
from tailrace.model.change import Changes, Op
from tailrace.model.schema import TableSchema
from tailrace.system.atomic_file import creating, make_private_folder, remove
from tailrace.system.plain_text import plain


class ConsoleDestination(ConsoleOptions, EventDestination):
    """Standard output. It keeps no rows: a batch that is repeated after a crash is printed again."""

    type: Literal["console"] = "console"
    copy_mode: ClassVar[CopyMode] = "stream"

    def as_json(self) -> ConsoleDestination:
        return self.model_copy(update={"format": "json"})

    def shared_folders(self) -> dict[str, Path]:
        return {"destination.path": self.path}

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        return [Finding("ok", "console", "changes are printed; nothing is kept")]

    def write_rows(self, table: TableSchema, rows: Iterable[Changes], stage: Stage) -> Staged:
        if not self.copied_rows:
            # Read them even so: some sources record the rows they return, to find deleted ones later.
            deque(rows, maxlen=0)
            rows = ()
        return stage.write(table, rows)

    def write_events(self, events: Iterator[Event], batch: Batch) -> Written:
        """Write the lines of the batch to its file, from which the driver prints them."""
        written = Written()
        with creating(_file(self.path, batch)) as file:
            for event in events:
                if isinstance(event, Changes):
                    file.writelines(f"{plain(line)}\n".encode() for line in lines_of(event, self.format, self.width))
                    count = int((event.numpy("op") != Op.READ).sum())
                    written += Written(changes=count, upserts=count)
        return written

    @contextmanager
    def committer(self, pipeline: str) -> Iterator[ConsoleCommitter]:
        make_private_folder(self.path)
        yield ConsoleCommitter(self.path)


class ConsoleCommitter(Committer):
    """The driver's part: prints what the task wrote. A batch counts once it is printed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ending: OSError | SystemExit | None = None

    @contextmanager
    def batch(self, batch: Batch) -> Iterator[None]:
        file = _file(self._folder, batch)
        for left in self._folder.iterdir():
            remove(left)
        yield
        if file.exists():  # no table of the batch had anything
            self._print(file)
            remove(file)

    def poll(self) -> None:
        if self._ending is not None:
            raise self._ending

    def _print(self, file: Path) -> None:
        try:
            with file.open(encoding="utf-8", newline="\n") as lines:
                for line in lines:
                    sys.stdout.write(line)
            sys.stdout.flush()
        except (OSError, SystemExit) as ending:
            # This runs in a call from Spark; `poll` is called where the process can be ended.
            self._ending = ending
            raise UnavailableError(
                "standard output was closed", fix="run the pipeline with its standard output open"
            ) from None


def _file(folder: Path, batch: Batch) -> Path:
    return folder / f"{batch.id}.lines"
