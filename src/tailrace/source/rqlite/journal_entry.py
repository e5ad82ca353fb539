"""Looks up Raft entries in a cluster's journal: those that are older than what the deduplication window remembers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tailrace.journal import FrameRef, Journal, JournalReader
from tailrace.model.change import START, end_of
from tailrace.source.rqlite.deduplication import DeduplicationWindow, KnownEntry
from tailrace.source.rqlite.frame_builder import remember


class JournalEntries:
    """The entries of one journal, for the duration of the context. Opens the journal when it is first asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader: JournalReader | None = None
        # Neighbouring entries lie in the same frames: a request asks for them one after the other.
        self._frames: list[FrameRef] = []
        self._read = DeduplicationWindow()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._reader is not None:
            self._reader.close()

    def find(self, index: int) -> KnownEntry | None:
        """What the journal holds of an index; None if it never came. Raises LookupError if the journal begins later."""
        if self._reader is None:
            self._reader = Journal.open_reader(self._folder)
        first = self._first(self._reader)
        if first is None or index < first:
            raise LookupError(index)
        frames = self._reader.frames(end_of(index - 1), end_of(index))
        if frames != self._frames:
            self._read = DeduplicationWindow(entries=sys.maxsize)
            for ref in frames:
                remember(self._reader.read(ref), self._read)
            self._frames = frames
        return self._read.entry(index)

    @staticmethod
    def _first(reader: JournalReader) -> int | None:
        """The first index whose events the journal holds in full; None if it holds none."""
        if reader.origin() != START:
            return reader.origin().commit + 1
        refs = reader.frames(START, reader.mark(), rows=1)
        return refs[0].first.commit if refs else None
