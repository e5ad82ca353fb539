"""The driver half: every cluster that posts here, each with its own journal and position.

    {"services": {"rqlite": {"log": "<position>", "tables": {…}}, …}}

An error of one cluster stops only that cluster's tables: its offset carries the error as `failure`, and the batch that
ends there reports it for each table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.errors import TailraceError, UnavailableError, revive
from tailrace.source.follower import Follower, Limit, Offset, SchemaVersions, TableDirectives
from tailrace.source.journal_log import RECEIVER_SECONDS
from tailrace.source.rqlite.cluster_follower import ClusterFollower
from tailrace.source.split import Split
from tailrace.source.sqlite.offset import SqliteOffset

if TYPE_CHECKING:
    from tailrace.source.rqlite.source import RqliteSource


class RqliteFollower(Follower):
    """Owns a receiver process unless another one runs. Clusters appear with their first request, or through their
    API."""

    def __init__(self, source: RqliteSource, versions: SchemaVersions, *, is_receiving: bool) -> None:
        self.source = source
        self._versions = versions
        self._receiver = source.start_receiver(RECEIVER_SECONDS if is_receiving else 0.0)
        self._services: dict[str, ClusterFollower] = {}
        self._away: list[UnavailableError] = []
        self._failed: set[str] = set()

    def start(self) -> Offset:
        return {"services": {name: one.start() for name, one in self._followers().items()}}

    def target(self) -> Offset:
        return {"services": {name: one.target() for name, one in self._followers().items()}}

    def done(self, start: Offset, target: Offset) -> bool:
        if self._away:
            raise self._away[0]  # its directives are still to be carried out, and there is no other cluster to delay
        followers, given = self._followers(), start["services"]
        for name, goal in target["services"].items():
            follower = followers.get(name) or self._follow(name)
            now = SqliteOffset.from_json(given[name] if name in given else follower.start())
            if name in self._failed:
                # Its journal may end before the goal now: nothing more is read of it.
                if any(entry.phase != "stopped" for entry in now.tables.values()):
                    return False
            elif not follower.has_reached(now, SqliteOffset.from_json(goal).log):
                return False
        for follower in followers.values():
            follower.goal = None
        return True

    def latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        self._receiver.require_alive()
        followers, given = self._followers(), start["services"]
        share = Limit(max(limit.rows // max(len(followers), 1), 1), max(limit.bytes // max(len(followers), 1), 1))
        end: dict[str, Any] = dict(given)
        self._away, self._failed = [], set()
        for name, follower in followers.items():
            raw = given.get(name) or follower.start()
            try:
                reached = self._advance(follower, raw, share, directives)
            except UnavailableError as error:
                self._away.append(error)
                continue
            if reached != raw:
                end[name] = reached
        if self._away and len(self._away) == len(followers):
            raise self._away[0]  # one of several may be unavailable without delaying the others
        return start if end == given else {"services": end}

    def _advance(self, follower: ClusterFollower, raw: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        try:
            return follower.latest(raw, limit, directives)
        except UnavailableError:
            raise
        except TailraceError as error:
            self._failed.add(follower.service)
            now = SqliteOffset.from_json(raw)
            directed = follower.apply_directives(now, directives)
            if follower.fail(directed, error):
                return {**directed.to_json(), "failure": error.describe(), "failures": raw.get("failures", 0) + 1}
            if not now.tables:
                raise  # there is no table to report it for
            return raw if directed == now else {**raw, **directed.to_json()}

    def plan(self, start: Offset, end: Offset) -> list[Split]:
        followers = self._followers()
        splits: list[Split] = []
        for name, raw in end["services"].items():
            follower, earlier = followers.get(name) or self._follow(name), start["services"].get(name)
            if raw == earlier:
                continue
            if raw.get("failures", 0) > (earlier or {}).get("failures", 0):
                splits += follower.fail(SqliteOffset.from_json(raw), revive(raw["failure"]))
            else:
                splits += follower.plan(earlier or follower.start(), raw)
        return splits

    def _followers(self) -> dict[str, ClusterFollower]:
        try:
            names = self.source.services()
        except UnavailableError:
            if not self._services:
                raise
            return self._services  # known clusters still have journals to read
        for name in names:
            self._follow(name)
        return self._services

    def _follow(self, name: str) -> ClusterFollower:
        if name not in self._services:
            self._services[name] = ClusterFollower(self.source, name, self._versions)
        return self._services[name]

    def stop(self) -> None:
        self._receiver.stop()
        for service in self._services.values():
            service.stop()
