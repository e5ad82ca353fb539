"""What a changelog gives back, batch by batch or all at once, is the table that was written into it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.destination.parquet.destination import ParquetDestination
from tailrace.source.follower import Limit
from tailrace.testing.replay import SourceReplay
from tests.support.changelog_writing import tape, write_events
from tests.support.history import SHIFTING, Key, Row, replay_steps, shifting_histories, step_changes


@settings(max_examples=30, deadline=None)
@given(batches=shifting_histories(cuts=4), by_day=st.booleans(), data=st.data())
def test_a_tape_gives_the_table_whatever_the_batches_hold(batches: Any, by_day: bool, data: Any) -> None:
    table, expected = SHIFTING, dict[Key, Row]()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/changes"
        destination = ParquetDestination(path=path, partition_by="day" if by_day else "none")
        with SourceReplay(tape(path, Path(folder)), Limit(rows=5, bytes=1000)) as replay:
            for number, steps in enumerate(batches):
                expected = replay_steps(steps, table, expected)
                table = steps[-1].table
                changes = step_changes(steps, 5, first_commit=100 * number)
                for _ in range(2):
                    write_events(destination, number, changes)
                if changes and data.draw(st.booleans()):
                    replay.live(data.draw(st.sampled_from(["plan", "half", "write", "commit", ""])))
            if not Path(path).exists():
                return
            replay.catch_up()
            if (found := replay.tables.get("public.t")) is None:
                assert expected == {}
                return
            found.evolve(table)
            assert found.rows == expected
