"""A pipeline in the foreground: its view and its signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Self

import typer

from tailrace.cli.inspect import make_console
from tailrace.cli.report import INTERRUPTED
from tailrace.errors import TableError
from tailrace.state import TableState
from tailrace.view import LineView, LiveView, ProgressView

if TYPE_CHECKING:
    from tailrace.config import PipelineConfig
    from tailrace.status import PipelineStatus


def run_pipeline(
    config: PipelineConfig, *, once: bool, plain: bool, as_json: bool, seconds: float | None = None
) -> None:
    """Run until it is done (`once`), told to end, or every table has been ready for `seconds`.

    Raises TableError if a run with `once` left a table in error, KeyboardInterrupt if a signal ended it, and SystemExit
    when nobody takes what it says: at a batch boundary, as after a signal.
    """
    from tailrace.stream.pipeline import Pipeline

    last: list[PipelineStatus] = []
    unread: list[SystemExit] = []
    pipeline = Pipeline.from_config(config)
    with (
        choose_view(plain=plain, as_json=as_json) as view,
        drained_by_signals(pipeline.drain) as signalled,
        Deadline(seconds, pipeline.drain) as deadline,
    ):

        def show(status: PipelineStatus) -> None:
            last[:] = [status]
            try:
                view.show(status)
            except SystemExit as ending:
                unread.append(ending)
                pipeline.drain()
            if status.tables and all(table.state is TableState.READY for table in status.tables):
                deadline.begin()

        pipeline.run(once=once, on_progress=show)
    if unread:
        raise unread[0]
    if once and signalled.is_set():
        raise KeyboardInterrupt
    if once and last and (errored := last[0].errored):
        first = errored[0]
        more = f" (and {len(errored) - 1} more tables are in error)" if len(errored) > 1 else ""
        raise TableError(f"{first.reason or 'the table is in error'}{more}", table=first.name, fix=first.fix)


def choose_view(*, plain: bool, as_json: bool) -> ProgressView:
    """The live view on a terminal, lines elsewhere or when they are asked for."""
    if as_json or plain or not sys.stdout.isatty():
        return LineView(lambda line: print(line, flush=True), as_json=as_json)
    return LiveView(make_console())


class Deadline:
    """Drains some seconds after `begin` was first called, unless the block has ended by then. None is for ever."""

    def __init__(self, seconds: float | None, drain: Callable[[], None]) -> None:
        self._timer = None if seconds is None else threading.Timer(seconds, drain)
        self._begun = False

    def begin(self) -> None:
        if self._timer and not self._begun:
            self._begun = True
            self._timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()


@contextmanager
def drained_by_signals(drain: Callable[[], None]) -> Iterator[threading.Event]:
    """Within the block the first SIGINT or SIGTERM drains, the second raises KeyboardInterrupt, the third exits.

    The event says whether there was one.
    """
    count = 0
    signalled = threading.Event()

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count == 1:
            signalled.set()
            typer.echo("finishing the batch in hand; once more stops at once", err=True)
            # Not here: the interrupted code may hold a lock that draining needs.
            threading.Thread(target=drain, name="drain", daemon=True).start()
        elif count == 2:
            raise KeyboardInterrupt
        else:
            os._exit(INTERRUPTED)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signalled
    except Exception:
        # The second one may come within an answer of Spark; what cleans up behind it then fails in other ways.
        if count > 1:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
