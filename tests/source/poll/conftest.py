"""A polled server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.option.table import TableOptions
from tailrace.source.poll.source import PollSource
from tests.support.database import PostgresDatabase
from tests.support.source_making import make_polled


@pytest.fixture
def make_source(database: PostgresDatabase, tmp_path: Path) -> Callable[..., PollSource]:
    def make(deletes: dict[str, Any] | None = None, **options: Any) -> PollSource:
        defaults = {"updated_at": options.pop("updated_at", "updated_at"), "deletes": deletes}
        tables = TableOptions.model_validate({"include": ["public.*"], "defaults": defaults})
        fast = {"page_rows": 3, "chunk_rows": 10, "interval": 0.001, "idle_interval": 0.001}
        return make_polled(options.pop("dsn", database.dsn), tmp_path, tables, **{**fast, **options})

    return make
