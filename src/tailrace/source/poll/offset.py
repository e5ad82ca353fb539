"""How far polling is: the number of the last step, and for every table how far it was read.

    {"step": 7, "clock": [1763200000000000, 1763200000100000], "tables": {"16385": {"phase": "ready", …}, …}}

A step is a batch; it numbers the changes it emits, so that their positions grow even when clocks are set back. What a
step reads of a table is in the offset it leads to (`StepRead`), so that a repeated batch reads the same stretches
again. The watermark moves only here, with the batch that applied the changes up to it. Pure values: no connection, no
clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tailrace.source.follower import Phase
from tailrace.source.poll import keyset
from tailrace.source.poll.keyset import START, Keyset


@dataclass(frozen=True)
class Sweep:
    """A stretch to read in the order of one column: up to `settled` for the last time, from there to `upto` once more.

    `upto` None: to the end.
    """

    after: Keyset
    settled: Keyset
    upto: Keyset | None

    def to_json(self) -> list[Any]:
        upto = None if self.upto is None else keyset.to_json(self.upto)
        return [keyset.to_json(self.after), keyset.to_json(self.settled), upto]

    @classmethod
    def from_json(cls, raw: Any) -> Sweep:
        after, settled, upto = raw
        return cls(keyset.from_json(after), keyset.from_json(settled), None if upto is None else keyset.from_json(upto))


@dataclass(frozen=True)
class StepRead:
    """What one step reads of one table.

    kind       copy: chunks `first` to `end` of the key's order; poll: what changed; diff: everything, compared;
               refuse: nothing; the table cannot continue, for a `reason` that has a `fix`
    sweep      poll: by the version column; None where there is none
    soft       poll: by the column of soft deletes
    since      diff: the step whose base is compared with
    window     the step that recorded which rows of the last window were already emitted; 0: none
    rows       about how many rows that is
    """

    kind: Literal["copy", "poll", "diff", "refuse"]
    first: int = 0
    end: int = 0
    sweep: Sweep | None = None
    soft: Sweep | None = None
    since: int = 0
    window: int = 0
    rows: int = 0
    reason: str = ""
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = {"kind": self.kind}
        values = {
            "first": self.first,
            "end": self.end,
            "since": self.since,
            "window": self.window,
            "rows": self.rows,
            "reason": self.reason,
            "fix": self.fix,
        }
        raw |= {name: value for name, value in values.items() if value}
        sweeps = {"sweep": self.sweep, "soft": self.soft}
        return raw | {name: sweep.to_json() for name, sweep in sweeps.items() if sweep is not None}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> StepRead:
        return cls(
            raw["kind"],
            raw.get("first", 0),
            raw.get("end", 0),
            Sweep.from_json(raw["sweep"]) if "sweep" in raw else None,
            Sweep.from_json(raw["soft"]) if "soft" in raw else None,
            raw.get("since", 0),
            raw.get("window", 0),
            raw.get("rows", 0),
            raw.get("reason", ""),
            raw.get("fix", ""),
        )


@dataclass(frozen=True)
class PollTableOffset:
    """One table.

    by          what the marks refer to: if that has changed, they cannot be continued from
    scope       which of its columns and rows were copied
    mark, soft  the table is read on after these marks, in the order of the version and of the soft delete
    step        the last step that read it
    window      the step that last recorded which rows will be seen again; 0: none
    base        the step that last recorded all keys and hashes; 0: none
    copy        the step its copy began with
    bounds      while it copies: the marks between its chunks; `next` is the first chunk not yet copied
    reading     what step `step` read
    undo        its state before that step, in case the step fails
    was         while it is stopped: the phase it continues with
    """

    phase: Phase
    by: str = ""
    scope: str = ""
    mark: Keyset = START
    soft: Keyset = START
    step: int = 0
    window: int = 0
    base: int = 0
    copy: int = 0
    bounds: tuple[Keyset, ...] = ()
    next: int = 0
    request: int = 0
    reading: StepRead | None = None
    undo: Mapping[str, Any] = field(default_factory=dict)
    was: Phase | None = None

    @property
    def chunks(self) -> int:
        copies = self.phase == "copy" or (self.reading is not None and self.reading.kind == "copy")
        return len(self.bounds) + 1 if copies else 0

    def read(self, step: int, reading: StepRead, **changed: Any) -> PollTableOffset:
        """The table after a step that reads it."""
        undo = {
            "mark": keyset.to_json(self.mark),
            "soft": keyset.to_json(self.soft),
            "step": self.step,
            "window": self.window,
            "base": self.base,
        }
        return replace(self, step=step, reading=reading, undo=undo, **changed)

    def stop(self, reached: int | None) -> PollTableOffset:
        """Stop reading it. It was applied up to step `reached`; None: only a new copy helps."""
        if reached is None:
            return replace(self.recopy(), phase="stopped", was="init")
        entry = self._undone() if reached < self.step and self.undo else self
        return replace(entry, phase="stopped", was=self.was if self.phase == "stopped" else self.phase)

    def _undone(self) -> PollTableOffset:
        undo = self.undo
        return replace(
            self,
            mark=keyset.from_json(undo["mark"]),
            soft=keyset.from_json(undo["soft"]),
            step=undo["step"],
            window=undo["window"],
            base=undo["base"],
            next=self.reading.first if self.reading and self.reading.kind == "copy" else self.next,
            reading=None,
            undo={},
        )

    @property
    def holds(self) -> bool:
        return self.was != "init"

    def resume(self) -> PollTableOffset:
        return replace(self, phase=self.was or "init", was=None)

    def recopy(self) -> PollTableOffset:
        """Waiting for a new copy."""
        return PollTableOffset("init", request=self.request)

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = {"phase": self.phase, "by": self.by, "scope": self.scope}
        raw |= {name: keyset.to_json(at) for name, at in {"mark": self.mark, "soft": self.soft}.items() if at}
        values = {
            "step": self.step,
            "window": self.window,
            "base": self.base,
            "copy": self.copy,
            "next": self.next,
            "request": self.request,
            "was": self.was,
        }
        raw |= {name: value for name, value in values.items() if value}
        if self.bounds:
            raw["bounds"] = [keyset.to_json(bound) for bound in self.bounds]
        if self.undo:
            raw["undo"] = dict(self.undo)
        return raw if self.reading is None else {**raw, "reading": self.reading.to_json()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PollTableOffset:
        """Raises ValueError, KeyError or TypeError for what `to_json` does not make."""
        return cls(
            raw["phase"],
            raw["by"],
            raw["scope"],
            keyset.from_json(raw.get("mark", [])),
            keyset.from_json(raw.get("soft", [])),
            raw.get("step", 0),
            raw.get("window", 0),
            raw.get("base", 0),
            raw.get("copy", 0),
            tuple(map(keyset.from_json, raw.get("bounds", []))),
            raw.get("next", 0),
            raw.get("request", 0),
            StepRead.from_json(raw["reading"]) if "reading" in raw else None,
            raw.get("undo", {}),
            raw.get("was"),
        )

    @property
    def oldest_window(self) -> int:
        """Windows of earlier steps are no longer needed, even if the last step fails."""
        return min(self.window, int(self.undo.get("window", self.window)))

    @property
    def oldest_base(self) -> int:
        return min(self.base, int(self.undo.get("base", self.base)))


@dataclass(frozen=True)
class PollOffset:
    """The whole offset. `clock` is the database's time and ours when the last step was made, in microseconds."""

    step: int = 0
    clock: tuple[int, int] = (0, 0)
    tables: Mapping[str, PollTableOffset] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    """Tables whose entry could not be read."""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PollOffset:
        tables: dict[str, PollTableOffset] = {}
        damaged: list[str] = []
        for upstream_id, entry in raw["tables"].items():
            try:
                tables[upstream_id] = PollTableOffset.from_json(entry)
            except (ValueError, KeyError, TypeError):
                damaged.append(upstream_id)
        database, own = raw.get("clock", (0, 0))
        return cls(raw["step"], (database, own), tables, tuple(damaged))

    def to_json(self) -> dict[str, Any]:
        tables = {upstream_id: self.tables[upstream_id].to_json() for upstream_id in sorted(self.tables)}
        return {"step": self.step, "clock": list(self.clock), "tables": tables}

    def with_tables(self, changed: Mapping[str, PollTableOffset]) -> PollOffset:
        return replace(self, tables={**self.tables, **changed})
