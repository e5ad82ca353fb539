"""Finds changes that no node sent as events: those that a node got with a snapshot before it became the leader.

A node that was away for long catches up by a snapshot of another one. It never runs those changes, so its change
capture does not see them. If the former leader is lost before it has sent them, no one does.

In the journal this is a gap: another node sends, and Raft indexes are missing before its first new one. A gap alone
proves nothing, as elections, DDL and reads use indexes, too. So the node is asked whether it took over a snapshot since
it started. If it did, or cannot be asked, every table of the cluster counts as changed and is copied again.
"""

from __future__ import annotations

import json
import logging
from functools import lru_cache

from tailrace.journal import FrameRef
from tailrace.model.change import Position
from tailrace.source.rqlite.api import Api

_log = logging.getLogger(__name__)


class MissedChanges:
    """One per cluster. Asks about each gap once."""

    def __init__(self, service: str, api: Api | None) -> None:
        self._service = service
        self._api = api
        self._known: dict[Position, bool] = {}

    def are_before(self, ref: FrameRef) -> bool:
        """Whether changes may be missing before this frame, and the tables can be read to repair that."""
        node = gap_of(ref.meta)
        if node is None or self._api is None:
            return False
        if ref.first not in self._known:
            restores = [one.restores for one in self._api.counters() if one.node == node]
            self._known[ref.first] = not restores or restores[0] > 0
            if self._known[ref.first]:
                _log.warning(
                    "cluster %r: node %r leads since index %d and may have got changes before that with a snapshot,"
                    " which no one sends; every table is copied again",
                    self._service,
                    node,
                    ref.first.commit,
                )
        return self._known[ref.first]


@lru_cache(maxsize=4096)
def gap_of(meta: bytes) -> str | None:
    """The node that sent a frame, if indexes are missing before its first; None for any other frame."""
    found = json.loads(meta)
    return str(found["node"]) if found.get("gap") else None
