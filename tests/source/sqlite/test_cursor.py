"""How far readers are: what every one of them has may be purged, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.errors import DamagedError
from tailrace.source.sqlite.cursor import Cursors


def test_what_every_reader_has_is_the_lowest_of_their_cursors(tmp_path: Path) -> None:
    cursors = Cursors(str(tmp_path))
    assert cursors.lowest() is None
    cursors.advance("pipeline", 70)
    cursors.begin("a stream", 12)
    cursors.begin("a stream", 99)
    assert cursors.lowest() == 12
    assert (tmp_path / "pipeline.cursor").read_bytes() == b"70"


@pytest.mark.parametrize("content", [b"", b"1x", b"\xff\xfe", b"\0\0\0"])
def test_a_damaged_cursor_is_named_with_its_fix_and_nothing_may_be_purged(tmp_path: Path, content: bytes) -> None:
    cursors = Cursors(str(tmp_path))
    cursors.advance("pipeline", 70)
    cursors.advance("a stream", 12)
    damaged = tmp_path / "a%20stream.cursor"
    damaged.write_bytes(content)
    with pytest.raises(DamagedError) as raised:
        cursors.lowest()
    assert str(damaged) in raised.value.message
    assert raised.value.fix is not None
    assert raised.value.fix.startswith(f"rm {damaged}")
    damaged.unlink()
    assert cursors.lowest() == 70
