"""Where the configuration says the state is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.config.pipeline import PipelineConfig, from_dict
from tailrace.errors import ConfigError
from tailrace.state import StoreAddress

CANARY = "c4nary-Pa55"
DSN = f"postgresql://me:{CANARY}@db.example/state"


def configured(folder: Path, **store: Any) -> PipelineConfig:
    values = {"name": "shop", "source": {"type": "postgres", "dsn": "host=a"}}
    values |= {"destination": {"type": "delta", "path": "lake"}} | ({"store": store} if store else {})
    return from_dict(values, folder=folder, environment={"STATE_DSN": DSN})


def test_the_state_is_a_file_in_its_folder_unless_told_otherwise(tmp_path: Path) -> None:
    expected = StoreAddress("shop", tmp_path / ".tailrace/shop")
    assert configured(tmp_path).store_address == expected
    assert configured(tmp_path, type="sqlite").store_address == expected


def test_a_database_is_named_by_its_dsn_and_a_schema(tmp_path: Path) -> None:
    config = configured(tmp_path, type="postgres", dsn="${STATE_DSN}", schema="etl")
    address = config.store_address
    assert (address.kind, address.dsn, address.schema) == ("postgres", DSN, "etl")
    assert configured(tmp_path, type="postgres", dsn=DSN).store_address.schema == "tailrace"
    assert CANARY not in f"{config!r} {address!r} {config.model_dump_json()}"


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ({"type": "postgres"}, "store of type postgres needs a dsn"),
        ({"type": "sqlite", "dsn": DSN}, "store of type sqlite has no dsn"),
        ({"type": "postgres", "dsn": DSN, "scheme": "x"}, "did you mean schema"),
        ({"type": "redis"}, "store.type should be 'sqlite' or 'postgres'"),
    ],
)
def test_a_store_that_cannot_be_is_refused(tmp_path: Path, store: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, **store)
    assert said in str(refused.value)
    assert CANARY not in str(refused.value)


def test_a_database_without_a_dsn_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a dsn"):
        StoreAddress("shop", tmp_path, "postgres").open()
