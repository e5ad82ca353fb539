"""`SlateDbSource`: the database, the tables over its keys, and the two halves that read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from tailrace.errors import Finding, LostError
from tailrace.model.change import Changes
from tailrace.model.schema import TableSchema
from tailrace.model.source_status import SourceStatus
from tailrace.model.table_rows import TableRows
from tailrace.source.follower import Offset, SchemaVersions, TableProgress
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
from tailrace.source.source import Source
from tailrace.source.split import Split
from tailrace.system.atomic_file import make_folder, remove
from tailrace.system.status_file import read_file


@dataclass(frozen=True)
class SlateDbSource(Source):
    """A database and the tables wanted of it. Frozen and picklable; credentials never show in its repr.

    `folder` holds the expiry index. Raises ConfigError for a mapping in `tables.settings` that cannot be read.
    """

    Options = SlateDbOptions

    options: SlateDbOptions

    def __post_init__(self) -> None:
        read_mappings(self.options.path, self.context.tables)

    @cached_property
    def database(self) -> SlateDbDatabase:
        wal_store = self.options.wal_store
        return SlateDbDatabase(
            self.options.path,
            ObjectStore.from_options(self.options.store),
            ObjectStore.from_options(wal_store) if wal_store is not None else None,
        )

    @property
    def partition(self) -> Partition | None:
        share = self.options.partition
        return Partition(share.of, share.index) if share is not None else None

    @cached_property
    def rules(self) -> tuple[TableMapping, ...]:
        """Every table, followed or not: each key belongs to one of them."""
        return read_mappings(self.options.path, self.context.tables)

    @cached_property
    def followed(self) -> tuple[TableMapping, ...]:
        wanted = set(self.context.tables.select([rule.name for rule in self.rules]))
        return tuple(rule for rule in self.rules if rule.name in wanted)

    def rule(self, table: TableSchema) -> TableMapping:
        return next(rule for rule in self.rules if rule.name == table.upstream_id)

    @property
    def expiry_folder(self) -> str:
        return str(self.folder / "expiry")

    @property
    def status_file(self) -> Path:
        return self.folder / "status.json"

    @property
    def keep_wal(self) -> str | None:
        """Each reader keeps its own files, and deletes them at its own pace."""
        kept = self.options.keep_wal
        return None if kept is None else str(kept / quote(self.context.reader, safe=""))

    def shared_folders(self) -> dict[str, Path]:
        kept = {"source.keep_wal": Path(self.keep_wal)} if self.keep_wal else {}
        return {"state": Path(self.expiry_folder)} | kept

    @property
    def wal_buffer(self) -> str:
        """WAL files that appeared while a table was copied."""
        return str(self.folder / "wal")

    @property
    def checkpoint_name(self) -> str:
        part = self.options.partition
        share = f"-{part.index}-of-{part.of}" if part is not None else ""
        return f"tailrace-{self.context.name}-{self.context.reader}{share}"

    def check(self) -> list[Finding]:
        return preflight.check(self)

    def tables(self) -> list[TableSchema]:
        return [rule.schema for rule in self.followed]

    def reset(self) -> None:
        """Delete the checkpoints of this reader, and what is kept for it. Raises UnavailableError when that fails."""
        with suppress(LostError):  # without a database there are no checkpoints in it
            delete_leftovers(self.database, self.checkpoint_name)
        for folder in (str(self.folder), self.keep_wal):
            if folder is not None:
                remove(Path(folder))

    def forget(self) -> None:
        self.reset()

    def follow(self, schemas: SchemaVersions, *, is_receiving: bool = False) -> SlateDbFollower:
        """Nothing is pushed; with `keep_wal` the follower itself copies WAL files."""
        make_folder(self.folder)
        return SlateDbFollower(self, schemas)

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
        """Delete what is kept here; SlateDB cleans up by itself. A table's expiries stay until its copy is complete."""
        at = SlateDbOffset.from_json(upto)
        if self.keep_wal is not None:
            remove_archived(self.keep_wal, at.low_water.wal)
        else:
            remove_archived(self.wal_buffer, at.low_water.wal, keep_last=False)
        for name, entry in at.tables.items():
            if entry.phase in ("ready", "catchup"):
                ExpiryIndex(self.expiry_folder, name).tidy(entry.clock)

    def progress(self, offset: Offset) -> list[TableProgress]:
        return SlateDbOffset.from_json(offset).progress()

    def status(self) -> SourceStatus:
        raw = read_file(self.status_file)
        return SourceStatus(
            gear=raw.get("gear"),
            received=raw.get("received"),
            journal_bytes=raw.get("journal_bytes"),
            error=raw.get("error"),
            fix=raw.get("fix"),
        )
