"""Copy, hand-over, log, operands and expiries of a real SlateDB, without Spark, with crashes between any two steps."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.slatedb import follower, merge_operator
from tailrace.source.slatedb import row as lookup
from tailrace.source.slatedb.key_layout import KeyLayout
from tailrace.source.slatedb.option import PartitionOptions
from tailrace.source.slatedb.source import SlateDbSource
from tailrace.testing.replay import SourceReplay
from tests.support.slatedb_writing import Writer

HOUR = 3_600_000
TABLES = TableOptions.model_validate(
    {
        "settings": {
            "slatedb.counter": {"mapping": {"prefix": "c:", "key": "utf8", "value": "int64", "merge": "sum"}},
            "slatedb.text": {"mapping": {"prefix": "t:", "key": {"id": "uint32"}, "value": "utf8", "merge": "append"}},
        }
    }
)
State = dict[str, dict[Any, tuple[Any, ...]]]


def number(value: int) -> bytes:
    return struct.pack(">q", value)


class Traffic:
    """Random writes. Rows expire in the future of the real clock, so that SlateDB itself never drops one: the tests
    have a clock of their own, which runs ahead."""

    def __init__(self, writer: Writer, chance: random.Random) -> None:
        self.writer = writer
        self.chance = chance
        self.begun = int(time.time() * 1000)
        self.clock = self.begun

    def change(self) -> None:
        chance, writer = self.chance, self.writer
        plain = b"k%d" % chance.randint(0, 30)
        expiry = self.clock + chance.randint(-5, 60) * HOUR if chance.random() < 0.4 else None
        if expiry is not None:
            expiry = max(expiry, self.begun + HOUR)
        match chance.randint(0, 9):
            case 0 | 1:
                writer.put(plain, chance.randbytes(5), expire_at=expiry)
            case 2:
                writer.delete(plain)
            case 3 | 4:
                writer.merge(b"c:%d" % chance.randint(0, 4), number(chance.randint(-9, 9)))
            case 5:
                key = b"c:%d" % chance.randint(0, 4)
                writer.put(key, number(100), expire_at=expiry) if chance.random() < 0.7 else writer.delete(key)
            case 6:
                writer.merge(b"t:" + struct.pack(">I", chance.randint(0, 3)), chance.choice([b"a", b"b"]))
            case 7:
                writer.write((plain, b"batch"), (b"k1", None), (b"t:\0\0\0\1", b"set"), (b"k2", b"two"))
            case 8:
                writer.flush()
            case _:
                writer.fence() if chance.random() < 0.3 else writer.put(plain, b"")

    def pass_time(self) -> None:
        self.clock += self.chance.randint(0, 20) * HOUR


def expected(writer: Writer, clock: int) -> State:
    """What the tables should hold, by SlateDB's own scan."""
    state: State = {"slatedb.db1": {}, "slatedb.counter": {}, "slatedb.text": {}}
    for key, value, seq, expiry in writer.rows(clock).values():
        if key.startswith(b"c:"):
            state["slatedb.counter"][key[2:].decode()] = (struct.unpack(">q", value)[0], seq, expiry)
        elif key.startswith(b"t:"):
            state["slatedb.text"][struct.unpack(">I", key[2:])[0]] = (value.decode(), seq, expiry)
        else:
            state["slatedb.db1"][key] = (value, seq, expiry)
    return state


def contents(replays: list[SourceReplay]) -> State:
    state: State = {}
    for replay in replays:
        for name, table in replay.tables.items():
            rows = state.setdefault(name, {})
            for key, row in table.rows.items():
                assert key[0] not in rows
                expiry = row["expire_ts"]
                rows[key[0]] = (row["value"], row["seq"], expiry and round(expiry.timestamp() * 1000))
    return state


def settle(replay: SourceReplay) -> None:
    replay.catch_up()
    while replay.step():
        pass


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Traffic], None]:
    """The followers' clock is that of the traffic, and expiries make a batch at once."""

    def use(traffic: Traffic) -> None:
        monkeypatch.setattr(follower, "read_clock", lambda: traffic.clock)
        monkeypatch.setattr(follower, "EXPIRY_SECONDS", 0.0)

    return use


@pytest.fixture(autouse=True)
def scan_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of keys is enough to be looked up by a scan, which stops and goes on within a batch."""
    monkeypatch.setattr(lookup, "_PIECE_ROWS", 8)
    monkeypatch.setattr(lookup, "_GAIN", 4)


OPTIONS: list[Mapping[str, Any]] = [{}, {"keep": True}, {"wal_store": True}, {"partitions": 3}, {"collect": True}, {}]


@pytest.mark.parametrize("seed", range(len(OPTIONS)))
def test_tables_equal_a_scan_after_crashes_at_random_steps(
    seed: int, tmp_path: Path, set_clock: Callable[[Traffic], None]
) -> None:
    chance = random.Random(seed)
    options = OPTIONS[seed]
    wal = tmp_path / "wal" if "wal_store" in options else None
    with Writer(tmp_path / "store", TABLES, wal=wal) as writer:
        traffic = Traffic(writer, chance)
        set_clock(traffic)
        for number in range(4):
            writer.put(b"copied%d" % number, b"", expire_at=traffic.begun + (60 + 30 * number) * HOUR)
        writer.flush()
        for _ in range(chance.choice([0, 40])):
            traffic.change()
        replays = [
            SourceReplay(source, Limit(chance.choice([10, 1000]), 64_000_000))
            for source in sources(writer, tmp_path, options)
        ]
        requests = 0
        for _ in range(40):
            for _ in range(chance.randint(0, 6)):
                traffic.change()
            traffic.pass_time()
            for replay in replays:
                replay.live(chance.choice(["plan", "half", "write", "commit", *["never"] * 4]))
            if "collect" in options and replays[0].planned is None and chance.random() < 0.2:
                writer.collect()
            if chance.random() < 0.1 and replays[0].offset and replays[0].offset["tables"]:
                requests += 1
                replays[0].directives = TableDirectives(
                    resync={chance.choice(list(replays[0].offset["tables"])): requests}
                )
        for replay in replays:
            settle(replay)
        write_again_what_expires(traffic, replays)
        for replay in replays:
            settle(replay)
            replay.crash()
        assert contents(replays) == expected(writer, traffic.clock)
        checkpoints = writer.run(writer.database.admin().list_checkpoints(None))
        assert not [one for one in checkpoints if (one.name or "").startswith("tailrace")]


def write_again_what_expires(traffic: Traffic, replays: list[SourceReplay]) -> None:
    """Rows that arrive, of which some are written for good before their time is over."""
    for number in range(6):
        traffic.writer.put(b"again%d" % number, b"for now", expire_at=traffic.clock + 30 * HOUR)
    for replay in replays:
        settle(replay)
    for number in range(3):
        traffic.writer.put(b"again%d" % number, b"for good")
    for replay in replays:
        settle(replay)
    traffic.clock += 50 * HOUR


def sources(writer: Writer, folder: Path, options: Mapping[str, Any]) -> list[SlateDbSource]:
    given: dict[str, Any] = {}
    if "keep" in options:
        given["keep_wal"] = folder / "kept"
    if "collect" in options:
        given["on_collected"] = "resnapshot"
    if "partitions" in options:
        of = options["partitions"]
        return [
            writer.source(folder / f"state{index}", TABLES, partition=PartitionOptions(of=of, index=index))
            for index in range(of)
        ]
    return [writer.source(folder / "state", TABLES, **given)]


NUMBERS = st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=8)


@given(NUMBERS, st.sampled_from(["sum", "max", "min"]), st.sampled_from(["int64", "int64_le", "json"]))
def test_a_numeric_operator_folds_as_python_does(values: list[int], name: str, value_format: str) -> None:
    fold = merge_operator.make(name, value_format)
    code = {"int64": ">q", "int64_le": "<q"}.get(value_format)
    folded: bytes | None = None
    for value in values:
        folded = fold(folded, struct.pack(code, value) if code else str(value).encode())
    assert folded is not None
    answer = struct.unpack(code, folded)[0] if code else int(folded)
    by_name: dict[str, Callable[[list[int]], int]] = {"sum": sum, "max": max, "min": min}
    assert answer == by_name[name](values)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-100, 100) | st.text(max_size=3),
    lambda inner: st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
    max_leaves=8,
)


def merge_patch(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = target if isinstance(target, dict) else {}
    return {
        key: merge_patch(result.get(key), patch[key]) if key in patch else result[key]
        for key in {**result, **patch}
        if patch.get(key, 0) is not None
    }


@given(JSON, JSON)
def test_json_merge_is_a_merge_patch(target: Any, patch: Any) -> None:
    fold = merge_operator.make("json_merge", "json")
    assert json.loads(fold(json.dumps(target).encode(), json.dumps(patch).encode())) == merge_patch(target, patch)


TEXT = st.text(st.characters(exclude_characters=":", exclude_categories=["Cs"]), max_size=5)


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(-(2**15), 2**15 - 1), st.binary(max_size=6)), min_size=1)
)
def test_keys_of_fixed_width_read_back_as_they_were_written(rows: list[tuple[int, int, bytes]]) -> None:
    layout = KeyLayout(b"p/", {"a": "uint64", "b": "int16", "c": "raw"})
    columns = {name: [row[at] for row in rows] for at, name in enumerate("abc")}
    decoded = layout.decode(pa.array(layout.encode(columns), pa.binary()))
    assert [column.to_pylist() for column in decoded] == list(columns.values())


@given(st.lists(st.tuples(TEXT, st.integers(-(2**63), 2**63 - 1), st.text(max_size=5)), min_size=1))
def test_keys_with_separators_read_back_as_they_were_written(rows: list[tuple[str, int, str]]) -> None:
    layout = KeyLayout(b"", {"a": "utf8", "b": "int64", "c": "utf8"}, b":")
    columns = {name: [row[at] for row in rows] for at, name in enumerate("abc")}
    decoded = layout.decode(pa.array(layout.encode(columns), pa.binary()))
    assert [column.to_pylist() for column in decoded] == list(columns.values())
