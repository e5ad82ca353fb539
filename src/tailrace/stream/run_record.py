"""Keeps why a run ended, for `tailrace status`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tailrace.errors import TailraceError
from tailrace.state import RunRecord, StateStore, StoreAddress
from tailrace.state.record import now
from tailrace.system import trace


@contextmanager
def recorded(store: StateStore) -> Iterator[None]:
    """Within the block the pipeline runs; an error that ends it is kept with the run."""
    run = RunRecord(now())
    store.put_run(run)
    try:
        yield
    except Exception as error:
        _put(store, run.end(_described(error, store)))
        raise
    except BaseException:
        _put(store, run.end(None))
        raise
    _put(store, run.end(None))


def record_refusal(address: StoreAddress, error: TailraceError) -> None:
    """Keep why a run did not begin, unless the pipeline has never run, or runs elsewhere."""
    with suppress(TailraceError):
        with address.open_reading() as reader:
            if reader.runner() is not None:
                return
        with address.open() as store:
            store.put_run(RunRecord(now()).end(error))


def record_first_refusal(address: StoreAddress, error: TailraceError) -> None:
    """The same for one of several destinations, of which people ask while the others run, even if it has never run."""
    with suppress(TailraceError), address.open() as store:
        if store.last_run() is None:
            store.put_run(RunRecord(now()).end(error))


def _put(store: StateStore, run: RunRecord) -> None:
    # The store may be what failed, or another runner may own the pipeline by now.
    with suppress(TailraceError):
        store.put_run(run)


def _described(error: Exception, store: StateStore) -> TailraceError:
    if isinstance(error, TailraceError):
        return error
    # Leave out the exception's text. It may hold anything, even a password.
    return TailraceError(f"unexpected {type(error).__name__}", fix=f"report it with {store.state_dir / trace.FILE}")
