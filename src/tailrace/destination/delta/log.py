"""The transaction log of one Delta table, read: its files, columns and application transactions at one version.

tailrace reads and writes the log itself, because delta-rs neither shows deletion vectors nor commits them. A process
keeps the last version of each table it works on and reads only what came after it, so that a batch costs the same
however many files and versions there are. Checkpoints are made by delta-rs (`commit.py`).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import Schema
from deltalake.exceptions import DeltaError

from tailrace.destination.delta.column import delta_type
from tailrace.destination.delta.data_file import DataFile
from tailrace.destination.delta.store_error import log_error
from tailrace.destination.delta.table_folder import LOG, OWN, VECTORS, PathStamp, TablePath
from tailrace.errors import TableError
from tailrace.model.last_batch import LastBatch

MARK = "Kept by tailrace. Others may optimize it but must not change its rows."
FEATURES = frozenset({"appendOnly", "invariants", "timestampNtz", "deletionVectors"})
"""The features of Delta that a table may have and tailrace still knows how to write it."""
LAST_CHECKPOINT = "_last_checkpoint"
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
_CHECKPOINT_COLUMNS = ("protocol", "metaData", "txn", "add")
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
"""What reading raises where an entry of the log is not as the protocol says."""


@dataclass(frozen=True)
class DeltaSnapshot:
    """A Delta table at one version. `protocol` and `metadata` are the last actions of these kinds, as in the log."""

    place: TablePath
    table: str
    version: int = -1
    protocol: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    transactions: Mapping[str, int] = field(default_factory=dict)
    by_path: Mapping[str, DataFile] = field(default_factory=dict)

    @classmethod
    def load(cls, place: TablePath, table: str) -> DeltaSnapshot | None:
        """The table now, None if there is none. Raises TableError for one that tailrace did not make or cannot write,
        and for a log that is damaged."""
        found = None if place.is_file() else _current(place, table)
        if found is None:
            if problem := foreign_content(place):
                raise TableError(problem, table=table, fix=f"move {place.uri} away, or choose another path")
            return None
        if problem := found.foreign() or found.unwritable():
            raise TableError(problem, table=table, fix=f"move {place.uri} away, or choose another path")
        return found

    def foreign(self) -> str | None:
        """Why this is not a table of ours; None if it is."""
        if self.metadata.get("description") == MARK:
            return None
        return f"the Delta table at {self.place.uri} was not made by tailrace"

    def unwritable(self) -> str | None:
        """What another program made of the table that tailrace cannot write; None if nothing."""
        lowest, features = self.protocol.get("minWriterVersion", 1), set(self.protocol.get("writerFeatures") or ())
        if not (lowest <= 2 or (lowest == 7 and features <= FEATURES)):
            others = ", ".join(sorted(features - FEATURES)) or f"writer version {lowest}"
            return f"another program gave the Delta table at {self.place.uri} a feature that tailrace lacks: {others}"
        if self.configuration.get("delta.appendOnly") == "true":
            return f"another program set delta.appendOnly for the Delta table at {self.place.uri}"
        return None

    def last_batch(self, pipeline: str) -> LastBatch | None:
        """The last batch of a pipeline in the table."""
        found = self.transactions.get(app_id(pipeline))
        if found is None:
            return None
        return LastBatch(found, self.transactions.get(end_id(pipeline)), self.version)

    @property
    def configuration(self) -> Mapping[str, str]:
        return self.metadata.get("configuration") or {}

    @property
    def has_vectors(self) -> bool:
        """Whether the table may have deletion vectors. Once it has, it keeps the feature."""
        return "deletionVectors" in (self.protocol.get("readerFeatures") or ())

    @cached_property
    def schema(self) -> pa.Schema:
        return _columns(self.metadata["schemaString"])

    @cached_property
    def partition_by(self) -> tuple[str, ...]:
        return tuple(self.metadata.get("partitionColumns") or ())

    def files(self, key: Sequence[str | None] = ()) -> list[DataFile]:
        """The table's files; with the bounds of a key, by its names in the files, that is one whole number or date."""
        return [file.bounded_by(key) for file in self.by_path.values()]

    def after(self, version: int, actions: Iterable[Mapping[str, Any]]) -> DeltaSnapshot:
        """The table after a version with these actions."""
        protocol, metadata = self.protocol, self.metadata
        transactions, files = dict(self.transactions), dict(self.by_path)
        # A commit may remove and add the same path with another vector, in any order.
        for action in sorted(actions, key=lambda one: "remove" not in one):
            if (add := action.get("add")) is not None:
                files[add["path"]] = DataFile.from_add(add, lambda path: _count(self.place, path))
            elif (remove := action.get("remove")) is not None:
                known = files.get(remove["path"])
                if known is not None and known.is_removed_by(remove):
                    del files[remove["path"]]
            elif (transaction := action.get("txn")) is not None:
                transactions[transaction["appId"]] = transaction["version"]
            elif (given := action.get("protocol")) is not None:
                protocol = given
            elif (given := action.get("metaData")) is not None:
                metadata = given
        return replace(
            self, version=version, protocol=protocol, metadata=metadata, transactions=transactions, by_path=files
        )

    def sync(self) -> None:
        """Make the log durable up to this version, which other writers leave to the operating system.

        Versions that this process has already made durable cost nothing.
        """
        table_id = str(self.metadata["id"])
        if not self.place.is_local or _synced.get(table_id, -1) >= self.version:
            return
        # The previous process may have been killed between a commit and this call.
        first = _synced[table_id] + 1 if table_id in _synced else checkpoint_version(self.place)
        for number in range(first, self.version + 1):
            self.place.sync_file(f"{LOG}/{number:020}.json")
            self.place.sync_file(_checkpoint_file(number))
        self.place.sync_file(f"{LOG}/{LAST_CHECKPOINT}")
        self.place.sync(LOG)
        _synced[table_id] = self.version


_synced: dict[str, int] = {}
"""By the table's id, the version up to which this process has made the table's log durable."""


# -- the last version of each table, kept in memory -------------------------------------------------------


@dataclass(frozen=True)
class _Known:
    """A version, and how its log looked when it was read: unchanged, there is nothing newer."""

    snapshot: DeltaSnapshot
    stamp: PathStamp | None


_known: dict[str, _Known] = {}
_lock = threading.Lock()


def _current(place: TablePath, table: str) -> DeltaSnapshot | None:
    with _lock:
        known = _known.get(place.uri)
    stamp = _stamp(place, known.snapshot.version) if known is not None else None
    if known is not None and stamp is not None and known.stamp == stamp:
        if place.is_local:
            return replace(known.snapshot, table=table)
        after: _Known | None = _follow(_Known(replace(known.snapshot, table=table, place=place), stamp))
    else:
        # Before it is read: what is added meanwhile changes it.
        folder = (place.stamp(LOG) or ()) if place.is_local else ()
        found = _read(place, table)
        last = None if found is None else place.stamp(_entry_file(found.version))
        after = None if found is None else _Known(found, None if last is None else (*folder, *last))
    with _lock:
        if after is None:
            _known.pop(place.uri, None)
            return None
        _known[place.uri] = after
    return after.snapshot


def remember(snapshot: DeltaSnapshot, stamp: PathStamp | None) -> None:
    """Keep a version that this process has just committed, durably. `stamp` is that of its entry, if it is known."""
    place = snapshot.place
    if place.is_local or stamp is None:
        stamp = _stamp(place, snapshot.version)
    with _lock:
        _known[place.uri] = _Known(snapshot, stamp)
    _synced[str(snapshot.metadata["id"])] = snapshot.version


def look_again(place: TablePath) -> None:
    """Accept a log whose folder was changed, if it still ends with the version that is kept: a checkpoint adds none."""
    with _lock:
        known = _known.get(place.uri)
        if known is None or not place.is_local:
            return
        # Before the look: what is added meanwhile changes it.
        stamp = _stamp(place, known.snapshot.version)
        if place.stamp(_entry_file(known.snapshot.version + 1)) is None:
            _known[place.uri] = _Known(known.snapshot, stamp)


def forget(place: TablePath) -> None:
    """Read the whole log the next time."""
    with _lock:
        _known.pop(place.uri, None)


def _stamp(place: TablePath, version: int) -> PathStamp | None:
    """What changes with the log: its last version, and on a disk its folder, too."""
    parts = [place.stamp(name) for name in ([LOG] if place.is_local else []) + [_entry_file(version)]]
    return None if None in parts else tuple(chain.from_iterable(filter(None, parts)))


def _follow(known: _Known) -> _Known:
    """Take in the versions since."""
    while (found := known.snapshot.place.read_stamped(_entry_file(known.snapshot.version + 1))) is not None:
        body, stamp = found
        known = _Known(_after_entry(known.snapshot, known.snapshot.version + 1, body), stamp)
    return known


# -- the log as it lies in storage ------------------------------------------------------------------------


def _read(place: TablePath, table: str) -> DeltaSnapshot | None:
    """The newest version, from the last checkpoint and the commits after it."""
    commits: set[int] = set()
    checkpoints: dict[int, list[str]] = {}
    for name in place.names(LOG):
        if found := _COMMIT.fullmatch(name):
            commits.add(int(found[1]))
        elif found := _CHECKPOINT.fullmatch(name):
            checkpoints.setdefault(int(found[1]), []).append(name)
    if not commits and not checkpoints:
        return None
    snapshot = DeltaSnapshot(place, table)
    whole = [number for number, names in checkpoints.items() if _is_whole(names)]
    if whole:
        version = max(whole)
        try:
            snapshot = _from_checkpoint(snapshot, version, checkpoints[version])
        except (pa.ArrowInvalid, OSError, *_MALFORMED) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise _damaged_checkpoint(place, table, version, checkpoints[version], commits) from error
    newest = max(commits, default=-1)
    for number in range(snapshot.version + 1, newest + 1):
        body = place.read(f"{LOG}/{number:020}.json") if number in commits else None
        if body is None:
            raise log_error(place, table, f"version {number} is missing")
        snapshot = _after_entry(snapshot, number, body)
    if not snapshot.metadata or not snapshot.protocol:
        raise log_error(place, table, f"version {snapshot.version} has no metadata")
    return snapshot


def _is_whole(names: list[str]) -> bool:
    parts = [found[3] for name in names if (found := _CHECKPOINT.fullmatch(name))]
    return None in parts or any(len(parts) == int(count) for count in parts)


def _from_checkpoint(snapshot: DeltaSnapshot, version: int, names: list[str]) -> DeltaSnapshot:
    single = _checkpoint_file(version)
    paths = [f"{LOG}/{name}" for name in names]
    actions: list[dict[str, Any]] = []
    for path in [single] if single in paths else paths:
        rows = pq.read_table(snapshot.place.open(path), columns=list(_CHECKPOINT_COLUMNS))
        for kind in (name for name in _CHECKPOINT_COLUMNS if name in rows.schema.names):
            column = rows.column(kind)
            actions += [{kind: _plain(value)} for value in column.filter(column.is_valid()).to_pylist()]
    return snapshot.after(version, actions)


def _damaged_checkpoint(place: TablePath, table: str, version: int, names: list[str], commits: set[int]) -> TableError:
    problem = log_error(place, table, f"checkpoint {version} is damaged")
    if not commits.issuperset(range(version + 1)):
        return problem
    files = " ".join(f"{place.uri}/{LOG}/{name}" for name in [*sorted(names), LAST_CHECKPOINT])
    fix = f"delete {files}, as the log has all versions without them; then tailrace retry FILE {table}"
    return TableError(problem.message, table=table, fix=fix)


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """An action of a checkpoint as it stands in a commit: without what is null, and with maps as objects."""
    found = {}
    for name, one in value.items():
        if one is None:
            continue
        if name in ("partitionValues", "tags", "configuration", "options"):
            one = dict(one)
        found[name] = _plain(one) if name in ("deletionVector", "format") else one
    return found


def _after_entry(snapshot: DeltaSnapshot, version: int, body: bytes) -> DeltaSnapshot:
    try:
        return snapshot.after(version, [json.loads(line) for line in body.splitlines() if line.strip()])
    except _MALFORMED as error:
        raise log_error(snapshot.place, snapshot.table, f"version {version} is damaged") from error


@lru_cache(maxsize=256)
def _columns(text: str) -> pa.Schema:
    raw = pa.schema(Schema.from_json(text).to_arrow())
    return pa.schema([pa.field(f.name, delta_type(f.type), metadata=f.metadata) for f in raw])


def _count(place: TablePath, path: str) -> int:
    return int(pq.read_metadata(place.open(path)).num_rows)


def _entry_file(version: int) -> str:
    return f"{LOG}/{version:020}.json"


def _checkpoint_file(version: int) -> str:
    return f"{LOG}/{version:020}.checkpoint.parquet"


def checkpoint_version(place: TablePath) -> int:
    """The version of the last checkpoint: a reader needs nothing before it. 0 if there is none."""
    try:
        return int(json.loads(place.read(f"{LOG}/{LAST_CHECKPOINT}") or "{}").get("version", 0))
    except ValueError:
        return 0


def sync_checkpoint(place: TablePath, version: int) -> None:
    """Make the checkpoint of a version durable: the entries before it may be removed then."""
    place.sync_file(_checkpoint_file(version))
    place.sync_file(f"{LOG}/{LAST_CHECKPOINT}")
    place.sync(LOG)


def app_id(pipeline: str) -> str:
    """The application transaction whose version is the number of the last batch."""
    return f"tailrace/{pipeline}"


def end_id(pipeline: str) -> str:
    """The application transaction whose version identifies the offset at which that batch ends."""
    return f"{app_id(pipeline)}/end"


def foreign_content(place: TablePath) -> str | None:
    """Why a table cannot be created here: the place holds something that tailrace did not make. None if it does not."""
    if place.is_file():
        return f"{place.uri} is a file, not a directory"
    others = [name for name in place.names() if name not in (OWN, VECTORS) and not _is_data(place, name)]
    # A log directory without a commit is what a crash before the very first one leaves.
    if others == [LOG]:
        return None
    return f"{place.uri} holds files that are no Delta table" if others else None


def _is_data(place: TablePath, name: str) -> bool:
    """Whether this is a data file, or the folder of a partition with nothing else in it."""
    files = place.names_below(name) if "=" in name else [name]
    return all(file.startswith("part-") and file.endswith(".parquet") for file in files)


def problem_of(place: TablePath) -> str | None:
    """Why a table cannot be kept here; None if it can. Creates nothing."""
    try:
        found = None if place.is_file() else _current(place, place.table)
    except (TableError, DeltaError, OSError) as error:
        message = error.message if isinstance(error, TableError) else str(error).splitlines()[0]
        return foreign_content(place) or f"cannot be read: {message}"
    return foreign_content(place) if found is None else found.foreign() or found.unwritable()
