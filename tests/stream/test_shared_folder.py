"""On a cluster, what executors must see is named before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.config.pipeline import from_dict
from tailrace.config.registry import open_destination, open_source
from tailrace.stream.shared_folder import shared_folder_findings, shared_folders

POSTGRES = {"type": "postgres", "dsn": "postgresql://db/shop"}


@pytest.mark.parametrize(
    ("source", "destination", "named"),
    [
        (POSTGRES, {"type": "delta", "path": "./lake"}, ["destination.path", "source.journal.path"]),
        (POSTGRES | {"journal": {"path": "s3://b/j"}}, {"type": "delta", "path": "s3://b/lake"}, []),
        (
            POSTGRES | {"journal": {"path": "s3://b/j"}},
            {"type": "sqlite", "path": "./r.db"},
            ["destination.path (SQLite)"],
        ),
        ({"type": "sqlite", "path": "./app.db"}, {"type": "delta", "path": "s3://b/lake"}, ["source.path"]),
    ],
)
def test_a_path_that_executors_on_other_machines_must_see_is_named(
    tmp_path: Path, source: dict[str, Any], destination: dict[str, Any], named: list[str]
) -> None:
    config = from_dict({"name": "shop", "source": source, "destination": destination}, folder=tmp_path)
    folders = shared_folders(open_source(config), open_destination(config), tmp_path / "staged")
    assert shared_folder_findings(folders, "local[2]") == []
    found = shared_folder_findings(folders, "spark://head:7077")
    assert [finding.subject for finding in found] == named
    assert all(str(tmp_path) in finding.message for finding in found)
