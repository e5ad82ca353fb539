"""Rows by key out of a real SlateDB, by scan where keys lie close together."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tailrace.errors import TableError
from tailrace.option.table import TableOptions
from tailrace.source.slatedb import row
from tailrace.source.slatedb.row import look_up
from tailrace.source.slatedb.table_mapping import read_mappings
from tests.support.slatedb_writing import Writer

COUNT = 4_000
SUMS = TableOptions.model_validate(
    {"settings": {"slatedb.sum": {"mapping": {"prefix": "s:", "key": "utf8", "value": "int64", "merge": "sum"}}}}
)


@pytest.mark.parametrize("share", [0.003, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("piece", [64, 2048])
def test_keys_find_their_rows_however_close_they_lie(
    share: float, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row, "_PIECE_ROWS", piece)
    monkeypatch.setattr(row, "_AT_ONCE", 8)
    chance = random.Random(f"{share} {piece}")
    with Writer(tmp_path / "store") as writer:
        writer.write(*((b"%05d" % number, b"old") for number in range(0, COUNT, 2)))
        writer.flush()
        writer.write(*((b"%05d" % number, chance.choice([b"new", None])) for number in range(0, COUNT, 3)))
        there = writer.rows()
        wanted = [b"%05d" % number for number in range(COUNT) if chance.random() < share]
        # All of one stretch, so that the pace changes on the way.
        wanted += [b"%05d" % number for number in range(COUNT // 2, COUNT // 2 + 300)]
        chance.shuffle(wanted)
        rules = read_mappings("db1", TableOptions())
        found = look_up(writer.database, rules, rules[0], wanted)
        assert found.column("found").to_pylist() == [key in there for key in wanted]
        cells = zip(*(found.column(name).to_pylist() for name in ("key", "value", "seq")), strict=True)
        assert list(cells) == [there[key][:3] if key in there else (None, None, None) for key in wanted]


def test_operands_between_the_keys_that_are_wanted_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row, "_PIECE_ROWS", 16)
    with Writer(tmp_path / "store") as writer:  # appends, where we would add
        keys = [b"s:%03d" % number for number in range(100)]
        writer.write(*((key, bytes(7) + b"\1") for key in keys))
        writer.put(b"s:050x", b"no number")
        writer.merge(b"s:050x", bytes(7) + b"\1")
        rules = read_mappings("db1", SUMS)
        assert all(look_up(writer.database, rules, rules[0], keys).column("found").to_pylist())
        with pytest.raises(TableError, match="cannot be folded"):
            look_up(writer.database, rules, rules[0], [*keys, b"s:050x"])
