"""`SlateDbSource`: the database, the tables over its keys, and the two halves that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from tailrace import errors
from tailrace.errors import Finding, LostError
from tailrace.model.change import Changes
from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import TableRows
from tailrace.option.table import TableOptions
from tailrace.source.follower import Offset, SchemaVersions, TableProgress
from tailrace.source.schema_log import SchemaFile
from tailrace.source.slatedb import preflight
from tailrace.source.slatedb.copy import SlateDbCopySplit, delete_leftovers, read_range
from tailrace.source.slatedb.expiry_index import ExpiryIndex
from tailrace.source.slatedb.follower import SlateDbFollower
from tailrace.source.slatedb.log_split import ExpirySplit, WalSplit, read_expired
from tailrace.source.slatedb.object_store import ObjectStore, SlateDbDatabase
from tailrace.source.slatedb.offset import SlateDbOffset
from tailrace.source.slatedb.option import SlateDbOptions
from tailrace.source.slatedb.reader import read_rows
from tailrace.source.slatedb.reader_pool import reader_pool
from tailrace.source.slatedb.row import Partition, WalRows, build, look_up
from tailrace.source.slatedb.table_mapping import TableMapping, read_mappings
from tailrace.source.slatedb.wal_archive import remove_archived
from tailrace.source.source import PIPELINE
from tailrace.source.split import Split
from tailrace.system.atomic_file import make_folder, remove
from tailrace.system.status_file import read_file


@dataclass(frozen=True)
class SlateDbSource:
    """A database and the tables wanted of it. Frozen and picklable; credentials never show in its repr.

    `state` is a folder that every task sees: it holds what is known of expiries and, with `keep_wal`, WAL files.
    """

    options: ClassVar[type[SlateDbOptions]] = SlateDbOptions

    name: str
    database: SlateDbDatabase
    tables_wanted: TableOptions
    state: str
    poll_seconds: float = 0.1
    min_age_seconds: float = 300.0
    keeps: str | None = None
    on_collected: Literal["stop", "resnapshot"] = "stop"
    partition: Partition | None = None
    reader: str = PIPELINE

    @classmethod
    def from_options(
        cls, options: SlateDbOptions, *, name: str, tables: TableOptions, state_dir: Path
    ) -> SlateDbSource:
        """Raises ConfigError for a mapping in `tables.settings` that cannot be read."""
        read_mappings(options.path, tables)
        wal_store = ObjectStore.from_options(options.wal_store) if options.wal_store is not None else None
        return cls(
            name=name,
            database=SlateDbDatabase(options.path, ObjectStore.from_options(options.store), wal_store),
            tables_wanted=tables,
            state=str(Path(state_dir) / "slatedb"),
            poll_seconds=options.poll,
            min_age_seconds=options.min_age,
            keeps=str(options.keep_wal) if options.keep_wal is not None else None,
            on_collected=options.on_collected,
            partition=Partition(options.partition.of, options.partition.index) if options.partition else None,
        )

    @cached_property
    def rules(self) -> tuple[TableMapping, ...]:
        """Every table over the keys, followed or not: a key belongs to one of them."""
        return read_mappings(self.database.path, self.tables_wanted)

    @cached_property
    def followed(self) -> tuple[TableMapping, ...]:
        wanted = set(self.tables_wanted.select([rule.name for rule in self.rules]))
        return tuple(rule for rule in self.rules if rule.name in wanted)

    def rule(self, table: TableSchema) -> TableMapping:
        return next(rule for rule in self.rules if rule.name == table.upstream_id)

    @property
    def _folder(self) -> Path:
        return Path(self.state) / quote(self.reader, safe="")

    @property
    def expiry_folder(self) -> str:
        return str(self._folder / "expiry")

    @property
    def status_file(self) -> Path:
        return self._folder / "status.json"

    @property
    def keep_wal(self) -> str | None:
        """Each reader keeps files of its own, and forgets them at its own pace."""
        return None if self.keeps is None else str(Path(self.keeps) / quote(self.reader, safe=""))

    @property
    def checkpoint_name(self) -> str:
        share = f"-{self.partition.index}-of-{self.partition.of}" if self.partition is not None else ""
        return f"tailrace-{self.name}-{self.reader}{share}"

    def check(self) -> list[Finding]:
        return preflight.check(self)

    def tables(self) -> list[TableSchema]:
        return [rule.schema for rule in self.followed]

    def prepare(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Nothing has to be made upstream. Raises PreflightError with everything that stands in the way."""
        errors.require(self.check())

    def reset(self) -> None:
        """Delete the checkpoints of this reader, and what is kept for it. Raises UnavailableError when that fails."""
        with suppress(LostError):  # without a database there are no checkpoints in it
            delete_leftovers(self.database, self.checkpoint_name)
        for folder in (str(self._folder), self.keep_wal):
            if folder is not None:
                remove(Path(folder))

    def receiving(self) -> AbstractContextManager[object]:
        """Nothing is pushed; with `keep_wal` the follower itself copies WAL files."""
        return nullcontext()

    def follow(self, versions: SchemaVersions | None = None) -> SlateDbFollower:
        if versions is None:
            self.prepare()
            make_folder(self._folder)
            versions = SchemaFile(self._folder / "versions.json")
        return SlateDbFollower(self, versions)

    def read(self, split: Split) -> Iterator[Changes]:
        if isinstance(split, WalSplit):
            return reader_pool().read(self, split)
        if isinstance(split, ExpirySplit):
            return read_expired(self, split)
        if isinstance(split, SlateDbCopySplit):
            return read_range(self, split)
        raise TypeError(f"not a split of this source: {type(split).__name__}")

    def refetch(self, table: TableSchema, keys: pa.Table) -> pa.Table:
        rule = self.rule(table)
        wanted = rule.key.encode({name: keys.column(name).to_pylist() for name in table.key})
        found = look_up(self.database, self.rules, rule, wanted)
        batch = found.filter(found.column("found")).drop_columns(["found"]).combine_chunks().to_batches()
        if not batch:
            return table.arrow.empty_table()
        seq = batch[0].column("seq").to_numpy()
        changes = build(rule, table, WalRows(batch[0], seq, np.zeros(len(seq), np.int64)))
        return pa.Table.from_arrays(changes.row.flatten(), schema=table.arrow)

    def read_table(self, table: TableSchema) -> TableRows:
        return TableRows(read_rows(self, table))

    def release(self, upto: Offset) -> None:
        """SlateDB forgets by itself; what is kept here goes. Expiries of a table that copies stay until it has them."""
        at = SlateDbOffset.from_json(upto)
        if self.keep_wal is not None:
            remove_archived(self.keep_wal, at.low_water.wal)
        for name, entry in at.tables.items():
            if entry.phase in ("ready", "catchup"):
                ExpiryIndex(self.expiry_folder, name).tidy(entry.clock)

    def for_reader(self, reader: str, table: str | None = None) -> SlateDbSource:
        wanted = self.tables_wanted if table is None else self.tables_wanted.only(table)
        return replace(self, reader=reader, tables_wanted=wanted)

    def progress(self, offset: Offset) -> list[TableProgress]:
        return SlateDbOffset.from_json(offset).progress()

    def status(self) -> dict[str, Any]:
        raw = read_file(self.status_file)
        return {key: raw.get(key) for key in ("gear", "received", "journal_bytes", "error", "fix")}
