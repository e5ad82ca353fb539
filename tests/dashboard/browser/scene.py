"""Pipelines as the page may meet them: their files, and states filled through the store as runs would have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa

from tailrace.errors import Finding
from tailrace.model.change import end_of
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.state import (
    BatchRecord,
    RunnerLock,
    RunRecord,
    SourceStatus,
    SqliteStore,
    StateStore,
    TableState,
    TableUpdate,
)
from tailrace.state.activity import Sample
from tailrace.state.record import ChangeCounts
from tailrace.state.report import AlertRecord
from tailrace.state.state_machine import WAY

FILE = """\
name: {name}
source: {{type: postgres, dsn: "postgresql://reader@db.example/{name}", slot: tailrace_{name}}}
destination: {{type: delta, path: ./lake}}
state: ./{name}-state
"""
GB = 1_000_000_000
SAMPLES = 90
HOSTILE = (
    'public."<img src=x onerror=alert(1)>"',
    "public.\u202edrowssap\u202c_shown_in_reverse",
    'public."name.with/slash?and#hash&%2F"',
    "public." + "m" * 50 + "_ends_with_1",
    "public." + "m" * 50 + "_ends_with_2",
    'public."line\nbreak"',
    "public.日本語のテーブル",
)
"""Names that a database may have: markup, marks that turn text around, 63 characters that differ only at the end."""


class Scene:
    """The file and the state of one pipeline. Close it to give up its store and to end its run."""

    def __init__(self, folder: Path, name: str, *, runs: bool = True) -> None:
        self.name = name
        self.file = folder / f"{name}.yaml"
        self.file.write_text(FILE.format(name=name), "utf-8")
        self._state = folder / f"{name}-state"
        self.store: StateStore = SqliteStore(name, self._state).open()
        self._lock = RunnerLock(self._state).acquire() if runs else None
        self.batch = 0
        self.commit = 0x2A_8044_0000

    def close(self) -> None:
        self.store.close()
        self.stop()

    def stop(self) -> None:
        """The process that runs it ends."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def add(self, *names: str, columns: Sequence[Column] = ()) -> None:
        for name in names:
            self.store.add_table(name, name)
            if columns:
                schema = TableSchema(TableName.parse(name), tuple(columns), (columns[0].name,), upstream_id=name)
                self.store.put_schema(schema, end_of(1))

    def apply(self, *updates: TableUpdate, at: datetime | None = None, seconds: float = 1.4) -> None:
        """One batch of the pipeline, with everything up to it received."""
        self.batch += 1
        self.commit += 4096
        rows = sum(update.counts.copied + update.counts.changes for update in updates)
        shares = {"read": 0.06, "decode": 0.09, "collapse": 0.07, "write": 0.6, "commit": 0.18}
        phases = {name: seconds * share for name, share in shares.items()}
        position = str(end_of(self.commit))
        self.store.apply_batch(
            BatchRecord(self.batch, {"lsn": self.commit}, position, rows, rows * 120, seconds, at or now(), phases),
            updates,
        )

    def follow(self, name: str, copied: int, inserts: int = 0, updates: int = 0, deletes: int = 0) -> TableUpdate:
        """A table that was copied and follows since."""
        return self._update(name, WAY[1:], copied, inserts, updates, deletes)

    def change(self, name: str, inserts: int = 0, updates: int = 0, deletes: int = 0) -> TableUpdate:
        return self._update(name, (), 0, inserts, updates, deletes)

    def copy_more(self, name: str, rows: int) -> TableUpdate:
        """A table of which so many more rows were copied."""
        return TableUpdate(name, rows_copied=rows, counts=ChangeCounts(rows))

    def _update(
        self, name: str, steps: tuple[TableState, ...], copied: int, inserts: int, updates: int, deletes: int
    ) -> TableUpdate:
        counts = ChangeCounts(copied, inserts, updates, deletes)
        position = str(end_of(self.commit)) if counts.changes else None
        return TableUpdate(
            name,
            steps,
            rows_copied=copied,
            changes_applied=counts.changes,
            position=position,
            last_change_committed_at=now() - timedelta(seconds=1.2) if position else None,
            counts=counts,
        )

    def report(self, *, ahead: int = 0, kept: int = 2_900_000_000, safe: int | None = 1_100_000_000) -> None:
        """What the receiving half says: `ahead` bytes of the log are received and not applied."""
        self.store.put_source_status(
            SourceStatus(
                "stream",
                str(end_of(self.commit + ahead)),
                84_000_000,
                str(end_of(self.commit + ahead)),
                str(end_of(self.commit - kept)),
                str(end_of(self.commit)),
                at=now(),
                wal_status="extended",
                safe_wal_bytes=safe,
            )
        )

    def record_samples(self, *, grows: float = 83_000.0, kept: int = 2_900_000_000, limit: int = 4 * GB) -> None:
        """The last hour, with a dip at its middle that was made up; the slot grows by so many bytes each second."""
        step = 3600 / SAMPLES
        for index in range(SAMPLES):
            left = (SAMPLES - 1 - index) * step
            dip = 0.45 if 44 <= index < 48 else 1.35 if 48 <= index < 52 else 1.0
            wave = (1 + 0.12 * math.sin(index / 5) + 0.06 * math.sin(index * 1.7)) * dip
            slot = round(kept - grows * left)
            self.store.put_sample(
                Sample(
                    now() - timedelta(seconds=left),
                    step,
                    ChangeCounts(round(1500 * step) if index < 30 else 0, round(9000 * step * wave), 3000, 40),
                    lag_bytes=round(5_000_000 / dip * wave),
                    lag_seconds=round(1.3 / dip + 0.3 * math.sin(index / 3), 2),
                    journal_bytes=84_000_000,
                    slot_bytes=slot,
                    safe_wal_bytes=limit - slot,
                    wal_status="extended",
                )
            )


def now() -> datetime:
    return datetime.now(UTC)


def later(seconds: float) -> datetime:
    return now() + timedelta(seconds=seconds)


def columns() -> list[Column]:
    return [
        Column("id", pa.int64(), False, "bigint", 1),
        Column("amount", pa.decimal128(28, 2), True, "numeric(28,2)", 2),
        Column("state", pa.string(), True, "text", 3),
    ]


def make_shop(folder: Path, name: str = "shop") -> Scene:
    """Six tables: one that stopped, one that is being copied, one that is paused, three that follow."""
    shop = Scene(folder, name)
    store = shop.store
    store.put_run(RunRecord(now() - timedelta(days=3, hours=4)))
    names = [f"public.{name}" for name in ("customers", "inventory", "order_items", "orders", "payments")]
    shop.add(*names, "audit.events", columns=columns())
    shop.apply(
        shop.follow("public.customers", 3_120_554),
        shop.follow("public.inventory", 905_112),
        shop.follow("public.orders", 48_210_377),
        shop.follow("public.payments", 22_871_002),
        shop.follow("audit.events", 510_993_201),
        TableUpdate(
            "public.order_items",
            (TableState.DATA_SYNC,),
            rows_copied=81_203_944,
            rows_total=127_000_000,
            chunks_done=63,
            chunks_total=100,
            counts=ChangeCounts(81_203_944),
        ),
        at=now() - timedelta(hours=23),
    )
    for hour in range(22, 0, -1):
        size = 1 + math.sin(hour / 3.5) ** 2
        shop.apply(
            shop.change("public.orders", round(700 * size), round(1800 * size), 14),
            shop.change("public.customers", 36, round(150 * size), 1),
            shop.change("public.inventory", 1, round(11_000 * size)),
            shop.change("public.payments", round(400 * size), round(540 * size)),
            at=now() - timedelta(hours=hour),
        )
    store.put_schema(
        TableSchema(
            TableName("public", "orders"),
            (*columns(), Column("gift_note", pa.string(), True, "text", 4)),
            ("id",),
            upstream_id="public.orders",
        ),
        end_of(shop.commit + 1),
    )
    store.finish_request(store.ask("pause", "audit.events").id, "paused")
    store.pause_table("audit.events")
    store.put_dead_letter(
        "public.payments",
        "public.payments",
        str(end_of(shop.commit - 100)),
        kind="UnfitError",
        reason="column amount: numeric(28,2) does not hold a value of 31 digits",
        fix="Fix the value upstream and run `tailrace resync FILE public.payments`",
        raw=b"canary-9000001",
        version=1,
    )
    store.fail_table(
        "public.payments",
        "column amount: numeric(28,2) does not hold a value of 31 digits",
        fix="fix the value upstream and run `tailrace resync FILE public.payments`, or skip it: "
        "`tailrace skip FILE public.payments`",
        retry="manual",
        resume=str(end_of(shop.commit - 100)),
        attempts=5,
        code="unfit",
    )
    store.put_notices(
        [
            Finding(
                "warning",
                "public.tmp_import",
                "it has no primary key and is left out",
                "ALTER TABLE public.tmp_import ADD PRIMARY KEY (id)",
            )
        ]
    )
    told = "1 table is in error: public.payments"
    store.put_alerts(
        [
            AlertRecord("errored", True, later(-60), later(-50), told, ("public.payments",)),
            AlertRecord("lag", True, later(-20), failure="https://hooks.example does not answer"),
            AlertRecord("slot", True, later(-5)),
        ]
    )
    shop.record_samples()
    for seconds in (1.3, 1.4, 0.9, 1.5, 1.4, 1.4):
        shop.apply(shop.change("public.orders", 18, 40, 1), shop.change("public.inventory", 0, 280), seconds=seconds)
    shop.report(ahead=60_000)
    return shop


def make_many(folder: Path, count: int = 500) -> Scene:
    """Many tables with long names that differ at their ends; some of them stopped, paused, or being copied."""
    many = Scene(folder, "warehouse")
    names = [f"tenant_{number % 40:02}.measurements_of_sensor_group_{number:03}" for number in range(count)]
    many.add(*names)
    copying = TableUpdate("", (TableState.DATA_SYNC,), 400, 1000, 4, 10, counts=ChangeCounts(400))
    many.apply(
        *(
            many.follow(name, 100_000 + 7919 * number, 3 * number, 11 * number % 400, number % 5)
            if number % 60
            else replace(copying, upstream_id=name)
            for number, name in enumerate(names)
        )
    )
    for number, name in enumerate(names):
        if number % 97 == 0:
            many.store.fail_table(name, "column c3: a value does not fit", fix="tailrace resync FILE", attempts=1)
        elif number % 83 == 0:
            many.store.pause_table(name)
    many.record_samples(grows=4_000)
    many.report()
    return many


def make_hostile(folder: Path) -> Scene:
    """Tables of hostile names; one of them stopped, for a reason that is hostile as well."""
    odd = Scene(folder, "odd")
    odd.add(*HOSTILE)
    odd.apply(*(odd.follow(name, 10, 1, 1, 1) for name in HOSTILE))
    odd.store.fail_table(
        HOSTILE[0], "<script>alert(2)</script> \u202ereason\nof two lines", fix="run `tailrace resync FILE '<b>'`"
    )
    odd.report()
    return odd


def make_stopped(folder: Path) -> Scene:
    """A pipeline that ran, and was stopped without an error."""
    billing = Scene(folder, "billing", runs=False)
    billing.add("public.invoices")
    billing.apply(billing.follow("public.invoices", 1000, 5))
    billing.store.put_run(RunRecord(now() - timedelta(hours=2)).end(None))
    return billing


def make_never_run(folder: Path) -> Path:
    file = folder / "events.yaml"
    file.write_text(FILE.format(name="events"), "utf-8")
    return file
