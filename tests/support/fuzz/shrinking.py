"""Makes a failing sequence as short as it can be while it still fails for the same kind of reason."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from tests.support.fuzz.script import Batch, Receive, Script, Transaction
from tests.support.fuzz.sequence import Fuzzer, SequenceError


def shrink(fuzzer: Fuzzer, error: SequenceError, attempts: int = 400) -> SequenceError:
    """The shortest sequence found. Every candidate is run, at most `attempts` of them."""
    best, left = error, attempts
    kind = _kind(error.reason)
    improved = True
    while improved and left > 0:
        improved = False
        for candidate in _smaller(best.script):
            if left <= 0:
                break
            left -= 1
            try:
                fuzzer.replay(candidate)
            except SequenceError as found:
                if _kind(found.reason) == kind:
                    best, improved = found, True
                    break
    return best


def _kind(reason: str) -> str:
    """Two failures of one kind differ in rows and names only."""
    if ": only upstream" in reason or "lacks the columns" in reason:
        return "differs"
    return re.sub(r"[\d(\[{'\"].*", "", reason)[:60]


def _smaller(script: Script) -> Iterator[Script]:
    """Scripts with something left out: large pieces first."""
    steps = script.steps
    size = len(steps) // 2
    while size:
        for start in range(0, len(steps), size):
            yield replace(script, steps=steps[:start] + steps[start + size :])
        size //= 2
    for index, step in enumerate(steps):
        if isinstance(step, Transaction):
            for one in range(len(step.statements)):
                rest = step.statements[:one] + step.statements[one + 1 :]
                if rest:
                    yield replace(script, steps=(*steps[:index], replace(step, statements=rest), *steps[index + 1 :]))
            for one, other in itertools.combinations(range(len(step.statements)), 2):
                rest = tuple(text for at, text in enumerate(step.statements) if at not in (one, other))
                if rest:
                    yield replace(script, steps=(*steps[:index], replace(step, statements=rest), *steps[index + 1 :]))
            if step.joined:
                yield replace(script, steps=(*steps[:index], replace(step, joined=False), *steps[index + 1 :]))
        elif isinstance(step, Batch | Receive) and step.crash:
            yield replace(script, steps=(*steps[:index], type(step)(), *steps[index + 1 :]))
    for index in range(len(script.tables)):
        yield replace(script, tables=script.tables[:index] + script.tables[index + 1 :])
    for plain in (
        {"destination": "memory"},
        {"limit": 5000, "limit_bytes": 64_000_000},
        {"lanes": 1},
        {"pieces": 0, "frame_bytes": 8 * 1024 * 1024},
    ):
        simpler = replace(script.setting, **plain)
        if simpler != script.setting:
            yield replace(script, setting=simpler)
