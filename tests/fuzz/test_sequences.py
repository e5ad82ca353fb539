"""Random sequences of DDL, rows and crashes, in process, on a real server: both ends must be equal after each.

A run of its own: `make fuzz SECONDS=3600 SEED=7`. What fails with a seed fails with it again, and is printed as a
script that `tests/fuzz/test_schema_faults.py` can hold.
"""

from __future__ import annotations

import time

import pytest

from tests.support.fuzz.generator import Generator
from tests.support.fuzz.sequence import Fuzzer, SequenceError
from tests.support.fuzz.shrinking import shrink

SEQUENCES = 150
"""How many run where no time is asked for."""
SECONDS = 60.0
"""The most that they may take: a busy machine runs fewer."""


def test_both_ends_are_equal_after_random_schema_changes_rows_and_crashes(
    fuzzer: Fuzzer, pytestconfig: pytest.Config
) -> None:
    seconds: float | None = pytestconfig.getoption("fuzz_seconds")
    seed: int = pytestconfig.getoption("fuzz_seed")
    most = SEQUENCES if seconds is None else None
    began, count = time.monotonic(), 0
    failures: list[SequenceError] = []
    while (most is None or count < most) and time.monotonic() - began < (seconds or SECONDS):
        generator = Generator(seed + count)
        try:
            fuzzer.run(generator.tables, generator.steps, generator.setting)
        except SequenceError as error:
            print(f"\nseed {seed + count}: {error.reason}", flush=True)
            failures.append(shrink(fuzzer, error))
            print(f"seed {seed + count}, as short as it fails: {failures[-1]}", flush=True)
            if seconds is None:
                break
        count += 1
    passed = time.monotonic() - began
    print(f"\n{count} sequences in {passed:.0f} s, {count / passed * 60:.0f} a minute, {len(failures)} failed")
    assert not failures, "\n\n".join(map(str, failures))
