"""`tailrace run` and `tailrace receive`: services that run until a signal."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from tailrace.cli.error import INTERRUPTED
from tailrace.cli.inspect import make_console
from tailrace.cli.log import logged_as_json
from tailrace.cli.progress_view import LineView, LiveView, ProgressView
from tailrace.cli.signal import until_signal
from tailrace.cli.text import say
from tailrace.errors import ConfigError, PipelinePlace, TableError, name_file
from tailrace.state import TableState

if TYPE_CHECKING:
    from tailrace.config.pipeline import PipelineConfig
    from tailrace.state.status import PipelineStatus
    from tailrace.stream.fan_out import FanOut
    from tailrace.stream.pipeline import Pipeline


def run_pipeline(
    configs: Sequence[PipelineConfig],
    file: Path,
    *,
    once: bool,
    plain: bool,
    as_json: bool,
    seconds: float | None = None,
    view: ProgressView | None = None,
) -> None:
    """Run the destinations of a file until they are done (`once`), a signal comes, or every table has been ready for
    `seconds`.

    A `view` of one's own is used instead of the usual one. Of a destination that prints, only its own lines are on
    standard output.
    Raises TableError if a run with `once` left a table in error, KeyboardInterrupt if a signal ended it, and SystemExit
    when its output cannot be written: at a batch boundary, as after a signal.
    """
    from tailrace.config.registry import open_destination
    from tailrace.destination.capability import Printing

    printing = {config.name: opened for config in configs if isinstance(opened := open_destination(config), Printing)}
    prints = bool(printing)
    if as_json:
        configs = [
            config.model_copy(update={"destination": printing[config.name].as_json()})
            if config.name in printing
            else config
            for config in configs
        ]
    last: dict[str, PipelineStatus] = {}
    unread: list[SystemExit] = []
    pipeline = _open(configs)

    def write(line: str) -> None:
        try:
            say(line, err=prints)
        except SystemExit as ending:
            unread.append(ending)
            pipeline.drain()

    with (
        logged_as_json(configs[0].source_context.name, write) if as_json else nullcontext(),
        view or choose_view(file, write, plain=plain or prints, as_json=as_json) as shown,
        drained_by_signals(pipeline.drain, shown.note) as signalled,
        Deadline(seconds, pipeline.drain) as deadline,
    ):

        def show(status: PipelineStatus) -> None:
            last[status.pipeline] = status
            try:
                shown.show(status)
            except SystemExit as ending:
                unread.append(ending)
                pipeline.drain()
            tables = [table for each in last.values() for table in each.tables or [None]]
            if len(last) == len(configs) and all(table and table.state is TableState.READY for table in tables):
                deadline.begin()

        pipeline.run(once=once, on_progress=show)
    if unread:
        raise unread[0]
    if once and signalled.is_set():
        raise KeyboardInterrupt
    errored = [(name, table) for name, status in last.items() for table in status.errored]
    if once and errored:
        name, first = errored[0]
        more = f" (and {len(errored) - 1} more tables are in error)" if len(errored) > 1 else ""
        fix = name_file(first.fix, PipelinePlace.of(file, name))
        raise TableError(f"{first.reason or 'the table is in error'}{more}", table=first.name, fix=fix)


def _open(configs: Sequence[PipelineConfig]) -> Pipeline | FanOut:
    """What runs them: a pipeline, or several destinations together."""
    if configs[0].member is None:
        from tailrace.stream.pipeline import Pipeline

        return Pipeline.from_config(configs[0])
    from tailrace.stream.fan_out import FanOut

    return FanOut.from_configs(configs)


def choose_view(file: Path, write: Callable[[str], None], *, plain: bool, as_json: bool) -> ProgressView:
    """The live view on a terminal; lines elsewhere, or with `plain` or `as_json`."""
    if as_json or plain or not sys.stdout.isatty():
        return LineView(write, file, as_json=as_json)
    return LiveView(make_console(), file)


class Deadline:
    """Drains so many seconds after the first call of `begin`, unless the block has ended by then. None: never."""

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
def drained_by_signals(drain: Callable[[], None], note: Callable[[str], None]) -> Iterator[threading.Event]:
    """Within the block the first SIGINT or SIGTERM drains, the second raises KeyboardInterrupt, the third exits.

    `note` gets what to tell people. The event says whether there was one.
    """
    count = 0
    signalled = threading.Event()

    def finish() -> None:
        drain()
        note("finishing the current batch; a second signal stops at once")

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count == 1:
            signalled.set()
            # In a thread: the interrupted code may hold a lock that draining needs, or be drawing.
            threading.Thread(target=finish, name="drain", daemon=True).start()
        elif count == 2:
            # The call to Spark that this interrupts fails, and so does what Spark was calling here.
            logging.getLogger("py4j").setLevel(logging.CRITICAL)
            raise KeyboardInterrupt
        else:
            os._exit(INTERRUPTED)

    def repeat(swallowed: sys.UnraisableHookArgs) -> None:
        nonlocal count
        if not isinstance(swallowed.exc_value, KeyboardInterrupt):
            report(swallowed)
            return
        # It was raised in a finalizer, which cannot pass it on; each object of the JVM has one, which talks to it.
        count = 1
        threading.Timer(0.05, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    report, sys.unraisablehook = sys.unraisablehook, repeat
    try:
        yield signalled
    except Exception:
        # The second one may interrupt a call to Spark; the cleanup after it then fails in other ways.
        if count > 1:
            raise KeyboardInterrupt from None
        raise
    finally:
        sys.unraisablehook = report
        for number, handler in before.items():
            signal.signal(number, handler)


# The command `tailrace receive`: the receiving half of a pipeline, without Spark.


def receive(file: Path, *, as_json: bool) -> None:
    """Receive what is pushed to the source of a pipeline's file, in the foreground, until SIGINT or SIGTERM.

    A pipeline that runs at the same time leaves the receiving to this process, and takes it over when this one ends.
    Prints its status whenever that changes: as lines, or as lines of JSON. Raises ConfigError for a source that
    nothing is pushed to, OwnedError when the pipeline itself is receiving, and what `Receivable.receive_until` raises.
    """
    from tailrace.config.pipeline import load_all
    from tailrace.config.registry import open_source
    from tailrace.source.capability import Receivable

    config = load_all(file)[0]
    source = open_source(config)
    if not isinstance(source, Receivable):
        raise ConfigError(
            f"nothing is pushed to a source of type {config.source.type}",
            fix="`tailrace run FILE` reads it; only `type: rqlite` has a receiver of its own",
        )
    with until_signal() as stop:
        source.receive_until(stop.is_set, _Report(as_json=as_json).show)


class _Report:
    """Prints a status when it differs from the last."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._last = ""

    def show(self, status: dict[str, Any]) -> None:
        text = self._describe(status)
        if text != self._last:
            self._last = text
            line = json.dumps(status, ensure_ascii=False) if self._as_json else text
            say(line)

    @staticmethod
    def _describe(status: dict[str, Any]) -> str:
        parts = [f"{'receiving' if status['receiving'] else 'not receiving'} on {status['listen']}"]
        for service, one in status["services"].items():
            facts = [f"{one['received']} events", f"{one['duplicates']} repeated", f"at {one['mark']}"]
            facts += one["warnings"]
            facts += [f"STOPPED: {one['error']['message']}; fix: {one['error']['fix']}"] if one["error"] else []
            parts.append(f"{service}: {', '.join(facts)}")
        return "; ".join(parts)
