"""Deletion vectors are what Delta's protocol says: other readers understand them, and damage is noticed."""

from __future__ import annotations

import json
import struct
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from hypothesis import given
from hypothesis import strategies as st

from tailrace.destination.delta import deletion_vector
from tailrace.destination.delta.deletion_vector import Descriptor, VectorWriter, decode, read
from tailrace.destination.delta.local_folder import LocalFolder
from tailrace.destination.delta.object_folder import ObjectFolder
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.lake.row_bitmap import Rows, bitmap, encode, numbers
from tailrace.errors import TableError
from tests.support.delta_table import forget_everything

TABLE = "shop.items"
MOST = 2**32 - 1


def local(folder: Path) -> TablePath:
    return LocalFolder.at(folder, TABLE)


def remote(folder: Path) -> TablePath:
    """A folder that is used like an object store."""
    return ObjectFolder(folder.as_uri(), table=TABLE)


@pytest.fixture(params=[local, remote])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> TablePath:
    folder = tmp_path / "shop" / "items"
    folder.mkdir(parents=True)
    found: TablePath = request.param(folder)
    return found


def folder_of(place: TablePath) -> Path:
    return Path(place.uri.removeprefix("file://"))


def written(place: TablePath, *vectors: list[int]) -> list[Descriptor]:
    with VectorWriter(place) as writer:
        found = [writer.put(Rows(rows)) for rows in vectors]
    forget_everything()
    return found


def inline(rows: list[int]) -> Descriptor:
    data = encode(Rows(rows))
    text = deletion_vector._to_z85(data + bytes(-len(data) % 4))
    return Descriptor("i", text, None, len(data), len(rows))


SPARSE = st.sets(st.integers(0, MOST), max_size=50)
DENSE = st.builds(
    lambda start, gaps: set(range(start, start + 70_000)) - gaps,
    st.integers(0, MOST - 70_000),
    st.sets(st.integers(0, 200_000)),
)
RUNS = st.lists(st.tuples(st.integers(0, MOST - 300), st.integers(1, 300)), max_size=8).map(
    lambda runs: {number for start, count in runs for number in range(start, start + count)}
)


@given(st.one_of(SPARSE, DENSE, RUNS))
def test_a_vector_comes_back_as_it_was(rows: set[int]) -> None:
    wanted = np.array(list(rows), np.int64)
    found = decode(encode(bitmap(wanted)), TABLE)
    assert numbers(found).dtype == np.int64
    assert np.array_equal(numbers(found), np.sort(wanted))


def test_row_numbers_of_every_size_come_back() -> None:
    for rows in ([], [0], [MOST], [0, 2**16, 2**31, 2**31 + 1, MOST], range(2**16 + 5), range(2**31 - 3, 2**31 + 3)):
        assert numbers(decode(encode(bitmap(np.array(rows, np.int64))), TABLE)).tolist() == list(rows)


def test_encoding_leaves_the_bitmap_as_it_is() -> None:
    rows = Rows(range(1000))
    before = rows.serialize()
    assert len(encode(rows)) < 50
    assert rows.serialize() == before


@pytest.mark.parametrize("cut", [0, 3, 11, 12, 15, 16, 17, -1])
def test_data_that_was_cut_is_an_error_of_its_table(cut: int) -> None:
    with pytest.raises(TableError, match="deletion vector") as caught:
        decode(encode(bitmap(np.arange(0, 10, 2)))[:cut], TABLE)
    assert (caught.value.table, caught.value.fix) == (TABLE, "tailrace resync FILE shop.items")


def test_data_with_another_beginning_is_an_error() -> None:
    data = encode(bitmap(np.arange(3)))
    with pytest.raises(TableError, match="does not begin like a vector"):
        decode(b"\0" + data[1:], TABLE)


def test_row_numbers_past_the_largest_file_are_refused() -> None:
    data = encode(bitmap(np.arange(3)))
    magic, one = data[:4], data[16:]
    wide = magic + struct.pack("<QI", 2, 0) + one + struct.pack("<I", 1) + one
    high = magic + struct.pack("<QI", 1, 7) + one
    for vector in (wide, high):
        with pytest.raises(TableError, match=r"row numbers of 2\*\*32 and more"):
            decode(vector, TABLE)


def test_a_descriptor_is_the_same_after_json() -> None:
    raw = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "sizeInBytes": 40, "cardinality": 6}
    for text in (raw, {**raw, "offset": 4}):
        found = Descriptor.from_json(text)
        assert found.to_json() == text
        assert Descriptor.from_json({**text, "offset": text.get("offset")}) == found


def test_names_are_those_of_the_protocol() -> None:
    # The example in the protocol's text.
    found = Descriptor("u", "ab^-aqEH.-t@S}K{vb[*k^", 4, 40, 6)
    assert found.file == "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert found.unique_id == "uab^-aqEH.-t@S}K{vb[*k^@4"
    assert replace(found, path_or_inline=found.path_or_inline[2:], offset=None).unique_id == "u^-aqEH.-t@S}K{vb[*k^"
    bare = replace(found, path_or_inline=found.path_or_inline[2:]).file
    assert bare == "deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert inline([1]).file is None


def test_an_absolute_path_has_no_name_within_the_table_without_the_table() -> None:
    with pytest.raises(ValueError, match="storage type p"):
        _ = Descriptor("p", "s3://bucket/file.bin", 1, 40, 6).file


def test_vectors_of_one_commit_share_a_file_and_come_back(place: TablePath) -> None:
    vectors = [[1, 2, 3], list(range(5000)), [MOST]]
    found = written(place, *vectors)
    assert len({one.file for one in found}) == 1
    assert str(found[0].file).startswith("_dv/deletion_vector_")
    first, second, _ = (one.size_in_bytes + 8 for one in found)
    assert [one.offset for one in found] == [1, 1 + first, 1 + first + second]
    assert [list(read(place, one, TABLE)) for one in found] == vectors
    assert [path.name for path in folder_of(place).iterdir()] == ["_dv"]


def test_a_file_of_vectors_is_not_larger_than_readers_like(place: TablePath) -> None:
    rows = [list(range(start, 60_000, 2)) for start in range(20)]
    with VectorWriter(place) as writer:
        found = [writer.put(Rows(one)) for one in [*rows, list(range(0, 2_000_000, 2)), [7]]]
    files = [Path(folder_of(place), name) for name in writer.written]
    assert [one.file for one in found if one.offset == 1] == writer.written
    assert len(files) == 4
    sizes = [file.stat().st_size for file in files]
    assert [size <= deletion_vector.FILE_BYTES for size in sizes] == [True, True, False, True]
    assert {str(file) for file in (folder_of(place) / "_dv").iterdir()} == {str(file) for file in files}
    assert [list(read(place, one, TABLE)) for one in found[:20]] == rows
    assert list(read(place, found[-1], TABLE)) == [7]


def test_after_an_error_nothing_more_is_written(place: TablePath) -> None:
    with pytest.raises(ValueError, match="without rows"):
        written(place, [1], [])
    assert list(folder_of(place).rglob("*")) == []


def test_a_writer_without_vectors_writes_no_file_and_takes_no_empty_one(place: TablePath) -> None:
    with VectorWriter(place) as writer, pytest.raises(ValueError, match="without rows"):
        writer.put(Rows())
    assert list(folder_of(place).rglob("*")) == []


def test_every_damaged_byte_of_a_vector_is_noticed(place: TablePath) -> None:
    _, found, _ = written(place, [1], [3, 4, 5, 9], [2])
    assert found.offset is not None
    file = folder_of(place) / str(found.file)
    sound = file.read_bytes()
    for at in range(found.offset, found.offset + found.size_in_bytes + 8):
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        with pytest.raises(TableError, match="cannot be read") as caught:
            read(place, found, TABLE)
        assert caught.value.fix == "tailrace resync FILE shop.items"
    file.write_bytes(sound[: found.offset + 10])
    with pytest.raises(TableError, match="too short"):
        read(place, found, TABLE)
    file.unlink()
    with pytest.raises(TableError, match="missing"):
        read(place, found, TABLE)


@pytest.mark.parametrize("change", [{"cardinality": 3}, {"size_in_bytes": 31}, {"offset": 2}, {"offset": -1}])
def test_a_vector_that_is_not_what_the_log_says_is_refused(place: TablePath, change: dict[str, Any]) -> None:
    (found,) = written(place, [3, 4, 5, 9])
    for _ in "cold", "cached":
        with pytest.raises(TableError, match="cannot be read"):
            read(place, replace(found, **change), TABLE)
        assert list(read(place, found, TABLE)) == [3, 4, 5, 9]


def test_a_vector_within_its_descriptor_is_read(place: TablePath) -> None:
    rows = [0, 7, 300_000]
    found = inline(rows)
    assert list(read(place, found, TABLE)) == rows
    cut = replace(found, path_or_inline=found.path_or_inline[:-1])
    foreign = replace(found, path_or_inline="~" + found.path_or_inline[1:])
    for damaged in (cut, foreign, replace(found, size_in_bytes=found.size_in_bytes + 8)):
        with pytest.raises(TableError, match="cannot be read"):
            read(place, damaged, TABLE)


def test_an_absolute_path_is_followed_only_below_the_table(place: TablePath, tmp_path: Path) -> None:
    (found,) = written(place, [3, 4])
    below = f"{place.uri}/{found.file}"
    assert list(read(place, replace(found, storage_type="p", path_or_inline=below), TABLE)) == [3, 4]
    outside = tmp_path / "vector.bin"
    outside.write_bytes((folder_of(place) / str(found.file)).read_bytes())
    for path in (outside, folder_of(place) / "../../vector.bin"):
        with pytest.raises(TableError, match="not in the table's folder"):
            read(place, replace(found, storage_type="p", path_or_inline=str(path)), TABLE)
    with pytest.raises(TableError, match="not in the table's folder"):
        read(place, replace(found, path_or_inline=f"../..{found.path_or_inline[-20:]}"), TABLE)
    with pytest.raises(TableError, match="storage type z"):
        read(place, replace(found, storage_type="z"), TABLE)


def test_an_absolute_path_may_be_a_url(tmp_path: Path) -> None:
    folder = tmp_path / "a b%"
    folder.mkdir()
    place = local(folder)
    (found,) = written(place, [3, 4])
    url = f"file://{quote(str(folder / str(found.file)))}"
    assert list(read(place, replace(found, storage_type="p", path_or_inline=url), TABLE)) == [3, 4]


def test_a_vector_is_read_once_and_the_reader_may_change_it(place: TablePath) -> None:
    (found,) = written(place, [3, 4])
    read(place, found, TABLE).add(99)
    (folder_of(place) / str(found.file)).unlink()
    again = read(place, found, TABLE)
    again.add(100)
    assert list(read(place, found, TABLE)) == [3, 4]


def test_vectors_kept_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = local(tmp_path)
    found = written(place, *([number] for number in range(20)))
    monkeypatch.setattr(deletion_vector, "_kept", type(deletion_vector._kept)())
    monkeypatch.setattr(deletion_vector, "_kept_bytes", 0)
    monkeypatch.setattr(deletion_vector, "CACHE_BYTES", 6000)
    for one in found:
        read(place, one, TABLE)
    assert 0 < deletion_vector._kept_bytes <= 6000
    kept = [one for _, one in deletion_vector._kept]
    assert 3 < len(kept) < 20
    assert kept == found[-len(kept) :]
    read(place, found[-3], TABLE)
    assert list(deletion_vector._kept)[-1][1] == found[-3]


def test_delta_rs_reads_exactly_the_rows_that_are_left(tmp_path: Path) -> None:
    """Three files, the vectors of two of them in one file; one data file has all its rows."""
    place = local(tmp_path)
    gone = [[0, 1, 499, *range(70_000, 140_000)], list(range(0, 150_000, 3))]
    first, second = written(place, *gone)
    assert first.file == second.file
    vectors = [first.to_json(), second.to_json(), None]
    assert rows_read(tmp_path, vectors, 150_000) == [
        sorted(set(range(150_000)) - set(dead)) for dead in (*gone, list[int]())
    ]


@pytest.mark.parametrize("dead", [[5], list(range(10)), [0, 9]])
def test_delta_rs_reads_a_file_with_one_vector(tmp_path: Path, dead: list[int]) -> None:
    (found,) = written(local(tmp_path), dead)
    assert rows_read(tmp_path, [found.to_json()], 10) == [sorted(set(range(10)) - set(dead))]


def rows_read(folder: Path, vectors: list[dict[str, Any] | None], count: int) -> list[list[int]]:
    """The rows that delta-rs sees in files of `count` rows with these vectors."""
    schema: list[dict[str, Any]] = [
        {"name": name, "type": "long", "nullable": True, "metadata": {}} for name in ("file", "row")
    ]
    features = ["deletionVectors"]
    entries: list[dict[str, Any]] = [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": features,
                "writerFeatures": features,
            }
        },
        {
            "metaData": {
                "id": str(uuid.uuid4()),
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": schema}),
                "partitionColumns": [],
                "configuration": {"delta.enableDeletionVectors": "true"},
                "createdTime": 0,
            }
        },
    ]
    for number, vector in enumerate(vectors):
        name = f"part-{number}.parquet"
        rows = {"file": np.full(count, number), "row": np.arange(count)}
        pq.write_table(pa.table(rows), folder / name, row_group_size=max(count // 2, 1))
        add = {
            "path": name,
            "partitionValues": {},
            "size": (folder / name).stat().st_size,
            "modificationTime": 0,
            "dataChange": True,
            "stats": json.dumps({"numRecords": count, "tightBounds": False}),
        }
        entries.append({"add": add if vector is None else {**add, "deletionVector": vector}})
    (folder / "_delta_log").mkdir()
    (folder / "_delta_log" / f"{0:020}.json").write_text("\n".join(map(json.dumps, entries)))
    query = QueryBuilder().register("t", DeltaTable(str(folder)))
    found = pa.table(query.execute("select file, row from t order by file, row").read_all())
    file, row = (np.asarray(found.column(name)) for name in ("file", "row"))
    return [row[file == number].tolist() for number in range(len(vectors))]
