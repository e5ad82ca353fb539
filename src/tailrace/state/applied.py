"""What the destination holds, in SQL: recorded before Spark logs a batch, and compared before the next one is written.

A batch that was recorded here may be repeated; one that was not may be at the destination all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from tailrace.model.last_batch import LastBatch
from tailrace.state.database import Row
from tailrace.state.transaction import StateSession

WHOLE = ""
"""Stands for all tables, where a destination stores batches as a whole."""

_PUT_HELD = (
    "INSERT INTO held_batch (pipeline, upstream_id, batch_id, ending, version, least, name)"
    " VALUES (:pipeline, :upstream_id, :id, :end, :version, :least, :table)"
    " ON CONFLICT (pipeline, upstream_id) DO UPDATE SET batch_id = excluded.batch_id, ending = excluded.ending,"
    " version = excluded.version, least = excluded.least, name = excluded.name"
)


class AppliedStore:
    """The last batch that was applied, and the last batch of each table at the destination."""

    _session: StateSession

    def record_applied(self, batch: LastBatch, held: Mapping[str, LastBatch]) -> None:
        """The destination has this batch. `held` is the last batch of each table it wrote, by upstream id.

        A repeat changes nothing.
        """
        with self._session.write() as tx:
            tx.run(
                "INSERT INTO applied_batch (pipeline, batch_id, ending) VALUES (:pipeline, :id, :end)"
                " ON CONFLICT (pipeline) DO UPDATE SET batch_id = excluded.batch_id, ending = excluded.ending",
                id=batch.id,
                end=batch.end,
            )
            tx.run_many(_PUT_HELD, [{"upstream_id": each, **vars(last)} for each, last in held.items()])

    def applied_batch(self) -> LastBatch | None:
        """The last batch that was recorded; None before the first, and in a store that an older tailrace wrote."""
        rows = self._session.read("SELECT batch_id, ending FROM applied_batch WHERE pipeline = :pipeline")
        return LastBatch(rows[0]["batch_id"], rows[0]["ending"]) if rows else None

    def held_batches(self) -> dict[str, LastBatch]:
        """The last batch of each table at the destination, by upstream id, and of the destination as a whole."""
        rows = self._session.read("SELECT * FROM held_batch WHERE pipeline = :pipeline")
        return {row["upstream_id"]: _read(row) for row in rows}


def _read(row: Row) -> LastBatch:
    return LastBatch(row["batch_id"], row["ending"], row["version"], row["least"], row["name"])
