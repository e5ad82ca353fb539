"""Destinations that a pipeline's file no longer has: nothing is kept for them, and if they come back they begin again.

A file with one destination and one with several have different states: each is a former one of the other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tailrace.config.fan_out import place_of
from tailrace.errors import ConfigError
from tailrace.source.source import Source, destination_of
from tailrace.state import StoreAddress
from tailrace.system.atomic_file import remove


def forget_former(source: Source, address: StoreAddress, readers: Collection[str]) -> None:
    """Forget the state and the cursor of every reader of the pipeline but these. A repeat changes nothing.

    `address` is any of the pipeline's. The caller holds the lock of the pipeline's own folder. Raises OwnedError where
    a former one still runs on another machine.
    """
    for reader in source.readers():
        context = replace(source.context, reader=reader)
        if not context.is_pipeline or reader in readers:
            continue
        member = destination_of(reader)
        place = (context.name, context.state_dir)
        forget_state(address.bind(*(place if member is None else place_of(*place, member))))
        # The cursor last: after a crash it says that this is to be done.
        replace(source, context=context).forget()


def forget_state(address: StoreAddress) -> None:
    """Drop what a pipeline remembers, if it ever ran."""
    try:
        address.open_reading().close()
    except ConfigError:
        return
    with address.open() as store:
        store.claim_run(takes_over=not store.shared)
        remove(address.state_dir / "checkpoint")
        store.forget_pipeline()
