"""The command `tailrace receive`: the receiving half of a pipeline, without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from tailrace.cli.signal import until_signal
from tailrace.errors import ConfigError


def receive(file: Path, *, as_json: bool) -> None:
    """Take in what is pushed to the source of a pipeline's file, in the foreground, until SIGINT or SIGTERM.

    A pipeline that runs at the same time leaves the receiving to this process, and takes it over when this one ends.
    Says what it does whenever that changes: as lines, or as lines of JSON. Raises ConfigError for a source that
    nothing is pushed to, OwnedError when the pipeline itself is receiving, and what `Receiver.run` raises.
    """
    from tailrace.config import load
    from tailrace.source.rqlite.option import RqliteOptions

    source = load(file).source
    if not isinstance(source, RqliteOptions):
        raise ConfigError(
            f"nothing is pushed to a source of type {source.type}",
            fix="`tailrace run FILE` reads it; only `type: rqlite` has a receiver of its own",
        )
    # After the check: who has no use for it need not have its packages.
    from tailrace.source.rqlite.receiver import RqliteReceiver, RqliteReceiverOptions

    with until_signal() as stop:
        RqliteReceiver(RqliteReceiverOptions.of(source), stop.is_set).run(_Report(as_json=as_json).show)


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
            typer.echo(line)

    @staticmethod
    def _describe(status: dict[str, Any]) -> str:
        parts = [f"{'receiving' if status['receiving'] else 'not receiving'} on {status['listen']}"]
        for service, one in status["services"].items():
            told = [f"{one['received']} events", f"{one['duplicates']} repeated", f"at {one['mark']}"]
            told += one["warnings"]
            told += [f"STOPPED: {one['error']['message']}; fix: {one['error']['fix']}"] if one["error"] else []
            parts.append(f"{service}: {', '.join(told)}")
        return "; ".join(parts)
