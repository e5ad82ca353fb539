"""A polled server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.option.table import TableOptions
from tailrace.source.poll.source import PollSource
from tests.support.database import PostgresDatabase


@pytest.fixture
def make_source(database: PostgresDatabase, tmp_path: Path) -> Callable[..., PollSource]:
    def make(deletes: dict[str, Any] | None = None, **options: Any) -> PollSource:
        defaults = {"updated_at": options.pop("updated_at", "updated_at"), "deletes": deletes}
        tables = TableOptions.model_validate({"include": ["public.*"], "defaults": defaults})
        fast = {"page_rows": 3, "chunk_rows": 10, "interval_seconds": 0.001, "idle_interval_seconds": 0.001}
        return PollSource("t", options.pop("dsn", database.dsn), str(tmp_path / "known"), tables, **{**fast, **options})

    return make
