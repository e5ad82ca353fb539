"""Pipelines without Spark from a scripted node, or from what a test posts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3

from tailrace.errors import TableError
from tailrace.source.follower import Limit
from tailrace.source.rqlite.source import RqliteSource
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.rqlite_node import RqliteNode
from tests.support.source_making import make_rqlite

LIMIT = Limit(100_000, 100_000_000)
_held: list[socket.socket] = []


def free_port() -> int:
    """A port to be listened on by its number. It stays bound, so no one else is given it meanwhile."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])


def make_source(folder: Path, port: int, *, max_bytes: int = 1_000_000_000, **options: Any) -> RqliteSource:
    journal = {"segment_bytes": 50_000, "max_bytes": max_bytes}
    return make_rqlite(folder, f"127.0.0.1:{port}", journal=journal, **options)


@contextmanager
def node_and_replay(
    folder: Path, *sql: Any, node: dict[str, Any] = {}, **options: Any
) -> Iterator[tuple[RqliteNode, SourceReplay]]:
    """A node of service `svc` that has run these statements, and a pipeline that has copied everything there is.

    `api=None` among the options: the pipeline does not know the node's API, and has seen nothing yet.
    """
    port = free_port()
    with RqliteNode(f"http://127.0.0.1:{port}/cdc", service="svc", **node) as upstream:
        for statement in sql:
            (result,) = upstream.execute(statement)
            assert "error" not in result, result
        with SourceReplay(make_source(folder, port, **{"api": upstream.url, **options}), LIMIT) as replay:
            replay.catch_up()
            yield upstream, replay


def post(source: RqliteSource, *bodies: bytes) -> None:
    """What a node posts, one after the other; a receiver that has not begun yet is waited for."""
    url = f"http://{source.options.listen}{source.options.path}"
    with urllib3.PoolManager(retries=False, timeout=10) as pool:

        def is_up() -> bool:
            try:
                return pool.request("GET", f"http://{source.options.listen}/healthz").status == 200
            except urllib3.exceptions.HTTPError:
                return False

        wait_until(is_up)
        for body in bodies:
            assert pool.request("POST", url, body=body, headers={"Content-Type": "application/json"}).status == 200


def rows(replay: SourceReplay, table: str) -> list[dict[str, Any]]:
    return [row for _, row in sorted(replay.tables[table].rows.items())]


def changes(replay: SourceReplay) -> list[dict[str, Any]]:
    """The changes of the next batch with any, which is left uncommitted."""
    wait_until(replay.plan)
    assert replay.offset is not None
    assert replay.planned is not None
    splits = replay.follower.plan(replay.offset, replay.planned)
    found = [row for split in splits for part in replay.source.read(split) for row in part.batch.to_pylist()]
    return sorted(found, key=lambda row: (row["commit"], row["ordinal"]))


def fails(replay: SourceReplay) -> TableError:
    with pytest.raises(TableError) as caught:
        changes(replay)
    return caught.value
