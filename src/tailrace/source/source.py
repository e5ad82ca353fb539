"""What every source implements.

A source is configuration only: frozen, picklable, without open connections. Spark calls it in two places:
the driver half (`follow`) decides how far to read and how to split it, the executor half (`read`) reads one split.

Derive your own class from `Source` or, if the upstream keeps its changes in order, from
`tailrace.source.log_follower.LogSource`, which has a follower. Implement the methods that have no default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self
from urllib.parse import quote, unquote

import pyarrow as pa

from tailrace import errors
from tailrace.errors import RESYNC as RESYNC
from tailrace.errors import Finding, TableError, TailraceError, UnavailableError
from tailrace.model.change import Changes
from tailrace.model.schema import TableSchema
from tailrace.model.source_status import SourceStatus
from tailrace.source.follower import Follower, Offset, SchemaVersions, TableProgress
from tailrace.source.split import Split
from tailrace.system.atomic_file import remove

if TYPE_CHECKING:
    from tailrace.option.table import TableOptions
    from tailrace.source.option import SourceOptions


PIPELINE = "pipeline"
"""The reader name of the pipeline itself."""


def reader_of(destination: str) -> str:
    """The reader name of one of the pipeline's several destinations."""
    return f"{PIPELINE} {destination}"


def _every_table() -> TableOptions:
    from tailrace.option.table import TableOptions

    return TableOptions()


def destination_of(reader: str) -> str | None:
    """Which of the pipeline's several destinations a reader is; None for any other reader."""
    name = reader.removeprefix(reader_of(""))
    return name if name != reader else None


def name_reader(reader: str) -> str:
    """A reader as people know it."""
    own = destination_of(reader)
    return f"the reader {reader!r}" if own is None else f"the destination {own}"


@dataclass(frozen=True)
class SourceContext:
    """The pipeline that a source belongs to. `reader` names the reader: the pipeline itself, or a stream next to it."""

    name: str = ""
    tables: TableOptions = field(default_factory=_every_table)
    state_dir: Path = Path(".tailrace")
    reader: str = PIPELINE

    @property
    def is_pipeline(self) -> bool:
        """Whether the reader is the pipeline itself, or one of its destinations."""
        return self.reader == PIPELINE or self.reader.startswith(reader_of(""))

    def policy_of(self, table: object) -> str:
        """The policy of a table when its columns change upstream."""
        return self.tables.settings_of(str(table)).schema_changes


@dataclass(frozen=True)
class Source(ABC):
    """An upstream, as configuration: `MySource(options)`, which `Pipeline(source=...)` binds to itself.

    Frozen and picklable; subclasses repeat the decorator. `Options` is the model that a file's `source:` section is
    checked against; `options: MyOptions` gives the field its type. The source keeps its own files in `folder`.
    """

    Options: ClassVar[type[SourceOptions]]

    options: SourceOptions
    context: SourceContext = field(default_factory=SourceContext)

    def bind(self, context: SourceContext) -> Self:
        """The same source as part of a pipeline, with the option defaults that depend on the pipeline filled in."""
        from tailrace.option.value import OptionContext, placed

        place = OptionContext(context.name, Path.cwd(), context.state_dir)
        return replace(self, options=placed(self.options, place), context=context)

    def for_reader(self, reader: str, table: str | None = None) -> Self:
        """The same upstream for another reader, with its own cursor; with `table`, for that table only."""
        tables = self.context.tables if table is None else self.context.tables.only(table)
        return replace(self, context=replace(self.context, reader=reader, tables=tables))

    def wanted(self, tables: Iterable[TableSchema]) -> list[TableSchema]:
        """The tables of these that the pipeline's `tables` selects."""
        by_name = {table.table: table for table in tables}
        return [by_name[name] for name in self.context.tables.select(by_name)]

    @property
    def folder(self) -> Path:
        """Where this reader of the source keeps its files, if any. On a cluster every executor must see this folder."""
        return self.context.state_dir / self.options.type / quote(self.context.reader, safe="")

    @property
    def schema_file(self) -> Path:
        """Where a reader that has no state store keeps the versions of its tables."""
        return self.folder / "versions.json"

    def shared_folders(self) -> Mapping[str, Path]:
        """The local folders that tasks read or write, by the key of the file that names them. On a cluster every
        executor must see them, which is checked before the first batch. By default `folder`."""
        return {"state": self.folder}

    # -- every source implements these --------------------------------------------------------------------

    @abstractmethod
    def tables(self) -> list[TableSchema]:
        """The tables this source would follow now, with their keys. Opens and closes its own connection."""

    @abstractmethod
    def follow(self, schemas: SchemaVersions, *, is_receiving: bool = False) -> Follower:
        """Begin to follow, in the process that will call the follower. `prepare` was called before.

        A new version of a table is put into `schemas` before an offset that reaches its rows is returned. With
        `is_receiving` the caller has entered `receive`; without, the follower receives by itself where needed.
        """

    @abstractmethod
    def read(self, split: Split) -> Iterator[Changes]:
        """The changes of one split, a few MB at a time, in stream order per table. Called on executors."""

    @abstractmethod
    def progress(self, offset: Offset) -> list[TableProgress]:
        """The state of each table at an offset. Pure."""

    # -- these have a default -----------------------------------------------------------------------------

    @property
    def copy_tasks(self) -> int | None:
        """How many tasks may read copied rows at once; None: as many as there are cores."""
        return None

    def check(self) -> list[Finding]:
        """Check, without changing anything, that the upstream is ready; every error comes with its fix.

        An error about one table names it as its `table`: then only that table is stopped. By default the upstream is
        ready when it has tables. Raises UnavailableError when it does not answer.
        """
        try:
            found = self.tables()
        except UnavailableError:
            raise
        except TailraceError as error:
            return [Finding("error", "source", error.message, error.fix)]
        if not found:
            return [Finding("error", "tables", "no table is followed", "correct `tables`, which selects them")]
        return [Finding("ok", "tables", f"{len(found)} selected")]

    def notices(self) -> list[Finding]:
        """What the upstream leaves out without an error: tables that are selected but not sent, columns not sent.

        Called every few seconds while the pipeline runs, and shown to people. Raises UnavailableError when the upstream
        does not answer.
        """
        return []

    def prepare(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Create what is missing upstream (publication, slot). A repeat changes nothing.

        Raises PreflightError when the upstream is not ready. A source that waits for other transactions upstream stops
        with UnavailableError once `should_stop` returns true.
        """
        errors.require(self.check())

    def receive(self) -> AbstractContextManager[object]:
        """Receive what the upstream pushes while the context is open, where receiving is separate from following.

        The pipeline enters it before it starts Spark, so that the log arrives meanwhile. A follower must work without.
        """
        return nullcontext()

    def reset(self) -> None:
        """Forget how far this source was read, here and upstream. A repeat changes nothing.

        By default removes the reader's folder. Raises UnavailableError when that fails.
        """
        remove(self.folder)

    def forget(self) -> None:
        """Forget this reader alone, while others of the same upstream go on. A repeat changes nothing.

        By default removes the reader's folder.
        """
        remove(self.folder)

    def readers(self) -> Collection[str]:
        """The readers for which something is kept here: cursors, or folders of their own, as by default."""
        folder = self.context.state_dir / self.options.type
        return [unquote(each.name) for each in folder.iterdir()] if folder.is_dir() else []

    def slowest_reader(self) -> str | None:
        """The reader for which the oldest changes are kept here; None where that is not known."""
        return None

    def require_received(self, position: str) -> None:  # noqa: B027 - an upstream that can be read again is common
        """Raise LostError when what the upstream was told it may forget, up to this position, is no longer here.

        `position` is the last `SourceStatus.received` that the state holds. Called before `receive`.
        """

    def release(self, upto: Offset) -> None:  # noqa: B027 - an upstream that forgets by itself is common
        """Everything up to `upto` is durable downstream and may be deleted. A repeat is harmless."""

    def refetch(self, table: TableSchema, keys: pa.Table) -> pa.Table:
        """The current upstream rows of these keys, for values that a log left out. Called on executors.

        A source whose changes hold whole rows does not need this: by default it raises TableError.
        """
        raise TableError(
            "its rows cannot be read again by key",
            fix=f"tailrace resync FILE {table.table}",
            table=str(table.table),
        )

    def status(self) -> SourceStatus:
        """The last status of the receiving half, for people: gear, positions, sizes, last error. Cheap."""
        return SourceStatus("following")

    def idle_until(self) -> tuple[str, str] | None:
        """Two positions: after a batch that ended at the first, the follower found nothing up to the second.

        Such a range gets no batch, so without this an idle table would seem to lag. None when not known.
        """
        return None
