"""Reads frames that a reader has found, in any process that can reach the journal: one request, no listing."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from tailrace.errors import RESYNC, DamagedError, LostError, PreflightError, TailraceError, UnavailableError
from tailrace.journal.frame import HEADER_BYTES, Frame, FrameRef, decode, is_sound
from tailrace.journal.storage import JournalPlace, open_storage
from tailrace.model.change import Position
from tailrace.system.failpoint import reach
from tailrace.system.phase import phase

AGAIN = f"start again: the receiver takes them in again if the upstream still has them; if that fails, {RESYNC}"
_PARALLEL = 8
_RANGE_BYTES = 16 << 20


class FrameReader:
    """The executors' half of a reader. Opening it touches nothing."""

    def __init__(self, path: JournalPlace) -> None:
        self._storage = open_storage(path)

    @phase("read")
    def read(self, ref: FrameRef) -> Frame:
        """The frame that a ref points to, with checksums verified. The payload is a view of 8-byte aligned memory.

        Repeatable, in any process that can read the journal. Raises DamagedError when the bytes differ from those
        written, LostError when retention removed the segment, UnavailableError when the frame has been cut off,
        PreflightError when this machine does not see the journal at all.
        """
        return self._frame(ref, self._range(ref.segment, ref.offset, ref.length, ref))

    def read_all(self, refs: Sequence[FrameRef]) -> Iterator[Frame]:
        """`read` of each, in order. From an object store neighbours come in one request, and some requests at once."""
        if self._storage.grows or len(refs) < 2:
            yield from map(self.read, refs)
            return
        groups = [group for _, same in groupby(refs, key=lambda ref: ref.segment) for group in _neighbours(list(same))]

        def fetch(group: list[FrameRef]) -> list[Frame]:
            start, end = group[0].offset, group[-1].offset + group[-1].length
            stored = self._range(group[0].segment, start, end - start, group[0])
            return [self._frame(ref, stored[ref.offset - start :][: ref.length]) for ref in group]

        with ThreadPoolExecutor(_PARALLEL) as pool:
            # A few groups ahead of what is decoded: a split may be larger than memory likes.
            coming = [pool.submit(fetch, group) for group in groups[:_PARALLEL]]
            for at in range(len(groups)):
                with phase("read"):
                    frames = coming.pop(0).result()
                if at + _PARALLEL < len(groups):
                    coming.append(pool.submit(fetch, groups[at + _PARALLEL]))
                yield from frames

    def close(self) -> None:
        """A repeat does nothing."""

    def _range(self, name: str, offset: int, length: int, ref: FrameRef) -> memoryview:
        reach("journal.before_read")
        try:
            stored = self._storage.read_range(name, offset, length)
        except FileNotFoundError as error:
            raise self._missing(ref.segment, ref.last) from error
        if stored is None:
            raise self._cut(ref)
        return stored

    def _frame(self, ref: FrameRef, stored: memoryview) -> Frame:
        header = decode(bytes(stored[:HEADER_BYTES]))
        record = bytes(stored[: HEADER_BYTES + header.meta_length])
        # The ref's meta may be a part of the stored one, which has its own checksum.
        if header.length != ref.length or not is_sound(record, header.meta_length, ref.seed):
            raise self._damaged(ref, "header")
        payload = stored[header.payload_at : header.payload_at + header.payload_length]
        if zlib.crc32(payload) != header.payload_crc:
            raise self._damaged(ref, "payload")
        if (header.first, header.last) != (ref.first, ref.last):
            raise self._cut(ref)
        return Frame(ref.first, ref.last, ref.complete, ref.count, record[HEADER_BYTES:], payload)

    def _missing(self, segment: str, position: Position) -> TailraceError:
        """Why a segment is not there. Retention removes the oldest first, and never the newest."""
        names = self._storage.names()
        if not any(name > segment for name in names):
            return PreflightError(
                f"this machine does not see the journal at {self._storage}: it has no segment {segment}",
                position=str(position),
                fix=f"mount {self._storage} at the same path on every machine that runs executors, or keep the journal"
                " in an object store: source.journal.path: s3://BUCKET/PREFIX",
            )
        if any(name < segment for name in names):
            return UnavailableError(
                f"journal segment {segment} is void and was removed: the journal was cut back",
                position=str(position),
                fix="none needed: the batch is planned again, and the upstream sends again what was cut off",
            )
        return LostError(
            f"journal segment {segment} was removed while it was needed", position=str(position), fix=RESYNC
        )

    def _cut(self, ref: FrameRef) -> UnavailableError:
        return UnavailableError(
            f"journal segment {ref.segment} no longer holds the frame at byte {ref.offset}: it was cut back",
            position=str(ref.last),
            fix="plan the batch again: the upstream sends the changes again that were cut off",
        )

    def _damaged(self, ref: FrameRef, part: str) -> DamagedError:
        return DamagedError(
            f"journal segment {ref.segment} is damaged at byte {ref.offset}: the {part} does not match its checksum",
            position=str(ref.first),
            fix=AGAIN,
        )


def _neighbours(refs: list[FrameRef]) -> Iterator[list[FrameRef]]:
    """The frames of one segment in runs that are worth one request each."""
    run: list[FrameRef] = []
    for ref in refs:
        is_far = run and ref.offset - (run[-1].offset + run[-1].length) > 1 << 18
        if run and (is_far or ref.offset + ref.length - run[0].offset > _RANGE_BYTES):
            yield run
            run = []
        run.append(ref)
    if run:
        yield run
