"""On a cluster: do the executors have this package, and do they see what they read and write?

Without this, tasks would write a lake to disks of their own, and a table would be Ready of which the driver has no row.
The executors that are there at the start are asked before the first batch. Others come later (dynamic allocation, a
machine that is replaced), at any moment: so each process of an executor asks itself before its first task.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tailrace import __version__
from tailrace.errors import PreflightError
from tailrace.stream.shared_folder import fix
from tailrace.stream.spark_error import recognise
from tailrace.stream.spark_master import is_local

_PREFIX = ".tailrace-seen-"
_ENVIRONMENT = (
    "install the driver's tailrace in the Python that the executors run: in their image, or packed with"
    " `spark.archives` (docs/cluster.md#the-python-environment)"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExecutorView:
    """What one task found on its machine: the version of the package, and the keys of folders that it does not see."""

    host: str
    version: str | None
    unseen: Sequence[str]


def require_executors(session: SparkSession, master: str, folders: Mapping[str, Path]) -> None:
    """Raise PreflightError, naming the folder, when an executor does not see one of the driver's folders.

    Does nothing where all tasks run on this machine. Runs as many tasks as there are cores. Leaves nothing in the
    folders, and no folder that was not there.
    """
    if is_local(master):
        return
    with ExitStack() as stack:
        tokens = {key: stack.enter_context(_Token(key, folder)).file for key, folder in folders.items()}
        views = _look(session, {key: str(file) for key, file in tokens.items()})
    for view in views:
        _require(view, __version__, folders)
    _log.info("%d tasks on %d machines see all that they need", len(views), len({view.host for view in views}))


@dataclass(frozen=True)
class ExecutorGate:
    """What a process of an executor asks before its first task, as `require_executors` does at the start.

    `folders` are those that it must see, `tokens` a file in each of them. Pickled to executors.
    """

    version: str = __version__
    folders: Mapping[str, Path] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)

    def require(self) -> None:
        """Raise PreflightError, naming the folder, where this process does not see one. Asked once in a process."""
        if self.folders:
            _require_seen(self.version, tuple(self.folders.items()), tuple(self.tokens.items()))


OPEN_GATE = ExecutorGate()
"""Where all tasks run on this machine."""


@contextmanager
def kept_gate(master: str, pipeline: str, folders: Mapping[str, Path], *, is_new: bool) -> Iterator[ExecutorGate]:
    """The gate for the tasks of a query. While the context is open, its tokens stay in the folders.

    A folder that is missing is made for a pipeline that `is_new`. For one that has run it is left out: its disk is not
    mounted, and an empty folder in its place would look like lost tables.
    """
    if is_local(master):
        yield OPEN_GATE
        return
    with ExitStack() as stack:
        found = {key: folder.absolute() for key, folder in folders.items() if is_new or folder.is_dir()}
        tokens: dict[str, str] = {}
        for key, folder in found.items():
            _sweep(folder, pipeline)
            try:
                token = stack.enter_context(_Token(key, folder, f"{pipeline}-", keeps_folders=True))
            except PreflightError as error:
                # A disk that is full, or went away: what needs it reports that, and the run waits for it.
                _log.warning("executors that come later are not asked about %s: %s", folder, error.message)
            else:
                tokens[key] = str(token.file)
        yield ExecutorGate(folders=found, tokens=tokens)


@cache
def _require_seen(version: str, folders: tuple[tuple[str, Path], ...], tokens: tuple[tuple[str, str], ...]) -> None:
    for seen in _looking(dict(tokens))(()):
        _require(ExecutorView(*seen), version, dict(folders))


def _require(view: ExecutorView, version: str, folders: Mapping[str, Path]) -> None:
    """`version` is the driver's."""
    if view.version != version:
        has = f"has tailrace {view.version}" if view.version else "has no tailrace"
        raise PreflightError(f"the executor on {view.host} {has}, the driver {version}", fix=_ENVIRONMENT)
    for key in view.unseen:
        raise PreflightError(
            f"the executor on {view.host} does not see {folders[key]}, which `{key}` names",
            fix=fix(key),
        )


def _sweep(folder: Path, pipeline: str) -> None:
    """Remove the tokens of runs of this pipeline that were killed."""
    left = re.compile(re.escape(f"{_PREFIX}{pipeline}-") + "[0-9a-f]{32}")
    with suppress(OSError):
        for path in folder.iterdir():
            if left.fullmatch(path.name):
                path.unlink(missing_ok=True)


class _Token:
    """A file in a folder, while the context is open. Folders that are made for it go with it, unless they are kept."""

    def __init__(self, key: str, folder: Path, name: str = "", *, keeps_folders: bool = False) -> None:
        self._key = key
        self._keeps_folders = keeps_folders
        self._folder = folder.absolute()
        self._made: list[Path] = []
        self.file = self._folder / f"{_PREFIX}{name}{uuid.uuid4().hex}"

    def __enter__(self) -> _Token:
        try:
            for folder in (*reversed(self._folder.parents), self._folder):
                if not folder.exists():
                    folder.mkdir(0o777 if self._keeps_folders else 0o700)
                    self._made.append(folder)
            self.file.touch()
        except OSError as error:
            self._remove()
            raise PreflightError(
                f"{self._folder} cannot be written: {error.strerror}",
                fix=f"let this user write there, or set `{self._key}` to another folder",
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self.file.unlink(missing_ok=True)
        for folder in reversed([] if self._keeps_folders else self._made):
            with suppress(OSError):  # someone else uses it by now
                folder.rmdir()


def _look(session: SparkSession, tokens: Mapping[str, str]) -> list[ExecutorView]:
    context = session.sparkContext
    count = max(2, context.defaultParallelism)
    try:
        found = context.parallelize(range(count), count).mapPartitions(_looking(dict(tokens))).collect()
    except (PySparkException, Py4JJavaError) as error:
        known = recognise(error)
        if known is not error:
            raise known from error
        reason = next((line for line in str(error).splitlines() if "Error" in line or "Exception" in line), "")
        raise PreflightError(f"the executors cannot run a Python task: {reason.strip()}", fix=_ENVIRONMENT) from error
    return [ExecutorView(host, version, unseen) for host, version, unseen in found]


Seen = tuple[str, str | None, list[str]]


def _looking(tokens: dict[str, str]) -> Callable[[Iterable[int]], Iterator[Seen]]:
    # A function within a function travels by value: it runs where this package is not installed.
    def look(_: Iterable[int]) -> Iterator[Seen]:
        import os
        import socket
        from importlib.metadata import PackageNotFoundError, version

        try:
            has: str | None = version("tailrace")
        except PackageNotFoundError:
            has = None
        unseen = []
        for key, path in tokens.items():
            try:
                # A network file system may remember for some seconds that a file was not there; a listing asks again.
                if os.path.basename(path) not in os.listdir(os.path.dirname(path)):  # noqa: PTH119, PTH120, PTH208
                    unseen.append(key)
            except OSError:
                unseen.append(key)
        yield socket.gethostname(), has, unseen

    return look
