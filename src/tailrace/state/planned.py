"""What Spark planned, in SQL: stored before a batch is applied, so that a driver that lost its disk repeats that batch.

A batch that is planned again with another end would be taken for a repeat by the tables that hold it already, and the
changes between the two ends would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping

from tailrace.state.transaction import StateSession

START_OF_STREAM = -1
"""The number under which the offset is stored at which batch 0 begins."""


class PlannedStore:
    """The last two batches that Spark planned, each as the entry in its log of offsets."""

    _session: StateSession

    def record_planned(self, entries: Mapping[int, str]) -> None:
        """Store the entries of batches. Earlier ones than the last two go. A repeat changes nothing."""
        with self._session.write() as tx:
            tx.run_many(
                "INSERT INTO planned_batch (pipeline, batch_id, entry) VALUES (:pipeline, :id, :entry)"
                " ON CONFLICT (pipeline, batch_id) DO UPDATE SET entry = excluded.entry",
                [{"id": batch_id, "entry": entry} for batch_id, entry in entries.items()],
            )
            tx.run(
                "DELETE FROM planned_batch WHERE pipeline = :pipeline AND batch_id < :oldest",
                oldest=max(entries) - 1,
            )

    def planned_batches(self) -> dict[int, str]:
        """The entries that are stored, by batch; none before the first, and none of an older tailrace."""
        rows = self._session.read("SELECT batch_id, entry FROM planned_batch WHERE pipeline = :pipeline")
        return {row["batch_id"]: row["entry"] for row in rows}
