"""Open a journal: for its one writer, for any of its readers, or to remove it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tailrace.errors import UnavailableError
from tailrace.journal.reader import JournalReader
from tailrace.journal.recovery import recover
from tailrace.journal.storage import JournalPlace, JournalStorage, open_storage
from tailrace.journal.writer import JournalWriter
from tailrace.model.change import START, Position

SEGMENT_BYTES = 64 << 20
MAX_BYTES = 16 << 30


class Journal:
    """The durable log between a receiver and its readers: segments in a folder, or pieces in an object store."""

    @classmethod
    def open_writer(
        cls,
        path: JournalPlace,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        max_bytes: int = MAX_BYTES,
        origin: Position = START,
    ) -> JournalWriter:
        """Become the journal's only writer, and recover the journal after a crash or a disk failure.

        The torn end of an append that never returned is ignored, and so is the beginning of a transaction whose end
        never arrived. What was durable and is now lost is listed in the writer's `damage`, with a copy of the segment
        under `quarantine/`. A new journal starts at `origin`: readers that ask for earlier positions get LostError.

        Raises OwnedError while another process writes, UnavailableError when the disk does not answer.
        """
        storage = open_storage(path)
        try:
            sink = storage.acquire()
        except OSError as error:
            raise _cannot_open(storage, error) from error
        try:
            found = recover(storage, origin)
            # A full journal needs several segments, because retention removes whole segments only.
            segment_bytes = min(segment_bytes, max(max_bytes // 4, 1))
            return JournalWriter(storage, sink, found, segment_bytes=segment_bytes, max_bytes=max_bytes)
        except BaseException as error:
            sink.close()
            if isinstance(error, OSError):
                raise _cannot_open(storage, error) from error
            raise

    @classmethod
    @contextmanager
    def removing(cls, path: JournalPlace) -> Iterator[None]:
        """Hold the writer's lock during the block, then remove the journal. If the block fails, the journal stays.

        A missing journal is no error. After an interruption a repeat removes the rest. Raises OwnedError while another
        process writes, UnavailableError when the disk does not answer or something cannot be removed.
        """
        storage = open_storage(path)
        try:
            removing = storage.removing()
            removing.__enter__()
        except OSError as error:
            raise _cannot_open(storage, error) from error
        with ExitStack() as stack:
            stack.push(removing)
            yield

    @staticmethod
    def is_written(path: JournalPlace) -> bool:
        """Whether a process is writing the journal now."""
        return open_storage(path).is_written()

    @classmethod
    def open_reader(cls, path: JournalPlace) -> JournalReader:
        """A reader for this process. There may be any number of them, even before the journal exists."""
        return JournalReader(path)


def _cannot_open(storage: JournalStorage, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"journal {storage} cannot be opened: {error.strerror}",
        fix="check that its disk is mounted, writable and not full",
    )
