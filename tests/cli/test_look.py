"""What `tailrace run FILE --to console` runs has nothing in common with the pipeline but the tables it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.cli.look import looking
from tailrace.config.pipeline import PipelineConfig, from_dict
from tailrace.config.registry import open_destination, open_source, store_address
from tailrace.destination.capability import Printing
from tailrace.errors import ConfigError
from tests.support.invocation import invoke

STORE = {"type": "postgres", "dsn": "postgresql://shop@localhost/state"}


def pipeline(folder: Path, source: dict[str, Any], **more: Any) -> PipelineConfig:
    destination = {"type": "delta", "path": "./lake"}
    return from_dict({"name": "shop", "source": source, "destination": destination, **more}, folder=folder)


@pytest.mark.parametrize("kind", ["sqlite", "turso"])
def test_a_look_has_a_state_of_its_own_and_takes_nothing_out_of_the_file(tmp_path: Path, kind: str) -> None:
    spark = {"master": "spark://cluster:7077", "conf": {"spark.driver.memory": "2g"}}
    config = pipeline(
        tmp_path,
        {"type": kind, "path": "app.db", "purge": "0s"},
        tables={"include": ["main.items"]},
        store=STORE,
        spark=spark,
        alerts={"webhook": {"url": "https://hook.example/in"}},
    )
    with looking(config) as look:
        state = Path(look.state)
        assert state.is_dir()
        assert not state.is_relative_to(tmp_path)
        assert state.stat().st_mode & 0o077 == 0
        source, destination = open_source(look), open_destination(look)
        assert source.context.state_dir == state
        assert source.options.model_dump() == config.source.model_dump() | {"purge": None}
        assert isinstance(destination, Printing)
        assert all(folder.is_relative_to(state) for folder in destination.shared_folders().values())
        assert type(store_address(look)).__name__ == "SqliteStore"
        assert config.alerts is not None
        assert (look.tables, look.alerts) == (config.tables, None)
        assert (look.spark.master, look.spark.conf) == ("local[2]", config.spark.conf)
    assert not state.exists()


def test_a_database_that_is_only_queried_is_looked_at_as_it_is(tmp_path: Path) -> None:
    config = pipeline(tmp_path, {"type": "poll", "dsn": "sqlite:///app.db"})
    with looking(config) as look:
        assert look.source == config.source
        assert Path(look.state) != Path(config.state)


OTHERS = [
    {"type": "postgres", "dsn": "postgresql://shop@localhost/shop"},
    {"type": "rqlite", "listen": "127.0.0.1:0"},
    {"type": "slatedb", "store": {"type": "local", "path": "."}, "path": "db"},
]


@pytest.mark.parametrize("source", OTHERS, ids=lambda source: source["type"])
def test_a_source_that_would_keep_something_for_a_killed_look_is_refused(
    tmp_path: Path, source: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"type {source['type']} cannot be looked at") as refused:
        looking(pipeline(tmp_path, source)).__enter__()
    assert "destination: {type: console}" in (refused.value.fix or "")


@pytest.mark.parametrize("words", ["--to delta", "--to console --once", "--to console --dashboard"])
def test_what_a_look_cannot_do_is_refused_before_anything_runs(tmp_path: Path, words: str) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text("name: shop\nsource: {type: sqlite, path: app.db}\ndestination: {type: delta, path: lake}\n")
    done = invoke("run", file, *words.split())
    assert done.exit_code == 2
    assert "--to" in done.output
    assert [each.name for each in tmp_path.iterdir()] == ["shop.yaml"]
