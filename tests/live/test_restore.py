"""Parts that do not fit together, with Spark: `tests/faults/test_restore.py` has them all, without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.restore_scene import SqliteScene, outcome

pytestmark = pytest.mark.usefixtures("spark")


def test_a_state_that_was_put_back_stops_what_changed_since_and_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    with SqliteScene(tmp_path) as scene:
        scene.run()
        scene.keep(tmp_path / "copy")
        scene.change(1)
        scene.run()
        scene.change(2)
        scene.put_back("state folder", tmp_path / "copy")
        assert outcome(scene).word == "table"
        assert [table.name for table in scene.errored()] == [scene.items]
        scene.resync(scene.items)
        assert outcome(scene).word == "right"
        assert scene.differing() == []

        [entry] = {max((tmp_path / "state/checkpoint/offsets").glob("[0-9]*"), key=lambda file: int(file.name))}
        sound = entry.read_bytes()
        entry.write_bytes(sound.replace(b'"phase"', b'"phasf"'))
        damaged = outcome(scene)
        assert damaged.word == "7"
        assert "does not match its checksum" in damaged.message
        entry.write_bytes(sound)
        assert outcome(scene).word == "right"
