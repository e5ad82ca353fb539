"""The keys of polled tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.config.pipeline import PipelineConfig, from_dict, load
from tailrace.errors import ConfigError
from tailrace.source.poll.option import PollOptions

POLL = {"type": "poll", "dsn": "sqlite:///app.db"}


def configure(source: dict[str, Any], tables: dict[str, Any], folder: Path = Path()) -> PipelineConfig:
    sections = {"name": "p", "source": source, "tables": tables, "destination": {"type": "delta", "path": "lake"}}
    return from_dict(sections, folder=folder)


def test_the_example_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DSN", "postgresql://reader:secret@localhost/shop")
    config = load(Path(__file__).parents[3] / "examples" / "poll.yaml")
    items = config.tables.settings_of("public.items")
    assert items.updated_at == "version"
    assert items.created_at == "created_at"
    assert items.deletes is not None
    assert items.deletes.full_diff is not None
    assert items.deletes.full_diff.every_cycles == 10
    assert "secret" not in repr(config)


def test_a_relative_path_starts_from_the_folder_of_the_pipeline_file(tmp_path: Path) -> None:
    source = configure(POLL, {}, tmp_path).source
    assert isinstance(source, PollOptions)
    assert source.dsn.reveal() == f"sqlite:///{tmp_path}/app.db"


def test_deletes_can_be_disabled_for_one_table() -> None:
    tables = {"defaults": {"deletes": {"soft": "gone"}}, "settings": {"main.t": {"deletes": "disabled"}}}
    assert configure(POLL, tables).tables.settings_of("main.t").deletes is None


@pytest.mark.parametrize("key", ["updated_at", "created_at"])
def test_a_key_that_the_source_would_pass_over_is_refused(key: str) -> None:
    source = {"type": "postgres", "dsn": "postgresql://x/y"}
    with pytest.raises(ConfigError, match=f"tables.settings.*{key} is not for a source of type postgres"):
        configure(source, {"settings": {"public.t": {key: "at"}}})


@pytest.mark.parametrize(
    ("source", "tables", "message"),
    [
        ({"dsn": "app.db"}, {}, "must begin with a scheme"),
        ({"time_zone": "Mars"}, {}, "is not a time zone"),
        ({"interval": 0}, {}, "interval"),
        ({}, {"defaults": {"deletes": {"full_diff": {}}}}, "needs every_cycles or every"),
        ({}, {"defaults": {"deletes": {"hard": True}}}, "is not a key here"),
    ],
)
def test_options_that_make_no_sense_are_refused(source: dict[str, Any], tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure({**POLL, **source}, tables)
