"""Keys are found in the rows that have them, whether they are in memory or in a key file."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.destination.lake import key_file, key_hash
from tailrace.destination.lake.key_index import FileKeys, KeyProbe, RowKeys
from tailrace.model import key as keys

SIGNATURE = 'part-1.parquet ["id"]'
Key = tuple[Any, ...]
Store = Callable[[keys.Comparable], RowKeys]


def mapped(key: keys.Comparable) -> RowKeys:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys")
        key_file.write(path, key, SIGNATURE)
        found = key_file.open(path, SIGNATURE)
    assert found is not None
    return found


STORES = pytest.mark.parametrize("store", [FileKeys, mapped])


def comparable(rows: Sequence[Key], kinds: Sequence[pa.DataType]) -> keys.Comparable:
    columns = [[row[number] for row in rows] for number in range(len(kinds))]
    return keys.comparable([pa.array(values, kind) for values, kind in zip(columns, kinds, strict=True)])


def model(rows: Sequence[Key], wanted: Sequence[Key]) -> list[tuple[int, int]]:
    first: dict[Key, int] = {}
    for index, key in enumerate(wanted):
        first.setdefault(key, index)
    return [(row, first[key]) for row, key in enumerate(rows) if key in first]


def found(store: Store, rows: keys.Comparable, wanted: keys.Comparable) -> list[tuple[int, int]]:
    at, which = store(rows).match(KeyProbe(wanted))
    assert at.dtype == which.dtype == np.int64
    return sorted(zip(at.tolist(), which.tolist(), strict=True))


INT64 = st.integers(-(2**63), 2**63 - 1)
NUMBER = st.one_of(st.integers(-3, 12), INT64).map(lambda value: (value,))
NUMBER_OR_NULL = st.one_of(st.none(), st.integers(-3, 3), INT64).map(lambda value: (value,))
TEXT = st.one_of(st.text("ab", max_size=3), st.text("ab\0é", max_size=40)).map(lambda value: (value,))
TEXT_OR_NULL = st.one_of(st.none(), st.text("ab", max_size=2)).map(lambda value: (value,))
PAIR = st.tuples(st.one_of(st.none(), st.text("ab|:1", max_size=3)), st.one_of(st.none(), st.integers(0, 3)))
KINDS: dict[str, tuple[st.SearchStrategy[Any], list[pa.DataType]]] = {
    "number": (NUMBER, [pa.int64()]),
    "number or null": (NUMBER_OR_NULL, [pa.int64()]),
    "text": (TEXT, [pa.string()]),
    "text or null": (TEXT_OR_NULL, [pa.string()]),
    "pair": (PAIR, [pa.string(), pa.int32()]),
}


@STORES
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_every_row_with_a_wanted_key_is_found(store: Store, kind: str, data: st.DataObject) -> None:
    strategy, kinds = KINDS[kind]
    rows: list[Key] = data.draw(st.lists(strategy, max_size=40))
    among = st.one_of(st.sampled_from(rows), strategy) if rows else strategy
    wanted: list[Key] = data.draw(st.lists(among, max_size=40))
    if data.draw(st.booleans()):
        rows = sorted(rows, key=lambda key: tuple((value is not None, value) for value in key))
    assert found(store, comparable(rows, kinds), comparable(wanted, kinds)) == model(rows, wanted)


@pytest.mark.parametrize("kind", ["text", "pair"])
@given(data=st.data())
def test_keys_with_the_same_hash_are_told_apart(kind: str, data: st.DataObject) -> None:
    strategy, kinds = KINDS[kind]
    rows: list[Key] = data.draw(st.lists(strategy, max_size=40))
    wanted: list[Key] = data.draw(st.lists(strategy, max_size=40))
    modulus = np.uint64(data.draw(st.sampled_from([1, 2, 3])))
    sound = key_hash.hash64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_hash, "hash64", lambda values: sound(values) % modulus)
        assert found(mapped, comparable(rows, kinds), comparable(wanted, kinds)) == model(rows, wanted)


def test_very_many_keys_with_the_same_hash_cost_no_more_than_reading_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_hash, "hash64", lambda values: np.zeros(len(values), np.uint64))
    rows = pa.array([f"key {number}".encode() for number in range(100_000)], pa.large_binary())
    at, which = mapped(rows).match(KeyProbe(rows.slice(40_000, 50_000)))
    assert np.array_equal(at, np.arange(40_000, 90_000))
    assert np.array_equal(which, np.arange(50_000))


@STORES
@pytest.mark.parametrize("wanted", [[5], [5, 7], list(range(-20, 20))])
def test_older_copies_of_a_row_are_found_too(store: Store, wanted: list[int]) -> None:
    for rows in ([5, 7, 5, 1, 5, 9, 7], [1, 5, 5, 5, 7, 7, 9], [5], [5, 5, 5]):
        kinds = [pa.int64()]
        keyed, sought = [(row,) for row in rows], [(key,) for key in wanted]
        assert found(store, comparable(keyed, kinds), comparable(sought, kinds)) == model(keyed, sought)


@STORES
def test_a_key_that_is_a_number_on_one_side_only_is_found_in_its_row(store: Store) -> None:
    least, most = -(2**63), 2**63 - 1
    numbers = np.array([7, 3, most, 3, least, 0, 12], np.int64)
    texts = [b"3", b"x", str(least).encode(), b"03", b"-0", b"0", str(most).encode(), b"9223372036854775808", b"3\n"]
    binary = pa.array([*texts, b"\xff\xfenull", b"+7", b"", b"3"], pa.large_binary())
    assert found(store, numbers, binary) == [(1, 0), (2, 6), (3, 0), (4, 2), (5, 5)]
    assert found(store, binary, numbers) == [(0, 1), (2, 4), (5, 5), (6, 2), (12, 1)]


@STORES
@pytest.mark.parametrize("rows", [np.array([4, 2, 4], np.int64), pa.array([b"b", b"", b"a", b"b"], pa.large_binary())])
def test_all_keys_of_a_file_can_be_searched_in_another(store: Store, rows: keys.Comparable) -> None:
    again = store(rows).comparable()
    assert sorted(keys.binary(again).to_pylist()) == sorted(keys.binary(rows).to_pylist())
    at, _ = store(rows).match(KeyProbe(again))
    assert sorted(at.tolist()) == list(range(len(rows)))


def test_keys_that_are_part_of_a_longer_array_are_found() -> None:
    whole = pa.array([b"x", b"aaaaaaaaaaaa", b"b", b"c" * 600, b"y"], pa.large_binary())
    rows = whole.slice(1, 3)
    assert found(mapped, rows, whole.slice(2)) == [(1, 0), (2, 1)]
    assert np.array_equal(key_hash.hash64(rows), key_hash.hash64(pa.array(rows.to_pylist(), pa.large_binary())))


def test_a_hash_tells_keys_apart_by_their_length_their_beginning_and_their_end() -> None:
    long = b"m" * 100_000
    values = [b"", b"\0", b"\0\0", b"a" * 8, b"a" * 8 + b"\0", b"a" * 9, long, b"x" + long[1:], long[:-1] + b"x"]
    values += [b"".join([b"m" * count, b"x", b"m" * (255 - count)]) for count in range(256)]
    assert len(set(key_hash.hash64(pa.array(values, pa.large_binary())).tolist())) == len(values)


def test_a_hash_stays_what_it_is_as_key_files_hold_it() -> None:
    values = [b"", b"a", b"12345678", b"123456789", bytes(range(256)) * 2]
    assert key_hash.hash64(pa.array(values, pa.large_binary())).tolist() == [
        0x264304D1257F9540,
        0x3F1F403F808E30ED,
        0x2FD770D54DF5E578,
        0xE80CDD76EB401316,
        0x595331D8FC3A7D7C,
    ]


def sample(kind: str) -> keys.Comparable:
    numbers = np.random.default_rng(5).integers(0, 1000, 20)
    if kind == "number":
        return np.asarray(numbers, np.int64)
    if kind == "ascending":
        return np.arange(20, dtype=np.int64)
    return keys.binary(np.asarray(numbers, np.int64))


SAMPLES = pytest.mark.parametrize("kind", ["number", "ascending", "bytes"])


@SAMPLES
def test_a_key_file_with_any_damaged_byte_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "keys"
    key_file.write(path, sample(kind), SIGNATURE)
    sound = path.read_bytes()
    for at in range(len(sound)):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ (1 << at % 8)]) + sound[at + 1 :])
        assert key_file.open(path, SIGNATURE) is None, at
    path.write_bytes(sound)
    assert key_file.open(path, SIGNATURE) is not None


@SAMPLES
def test_a_key_file_that_was_cut_or_extended_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "keys"
    key_file.write(path, sample(kind), SIGNATURE)
    sound = path.read_bytes()
    for size in range(len(sound)):
        path.write_bytes(sound[:size])
        assert key_file.open(path, SIGNATURE) is None, size
    path.write_bytes(sound + b"\0")
    assert key_file.open(path, SIGNATURE) is None


def test_a_key_file_that_is_missing_or_of_something_else_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "keys"
    assert key_file.open(path, SIGNATURE) is None
    key_file.write(path, np.arange(3, dtype=np.int64), SIGNATURE)
    assert key_file.open(path, f"{SIGNATURE}x") is None
    assert key_file.open(path, SIGNATURE) is not None


def test_a_key_file_is_replaced_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key_file.write(path, np.arange(3, dtype=np.int64), SIGNATURE)
    before = key_file.open(path, SIGNATURE)
    key_file.write(path, np.arange(100, 200, dtype=np.int64), "other \udcff")
    after = key_file.open(path, "other \udcff")
    assert before is not None
    assert after is not None
    assert (len(before.comparable()), len(after.comparable())) == (3, 100)
    assert [each.name for each in tmp_path.iterdir()] == ["keys"]


def test_a_failed_write_leaves_the_file_from_before(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.mkdir()
    with pytest.raises(OSError):
        key_file.write(path, np.arange(3, dtype=np.int64), SIGNATURE)
    assert [each.name for each in tmp_path.iterdir()] == ["keys"]


def test_rows_in_the_order_of_their_keys_take_eight_bytes_each(tmp_path: Path) -> None:
    sizes = []
    for rows in (np.arange(10_000), np.arange(10_000)[::-1]):
        key_file.write(tmp_path / "keys", rows, SIGNATURE)
        sizes.append((tmp_path / "keys").stat().st_size)
    assert [round(size / 10_000) for size in sizes] == [8, 12]


def test_an_open_key_file_takes_no_descriptor_and_hardly_any_memory(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    path = tmp_path / "keys"
    key_file.write(path, np.random.default_rng(1).integers(0, 1 << 60, 500_000), SIGNATURE)
    held = [key_file.open(path, SIGNATURE) for _ in range(10)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert all(one is not None and one.nbytes < 4 * mmap.PAGESIZE for one in held)


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_thousand_keys_are_found_among_two_million(tmp_path: Path, is_shuffled: bool) -> None:
    random = np.random.default_rng(7)
    rows = np.arange(0, 6_000_000, 3, dtype=np.int64)
    if is_shuffled:
        random.shuffle(rows)
    wanted = random.choice(6_000_000, 1000, replace=False)
    path = tmp_path / "keys"
    key_file.write(path, rows, SIGNATURE)
    opened = key_file.open(path, SIGNATURE)
    assert opened is not None
    at, which = opened.match(KeyProbe(wanted))
    assert np.array_equal(rows[at], wanted[which])
    assert sorted(which.tolist()) == np.flatnonzero(wanted % 3 == 0).tolist()
    assert len(at) == len(set(at.tolist()))
