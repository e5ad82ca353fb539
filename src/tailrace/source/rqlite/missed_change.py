"""Finds changes that no node sent as events, because the leader lacks them.

A node that was away for long catches up by a snapshot of another one. It never runs those changes, so its change
capture does not see them. If it catches up by the log, or replays it when it starts, it runs more transactions at a
time than its capture takes, which drops the rest. When such a node leads before the former leader has sent them, no one
sends them.

In the journal this is a gap: indexes are missing before, or among, those that a node sends. A gap alone proves nothing,
as elections, DDL, reads and failed statements use indexes, too. So the node is asked whether it has run all of them,
and dropped none. If not, every table of the cluster counts as changed and is copied again; in doubt, too.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from tailrace.errors import PreflightError, UnavailableError
from tailrace.journal import FrameRef
from tailrace.model.change import Position
from tailrace.source.rqlite.api import Api, NodeHistory
from tailrace.system.atomic_file import replace_durably

_log = logging.getLogger(__name__)

SKEW_MS = 10_000
"""How far the clocks of nodes may be apart: within this, it is not known what came first."""
SAMPLE_MS = 10_000
"""How often a leader that lacks changes is asked: if it reports the same as before a gap, it lacks none of that."""
SILENT_MS = 60_000
"""How long a node is not asked again that did not answer."""


@dataclass(frozen=True)
class MissingIndexes:
    """Missing indexes: those after `after`, whose commit was at the time `at` (ms). Both are 0 where nothing came yet.

    `follows` names the node that sent what came before.
    """

    node: str
    follows: str
    after: int
    at: int


class MissedChanges:
    """One per cluster. Asks about each gap once. Keeps in a file what the nodes reported first."""

    def __init__(self, service: str, api: Api | None, file: Path) -> None:
        self._service = service
        self._api = api
        self._file = file
        self._known: dict[Position, bool] = {}
        self._nodes: dict[str, Api] = {}
        self._silent: dict[str, float] = {}
        self._samples: dict[str, list[NodeHistory]] = {}
        self._began, self._looked = 0.0, 0.0
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            stored = json.loads(file.read_bytes())
            self._samples = {node: [NodeHistory(**one)] for node, one in stored["nodes"].items()}
            self._began = float(stored["began"])

    def begin(self) -> None:
        """Ask all nodes before the first copy: that will hold what they lack until now."""
        if self._api is None or self._began:
            return
        self._samples = {one.node: [one] for one in self._api.histories()}
        self._began = _now()
        self._save()

    def look(self) -> None:
        """Before frames are scanned: all of them have arrived, so one answer of a node is enough for them."""
        self._looked = _now()

    def are_before(self, ref: FrameRef) -> bool:
        """Whether changes may be missing before the end of this frame, and the tables can be read to repair that."""
        if self._api is None:
            return False
        gap, node = gap_of(ref.meta)
        if gap is None:
            if node not in self._samples or self._samples[node][-1].lacks_changes:
                self._ask(node, not_before=self._looked - SAMPLE_MS)
            return False
        if ref.first not in self._known:
            self._known[ref.first] = self._is_doubtful(gap)
            if self._known[ref.first]:
                _log.warning(
                    "cluster %r: indexes are missing after %d, and node %r, which sends since then, may lack"
                    " changes, which no one sends; every table is copied again",
                    self._service,
                    gap.after,
                    gap.node,
                )
        return self._known[ref.first]

    def _is_doubtful(self, gap: MissingIndexes) -> bool:
        before = [*self._samples.get(gap.node, ())]
        now = self._ask(gap.node, not_before=self._looked)
        if now is None:
            # A node that leads all the time may leave out many indexes that hold no changes.
            return gap.node != gap.follows
        at = gap.at or (self._began + SKEW_MS if self._began else 0)
        if any(one.asked + SKEW_MS <= at and one.is_same(now) for one in before):
            return False
        has_run_all = now.snapshot <= gap.after or (not now.snapshots and now.started + SKEW_MS <= at)
        return now.dropped > 0 or not has_run_all

    def _ask(self, node: str, *, not_before: float) -> NodeHistory | None:
        """What the node reports, or reported at or after `not_before`; None if it does not answer."""
        assert self._api is not None
        known = self._samples.get(node, [])
        if known and known[-1].asked >= not_before:
            return known[-1]
        if self._looked - self._silent.get(node, 0.0) < SILENT_MS:
            return None
        try:
            api = self._nodes.get(node) or self._api.node(node)
            found = api.history() if api is not None else None
        except (UnavailableError, PreflightError):
            api = found = None
        if found is None or found.node != node or api is None:
            self._nodes.pop(node, None)
            self._silent[node] = _now()
            return None
        self._nodes[node] = api
        # Of answers that say the same, the first and the last tell all.
        same = [one for one in known if one.is_same(found)][:1]
        self._samples[node] = [*same, found]
        if not same:
            self._save()
        return found

    def _save(self) -> None:
        nodes = {node: asdict(known[0]) for node, known in self._samples.items()}
        replace_durably(self._file, json.dumps({"began": self._began, "nodes": nodes}).encode())


def _now() -> float:
    return time.time() * 1000


@lru_cache(maxsize=4096)
def gap_of(meta: bytes) -> tuple[MissingIndexes | None, str]:
    """The gap of a frame, None where no index is missing; and the node that sent the frame."""
    found = json.loads(meta)
    node, gap = str(found["node"]), found.get("gap")
    if not gap:
        return None, node
    return (
        MissingIndexes(node, "", 0, 0) if gap is True else MissingIndexes(node, gap["follows"], gap["after"], gap["at"])
    ), node
