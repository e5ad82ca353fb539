"""Whether the tables at the destination are those that the state describes: compared at each start and before a retry.

Every write compares its table as well (`TableBatch.is_repeat`); this finds the tables that are not written again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tailrace.destination import Destination, table_mismatch
from tailrace.destination.capability import Inspectable
from tailrace.errors import TableError
from tailrace.model.last_batch import LastBatch, MismatchedBatch, is_repeat, require_known
from tailrace.model.schema import TableName
from tailrace.state import StateStore, TableRecord, TableState
from tailrace.stream.progress import ProgressRecorder

THREADS = 16
"""How many tables are read at the same time: an object store answers slowly, but many at once."""


@dataclass(frozen=True)
class DestinationCheck:
    """Compares what the tables hold of a pipeline with what the state says. A table that differs stops."""

    store: StateStore
    destination: Destination
    pipeline: str
    recorder: ProgressRecorder

    def compare(self, pending: LastBatch | None) -> list[TableRecord]:
        """Compare all tables but those that are in error or about to be copied again; returns those that were stopped.

        `pending` is a batch that Spark will repeat: a table may hold it already. Raises UnavailableError when the
        destination does not answer.
        """
        asked = {each.table for each in self.store.open_requests() if each.kind == "resync"}
        due = [
            table for table in self.store.tables() if table.state is not TableState.ERRORED and table.name not in asked
        ]
        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(lambda table: self._problem(table, pending), due))
        stopped = [(table, error) for table, error in zip(due, found, strict=True) if error is not None]
        for table, error in stopped:
            self.recorder.stop_table(table, error)
        return [table for table, _ in stopped]

    def fits(self, table: TableRecord) -> bool:
        """Whether a table in error may go on. If it may not, its reason is updated."""
        error = self._problem(table, None)
        if error is not None:
            self.recorder.stop_table(table, error)
        return error is None

    def _problem(self, table: TableRecord, pending: LastBatch | None) -> TableError | None:
        known = self.recorder.held(table.upstream_id)
        if known is None or not known.is_of(table.name) or not isinstance(self.destination, Inspectable):
            return None
        name = TableName.parse(table.name)
        try:
            last = self.destination.last_batch(name, self.pipeline)
            if pending is None:
                require_known(last, known)
            else:
                is_repeat(pending, last, known)
        except MismatchedBatch as found:
            return table_mismatch(found, name)
        except TableError as error:
            return error
        return None
