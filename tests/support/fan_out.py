"""A database, a pipeline's file with several destinations, and all of them in one folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from tailrace.config.pipeline import load_all
from tailrace.journal import cursors
from tailrace.state.status import PipelineStatus
from tailrace.testing.wait import PATIENCE_SECONDS
from tailrace.verify.comparison import verify
from tests.support.runner import RunningPipeline, all_ready
from tests.support.scenario import Scenario


class FanOutScenario(Scenario):
    """A pipeline from every table of a database to a lake and to an SQLite file, unless told otherwise."""

    def write(self, **options: Mapping[str, Any]) -> None:
        self.replica = self.folder / "replica.db"
        destinations = {
            "lake": {"type": "delta", "path": str(self.lake)},
            "replica": {"type": "sqlite", "path": str(self.replica)},
        }
        self.rewrite(destinations, **options)

    def rewrite(self, destinations: Mapping[str, Mapping[str, Any]], **options: Mapping[str, Any]) -> None:
        """Write the file with these destinations."""
        super().write(**options)
        sections = yaml.safe_load(self.file.read_text())
        del sections["destination"]
        sections["destinations"] = [{"name": name, **section} for name, section in destinations.items()]
        self.file.write_text(yaml.safe_dump(sections, sort_keys=False))

    def write_single(self, destination: Mapping[str, Any]) -> None:
        """Write the file with one destination."""
        super().write(destination=destination)

    def differing(self) -> list[str]:
        """The destinations and their tables that differ from the source now, as `tailrace verify` finds them."""
        return [
            f"{config.member}: {verdict.table}"
            for config in load_all(self.file)
            for verdict in verify(config)
            if verdict.compared and not verdict.equal
        ]

    def reach(self, run: RunningPipeline, *destinations: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until everything committed so far is in these destinations and every table there is Ready."""
        lsn = self.fence()

        def caught_up(status: PipelineStatus) -> bool:
            reached = status.position is not None and int(status.position[:16], 16) >= lsn
            return reached and all_ready(status)

        for destination in destinations:
            run.wait_until(caught_up, seconds, destination)

    def confirmed(self) -> int:
        """What the slot says the server may forget."""
        found = self.value(
            "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots"
            f" WHERE slot_name = 'tailrace_{self.name}'"
        )
        return cast(int, found)

    def cursors(self) -> set[str]:
        """The readers that the journal keeps changes for."""
        return set(cursors(Path(self.state) / "journal"))
