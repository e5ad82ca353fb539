"""What holds now, of that which people want to be told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.alert.option import AlertName, AlertOptions
from tailrace.errors import TailraceError
from tailrace.model.quantity_text import format_bytes, format_seconds
from tailrace.state.status import PipelineStatus

SHOWN_TABLES = 20
"""How many tables in error an alert describes; it counts the others."""


@dataclass(frozen=True)
class Condition:
    """Something that holds: a sentence about it, the tables that it concerns, and the fix where there is one."""

    text: str
    tables: tuple[str, ...] = ()
    fix: str | None = None


def conditions(options: AlertOptions, status: PipelineStatus) -> dict[AlertName, Condition]:
    """What holds while the pipeline runs, by name."""
    found = {
        "lag": _lag(options, status),
        "lag_bytes": _lag_bytes(options, status),
        "slot": _slot(options, status),
        "errored": _errored(options, status),
        "unavailable": _unavailable(options, status),
    }
    return {name: each for name, each in found.items() if each is not None}  # type: ignore[misc]


def stopped(error: BaseException) -> Condition:
    """A run that this error ended."""
    if isinstance(error, TailraceError):
        return Condition(f"the pipeline stopped: {error.located}", fix=error.fix)
    # Its text may hold anything, even a password.
    return Condition(f"the pipeline stopped: unexpected {type(error).__name__}")


def _lag(options: AlertOptions, status: PipelineStatus) -> Condition | None:
    if options.lag is None:
        return None
    limit = options.lag.above
    if status.lag_seconds is not None and status.lag_seconds > limit:
        behind = f"the destination is {format_seconds(status.lag_seconds)} behind the source"
        return Condition(f"{behind}; the limit is {format_seconds(limit)}")
    if status.delivery_lag is not None and status.delivery_lag > limit:
        waits = f"an event has waited for its delivery for {format_seconds(status.delivery_lag)}"
        return Condition(f"{waits}; the limit is {format_seconds(limit)}")
    return None


def _lag_bytes(options: AlertOptions, status: PipelineStatus) -> Condition | None:
    if options.lag_bytes is None or status.lag_bytes is None or status.lag_bytes <= options.lag_bytes.above:
        return None
    limit = format_bytes(options.lag_bytes.above)
    return Condition(f"{format_bytes(status.lag_bytes)} of the log are not applied; the limit is {limit}")


def _slot(options: AlertOptions, status: PipelineStatus) -> Condition | None:
    slot = status.slot
    if options.slot is None or slot is None:
        return None
    fix = "make the pipeline read on, or raise max_slot_wal_keep_size on the server"
    if slot.status in ("unreserved", "lost"):
        return Condition(f"the server says that the replication slot is {slot.status}", fix=fix)
    if slot.full_in is not None and slot.full_in < options.slot.full_within:
        return Condition(f"the replication slot is full in {format_seconds(slot.full_in)}", fix=fix)
    return None


def _errored(options: AlertOptions, status: PipelineStatus) -> Condition | None:
    tables = status.errored
    if options.errored is None or not tables:
        return None
    shown = [f"{table.name}: {table.reason or 'no reason was recorded'}" for table in tables[:SHOWN_TABLES]]
    more = [f"and {len(tables) - SHOWN_TABLES} more"] if len(tables) > SHOWN_TABLES else []
    count = "a table is in error" if len(tables) == 1 else f"{len(tables)} tables are in error"
    names = tuple(table.name for table in tables)
    return Condition(f"{count}: {'; '.join([*shown, *more])}", names, tables[0].fix if len(tables) == 1 else None)


def _unavailable(options: AlertOptions, status: PipelineStatus) -> Condition | None:
    if options.unavailable is None:
        return None
    if status.source is not None and status.source.error:
        return Condition(f"the pipeline waits: {status.source.error}", fix=status.source.fix)
    if status.delivery is not None and status.delivery.error:
        return Condition(f"events cannot be delivered: {status.delivery.error}", fix=status.delivery.fix)
    return None
