"""What is known of rows downstream, after steps that were tried more than once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.errors import DamagedError
from tailrace.source.poll.key_snapshot import GONE, HASH, MOST_POLLED, PART, KeySnapshot, record
from tailrace.source.poll.keyset import Stretch

KEY = pa.struct([("id", pa.int64())])


def given(step: int, rows: dict[int, int | None]) -> pa.Table:
    """Keys with their hashes; without one they were deleted."""
    kept = {key: each for key, each in rows.items() if each is not None}
    gone = [key for key, each in rows.items() if each is None]
    return pa.concat_tables(
        [
            record(_keys(list(kept)), np.array(list(kept.values()), np.int64), step),
            record(_keys(gone), None, step),
        ]
    )


def _keys(values: list[int]) -> pa.StructArray:
    return pa.array([{"id": value} for value in values], KEY)


def hashes_by_id(table: pa.Table | None) -> dict[int, Any]:
    assert table is not None
    return {
        row["id"]: "gone" if row.get(GONE) else "unsure" if row[HASH] is None else row[HASH]
        for row in table.to_pylist()
    }


def with_part(rows: pa.Table) -> pa.Table:
    return rows.append_column(PART, pa.array(np.zeros(rows.num_rows, np.int32)))


def test_the_last_step_that_has_a_key_counts(tmp_path: Path) -> None:
    known = KeySnapshot(tmp_path / "t")
    known.put_polled(5, given(5, {1: 10, 2: 20, 3: 30}))
    known.put_polled(6, given(6, {2: 21, 3: None}))
    assert hashes_by_id(known.polled(4, 9)) == {1: 10, 2: 21, 3: "gone"}
    assert hashes_by_id(known.polled(4, 5)) == {1: 10, 2: 20, 3: 30}
    assert known.polled(7, 9) is None


def test_what_attempts_do_not_agree_on_is_not_known(tmp_path: Path) -> None:
    known = KeySnapshot(tmp_path / "t")
    known.put_polled(5, given(5, {1: 10, 2: 20, 3: 30}))
    known.put_polled(5, given(5, {1: 10, 2: 99, 4: 40}))
    assert hashes_by_id(known.polled(4, 9)) == {1: 10, 2: "unsure", 3: "unsure", 4: "unsure"}
    known.put_polled(6, given(6, {2: 20}))
    known.put_polled(6, given(6, {}))
    assert hashes_by_id(known.polled(4, 9))[2] == "unsure"


def test_many_files_are_merged_into_one_with_the_same_content(tmp_path: Path) -> None:
    known = KeySnapshot(tmp_path / "t")
    for step in range(1, MOST_POLLED + 3):
        known.put_polled(step, given(step, {step % 7: step, step % 3 + 100: None}))
    known.put_polled(3, given(3, {200: 1}))
    before = hashes_by_id(known.polled(0, 1000))
    known.gather(0, MOST_POLLED)
    assert len(list(known.folder.glob("polled-*"))) == 3
    assert hashes_by_id(known.polled(0, 1000)) == before


def test_files_that_are_merged_while_they_are_read_are_read_again(tmp_path: Path) -> None:
    class Gathered(KeySnapshot):
        def _polled(self, after: int, upto: int) -> list[Path]:
            listed = super()._polled(after, upto)
            KeySnapshot(self.folder).gather(after, upto)
            return listed

    for folder in ("counted", "read"):
        for step in range(MOST_POLLED + 1):
            KeySnapshot(tmp_path / folder).put_polled(step, given(step, {step: step}))
    assert Gathered(tmp_path / "counted").count_polled(0, 1000) == MOST_POLLED + 1
    assert len(hashes_by_id(Gathered(tmp_path / "read").polled(0, 1000))) == MOST_POLLED + 1


def test_attempts_at_one_share_of_a_step_need_not_know_keys_of_another(tmp_path: Path) -> None:
    known = KeySnapshot(tmp_path / "t")
    known.put_polled(5, given(5, {1: 10, 2: None}), "0of2")
    known.put_polled(5, given(5, {3: 30, 4: None}), "1of2")
    known.put_polled(5, given(5, {3: 30}), "1of2")
    assert hashes_by_id(known.polled(4, 9)) == {1: 10, 2: "gone", 3: 30, 4: "unsure"}


def test_a_base_is_whole_or_none(tmp_path: Path) -> None:
    known = KeySnapshot(tmp_path / "t")
    known.put_base(3, Stretch((), ("5",)), with_part(given(0, {1: 10})))
    assert known.bases(3) is None
    known.put_base(3, Stretch(("5",), None), with_part(given(0, {7: 70, 8: 80})))
    known.put_base(3, Stretch(("5",), None), with_part(given(0, {7: 70, 9: 90})))
    bases = known.bases(3)
    assert bases is not None
    assert [hashes_by_id(base.read()) for base in bases] == [{1: 10}, {7: 70, 8: "unsure", 9: "unsure"}]


def test_a_stretch_that_grew_is_cut(tmp_path: Path) -> None:
    known = KeySnapshot(tmp_path / "t")
    rows = given(0, {1: 10, 2: 20, 3: 30}).append_column(PART, pa.array([0, 0, 1], pa.int32()))
    known.put_base(3, Stretch(), rows, [("2",)])
    bases = known.bases(3)
    assert bases is not None
    assert [(base.stretch, hashes_by_id(base.read())) for base in bases] == [
        (Stretch((), ("2",)), {1: 10, 2: 20}),
        (Stretch(("2",), None), {3: 30}),
    ]


def test_a_window_is_what_every_attempt_gave(tmp_path: Path) -> None:
    known = KeySnapshot(tmp_path / "t")
    assert not len(known.window(7))
    known.put_window(7, np.array([1, 2, 3]))
    known.put_window(7, np.array([3, 2, 9]))
    assert sorted(known.window(7).tolist()) == [2, 3]


def test_what_no_step_needs_is_forgotten(tmp_path: Path) -> None:
    known = KeySnapshot(tmp_path / "t")
    for step in (3, 4, 5):
        known.put_window(step, np.array([step]))
        known.put_polled(step, given(step, {step: step}))
        known.put_base(step, Stretch(), with_part(given(0, {step: step})))
    known.prune(window=5, base=4, applied=5)
    assert [known.window(step).tolist() for step in (3, 4, 5)] == [[], [], [5]]
    assert known.bases(3) is None
    assert known.bases(4) is not None
    assert hashes_by_id(known.polled(0, 9)) == {4: 4, 5: 5}
    (known.folder / f".found-{4:016}-00.arrow").touch()  # its writer was killed
    known.prune(window=5, base=4, applied=5)
    assert not list(known.folder.glob(".*"))
    known.forget(4)
    assert hashes_by_id(known.polled(0, 9)) == {4: 4}
    assert not len(known.window(5))


def test_damage_is_reported_where_keys_would_be_lost_and_forgotten_where_a_row_is_only_emitted_again(
    tmp_path: Path,
) -> None:
    known = KeySnapshot(tmp_path / "t")
    known.put_window(3, np.arange(100))
    known.put_polled(3, given(3, {number: number for number in range(1000)}))
    for file in (tmp_path / "t").iterdir():
        content = bytearray(file.read_bytes())
        at = 4 if file.suffix == ".npy" else len(content) // 3
        content[at : at + 8] = bytes(byte ^ 0x15 for byte in content[at : at + 8])
        file.write_bytes(content)
    assert len(known.window(3)) == 0
    with pytest.raises(DamagedError, match="is damaged"):
        known.polled(0, 9)
