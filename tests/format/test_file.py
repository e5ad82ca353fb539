"""The small files of state folders: read as they were meant, and written again to the byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.destination import Batch
from tailrace.destination.webhook.batch_file import EventStage, Piece
from tailrace.errors import LostError, revive
from tailrace.journal import Cursor, Frame, Journal, cursors
from tailrace.model.change import START, Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.poll.schedule import PollSchedule
from tailrace.source.poll.watermark import FileWatermarks
from tailrace.source.rqlite.cluster_journal import Cluster
from tailrace.source.rqlite.deduplication import DeduplicationWindow
from tailrace.source.schema_file import SchemaFile
from tailrace.source.sqlite.cursor import Cursors
from tailrace.system.child_process import read_status, write_status
from tests.support.format_fixture import FOLDER, unpack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the files, to be written to."""
    return Path(shutil.copytree(FOLDER / "file", tmp_path / "file"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# -- the journal ----------------------------------------------------------------------------------------------


def test_a_journal_holds_what_was_written(folder: Path) -> None:
    reader = Journal.open_reader(folder / "journal")
    assert (reader.head(), reader.mark(), reader.origin()) == (Position(5, 9), Position(9, 0), START)
    frames = [reader.read(ref) for ref in reader.frames(START, reader.mark())]
    reader.close()
    assert [(frame.first, frame.last, frame.complete, frame.count) for frame in frames] == [
        (Position(number, 1), Position(number, 9), True, number) for number in range(1, 6)
    ]
    assert [bytes(frame.payload) for frame in frames] == [b"payload %d" % number for number in range(1, 6)]
    assert [frame.meta for frame in frames] == [b'{"n": %d}' % number for number in range(1, 6)]


def test_a_journal_is_appended_to_and_drops_what_every_cursor_has_passed(folder: Path) -> None:
    with Journal.open_writer(folder / "journal", segment_bytes=300) as writer:
        assert (writer.head, writer.mark) == (Position(5, 9), Position(9, 0))
        writer.append([Frame(Position(10, 1), Position(10, 9), True, 1, b"", b"more")])
        assert writer.retain() == ["00000000000000000001.seg"]
    reader = Journal.open_reader(folder / "journal")
    assert [ref.last for ref in reader.frames(Position(1, 9), reader.mark())] == [
        *(Position(number, 9) for number in (2, 3, 4, 5)),
        Position(10, 9),
    ]
    reader.close()


def test_cursors_are_rewritten_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    found = cursors(folder / "journal")
    assert found == {"pipeline": Position(2, 9), "stream/a b": Position(1, 9)}
    for name, position in found.items():
        Cursor(tmp_path / "again", name).advance(position)
    assert contents(tmp_path / "again" / "cursors") == contents(folder / "journal" / "cursors")


# -- readers without a state store ----------------------------------------------------------------------------


def test_versions_are_rewritten_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    file = folder / "pipeline.versions"
    columns = (Column("id", pa.int64(), number=1), Column("total", pa.int64(), number=2))
    table = TableName("public", "orders")
    first, second = (TableSchema(table, columns[:count], ("id",), count, "16400") for count in (1, 2))
    known = SchemaFile(file)
    assert known.schemas_between("16400", START, Position(9, 0)) == [(START, first), (Position(5, 0), second)]
    again = SchemaFile(tmp_path / "again")
    for position, schema in known.schemas_between("16400", START, Position(9, 0)):
        again.put_schema(schema, position)
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


def test_a_watermark_is_rewritten_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    file = folder / "shop.watermark"
    offset = FileWatermarks(file).load("shop")
    assert offset == {"step": 3, "clock": [1, 2], "tables": {}}
    FileWatermarks(tmp_path / "again").save("shop", offset)
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


def test_the_cursor_of_a_tape_is_rewritten_byte_for_byte(tmp_path: Path) -> None:
    unpack("sqlite-delta", tmp_path)
    tape = tmp_path / "state" / "tape"
    (before,) = contents(tape).values()
    lowest = Cursors(str(tape)).lowest()
    assert lowest == 33
    Cursors(str(tmp_path / "again")).advance("pipeline", lowest)
    assert contents(tmp_path / "again") == {"pipeline.cursor": before}


def test_the_schedule_of_polls_is_rewritten_byte_for_byte(tmp_path: Path) -> None:
    unpack("poll-delta", tmp_path)
    file = tmp_path / "state" / "poll" / "pipeline" / "schedule.json"
    before = file.read_bytes()
    assert json.loads(before)["notes"].keys() == {"polls", "diffed"}
    PollSchedule(file, 0.05, 1.0).save()
    assert file.read_bytes() == before


# -- rqlite ---------------------------------------------------------------------------------------------------


def test_the_window_of_a_cluster_is_upgraded_and_knows_the_same_events(folder: Path, tmp_path: Path) -> None:
    file = folder / "rqlite" / "shop" / "window"
    window = DeduplicationWindow.load(file)
    assert window is not None
    assert (window.mark, window.next) == (Position(9, 1), Position(9, 2))
    stored = json.loads(file.read_bytes().split(b"\n", 1)[1])["groups"]
    window.save(tmp_path / "upgraded")
    upgraded = DeduplicationWindow.load(tmp_path / "upgraded")
    assert upgraded is not None
    for index, own, zeros in stored:
        known = upgraded.entry(index)
        assert known is not None
        assert known == window.entry(index)
        assert (known.own.events, len(known.zeros)) == (len(own), len(zeros))
    upgraded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "upgraded").read_bytes()


def test_a_cluster_that_stopped_stays_stopped_and_keeps_its_files_byte_for_byte(folder: Path) -> None:
    before = contents(folder / "rqlite" / "shop")
    cluster = Cluster("shop", folder / "rqlite", segment_bytes=100_000, max_bytes=1_000_000)
    cluster.open()
    cluster.maintain()
    level, error = cluster.level(), cluster.error
    cluster.close()
    assert level.mark == Position(9, 1)
    assert isinstance(error, LostError)
    assert error.describe() == json.loads(before["stopped"])
    after = contents(folder / "rqlite" / "shop")
    assert {name: after[name] for name in before} == before


# -- status of processes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "place", "name"),
    [
        ("postgres-delta", "journal", "receiver"),
        ("postgres-delta", "journal", "follower"),
        ("rqlite-webhook", "journal", "receiver"),
        ("rqlite-webhook", "queue", "sender"),
    ],
)
def test_a_status_is_rewritten_byte_for_byte(pipeline: str, place: str, name: str, tmp_path: Path) -> None:
    unpack(pipeline, tmp_path)
    folder = tmp_path / "state" / place
    before = (folder / f"{name}.json").read_text()
    status = read_status(folder, name)
    write_status(folder, name, status)
    assert (folder / f"{name}.json").read_text() == before


def test_an_error_in_a_status_is_the_error_it_was(tmp_path: Path) -> None:
    unpack("rqlite-webhook", tmp_path)
    described = read_status(tmp_path / "state" / "queue", "sender")["error"]
    error = revive(described)
    assert type(error).__name__ == "UnavailableError"
    assert error.describe() == described


def test_every_kind_of_error_that_is_stored_by_name_is_known_by_it() -> None:
    kinds = ["ConfigError", "PreflightError", "UnavailableError", "OwnedError", "TableError", "SchemaChangedError"]
    for kind in [*kinds, "UnfitError", "StaleCopyError", "LostError", "DamagedError"]:
        described = {"kind": kind, "message": "m", "fix": "f", "table": "t", "position": "p", "raw": "AP8="}
        assert revive(described).describe() == described


# -- what a batch brings to a queue ---------------------------------------------------------------------------


def test_the_staged_files_of_a_batch_are_recorded_byte_for_byte_as_before(folder: Path, tmp_path: Path) -> None:
    batch = Batch("shop/epoch", 7)
    assert EventStage(folder / "queue").tables(batch) == {"public.orders"}
    copied, log = Piece("a.arrow", 3, 1000, 40), Piece("b.arrow", 2, 900, 50)
    EventStage(tmp_path / "again").enter(batch, "public.orders", copied=[copied], log=[log], completes=True)
    assert contents(tmp_path / "again") == contents(folder / "queue")
