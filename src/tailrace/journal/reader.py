"""The reader of a journal, for any number of processes; it never writes and never waits for the writer."""

from __future__ import annotations

from tailrace.errors import RESYNC, DamagedError, LostError, UnavailableError
from tailrace.journal.frame import FrameRef
from tailrace.journal.frame_reader import AGAIN, FrameReader
from tailrace.journal.local_storage import LocalStorage
from tailrace.journal.storage import JournalPlace, JournalStorage
from tailrace.journal.view import JournalView
from tailrace.model.change import Position


class JournalReader(FrameReader):
    """A view of the journal as of the last `refresh`. Not thread-safe. Keeps one local file open.

    Opening indexes the newest segment; older segments are indexed when `frames` needs them. A place where nothing is
    yet is an empty journal.
    """

    def __init__(self, path: JournalPlace) -> None:
        super().__init__(path)
        self._view = _view_of(self._storage)

    def refresh(self) -> None:
        """Find what was appended since the last call. Cheap when there is nothing new: two stat calls, or a request."""
        self._view.refresh()

    def poll(self) -> None:
        """`refresh` for a caller that repeats it all the time: an object store is asked at most 20 times a second."""
        self._view.poll()

    def head(self) -> Position:
        """The last commit boundary; START when there is none."""
        return self._view.state.head

    def mark(self) -> Position:
        """The highest commit boundary or note: the upstream was read up to here."""
        return self._view.state.mark

    def origin(self) -> Position:
        """Where the journal begins. Changes at or before this position were removed or never received."""
        return self._view.origin()

    def frames(
        self, after: Position, upto: Position, *, rows: int | None = None, size: int | None = None
    ) -> list[FrameRef]:
        """The frames with changes in (after, upto], in order, of finished transactions only.

        The first may begin before `after` and the last may end after `upto`. With `rows` or `size` (bytes) the list
        ends at the first commit boundary at which either limit is reached: the `last` of its last element.

        The same range always gives the same frames, or an error: LostError when retention has passed `after`,
        DamagedError when stored frames of the range cannot be found, UnavailableError when the journal does not reach
        `upto` (not yet, or because a crash lost its unacknowledged end, which the upstream will send again).
        """
        if upto > self.mark():
            self.refresh()
        if upto > self.mark():
            raise UnavailableError(
                f"journal {self._storage} reaches only to {self.mark()}",
                position=str(upto),
                fix="none needed while the receiver runs: the upstream sends the rest",
            )
        if after >= upto:
            return []
        if after < self.origin():
            raise LostError(
                f"journal {self._storage} begins at {self.origin()}; earlier changes were removed",
                position=str(after),
                fix=RESYNC,
            )
        return self._collect(after, upto, rows, size)

    def close(self) -> None:
        """Close the open file. A repeat does nothing."""
        self._view.close()

    def _collect(self, after: Position, upto: Position, rows: int | None, size: int | None) -> list[FrameRef]:
        refs: list[FrameRef] = []
        counted = measured = 0
        for segment in self._view.segments(after, upto):
            try:
                index = self._view.index(segment)
            except FileNotFoundError as error:
                raise self._missing(segment.name, segment.header.state.tail) from error
            gap = next((gap for gap in index.gaps if after < gap.last and gap.after < upto), None)
            for ref in index.refs(after, upto):
                if gap is not None and ref.first > gap.after:
                    break
                if ref.last > self.head():
                    return refs
                refs.append(ref)
                counted, measured = counted + ref.count, measured + ref.length
                full = (rows is not None and counted >= rows) or (size is not None and measured >= size)
                if full and ref.complete:
                    return refs
            if gap is not None:
                raise DamagedError(
                    f"journal segment {segment.name} is damaged at byte {gap.offset}: "
                    f"changes after {gap.after}, up to {gap.last}, cannot be read",
                    position=str(gap.after),
                    fix=AGAIN,
                )
        return refs


def _view_of(storage: JournalStorage) -> JournalView:
    if isinstance(storage, LocalStorage):
        from tailrace.journal.local_view import LocalView

        return LocalView(storage)
    from tailrace.journal.object_storage import ObjectStorage
    from tailrace.journal.object_view import ObjectView

    assert isinstance(storage, ObjectStorage)
    return ObjectView(storage)
