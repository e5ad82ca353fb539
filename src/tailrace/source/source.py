"""The seam every upstream stands behind.

A source is configuration only: frozen, picklable, without open connections. Spark calls it in two places:
the driver half (`follow`) decides how far to read and how to split it, the executor half (`read`) reads one split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import pyarrow as pa

from tailrace.errors import Finding
from tailrace.model.change import Changes
from tailrace.model.schema import TableSchema
from tailrace.source.follower import Follower, Offset, SchemaVersions, TableProgress
from tailrace.source.split import Split

PIPELINE = "pipeline"
"""The name of the pipeline itself among the readers of its source."""
RESYNC = "tailrace reset FILE, then tailrace run FILE: every table is copied anew"
"""The fix where what is still needed is gone."""


class Source(Protocol):
    """An upstream, as configuration."""

    def check(self) -> list[Finding]:
        """Look, without changing anything, whether the upstream is ready; every error carries its fix."""
        ...

    def tables(self) -> list[TableSchema]:
        """The tables this source would follow now, with their keys. Opens and closes its own connection."""
        ...

    def prepare(self, should_stop: Callable[[], bool] = ...) -> None:
        """Make what is missing upstream (publication, slot). Repeating it changes nothing; PreflightError otherwise.

        Who would wait for others upstream gives up, with UnavailableError, once it `should_stop` to end.
        """
        ...

    def reset(self) -> None:
        """Forget how far this source was read, and let the upstream forget it too. Repeating it changes nothing."""
        ...

    def receiving(self) -> AbstractContextManager[object]:
        """Receive what the upstream pushes for as long as the context lasts, where that is apart from following.

        The pipeline enters it before it starts Spark, so that the log comes in meanwhile. A follower must do without.
        """
        ...

    def follow(self, versions: SchemaVersions | None = None) -> Follower:
        """Begin to follow, in the process that will call the follower.

        A new version of a table is put into `versions` before an offset is given away that reaches its rows. Who
        gives them has called `prepare` and is `receiving`; else the source does so by itself, and keeps the versions as
        it keeps its place.
        """
        ...

    def read(self, split: Split) -> Iterator[Changes]:
        """The changes of one split, a few MB at a time, in stream order per table. Called on executors."""
        ...

    def refetch(self, table: TableSchema, keys: pa.Table) -> pa.Table:
        """The rows of these keys as they are upstream now (for values a log left out). Called on executors."""
        ...

    def release(self, upto: Offset) -> None:
        """Everything up to `upto` is durable downstream and may be forgotten. Repeating it is harmless."""
        ...

    def for_reader(self, reader: str, table: str | None = None) -> Source:
        """The same upstream for another reader, with a cursor of its own; with `table`, only that one."""
        ...

    def progress(self, offset: Offset) -> list[TableProgress]:
        """Where each table stands at an offset. Pure."""
        ...

    def status(self) -> dict[str, Any]:
        """What the receiving half last said of itself, for people: gear, positions, sizes, last error. Cheap.

        The words are those of `SourceStatus`; others are left out.

        `passed` are two positions: behind a batch that ended at the first, the follower found nothing up to the second,
        and made no batch for it.
        """
        ...
