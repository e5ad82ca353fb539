"""Where the configuration says the state is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailrace import Pipeline
from tailrace.config.pipeline import PipelineConfig, from_dict
from tailrace.errors import ConfigError
from tailrace.state import SqliteStore
from tailrace.state.postgres import PostgresStore

CANARY = "c4nary-Pa55"
DSN = f"postgresql://me:{CANARY}@db.example/state"


def configured(folder: Path, **store: Any) -> PipelineConfig:
    values = {"name": "shop", "source": {"type": "postgres", "dsn": "host=a"}}
    values |= {"destination": {"type": "delta", "path": "lake"}} | ({"store": store} if store else {})
    return from_dict(values, folder=folder, environment={"STATE_DSN": DSN})


def test_the_state_is_a_file_in_its_folder_unless_configured_otherwise(tmp_path: Path) -> None:
    expected = SqliteStore("shop", tmp_path / ".tailrace/shop")
    assert configured(tmp_path).store_address == expected
    assert configured(tmp_path, type="sqlite").store_address == expected


def test_a_database_is_named_by_its_dsn_and_a_schema(tmp_path: Path) -> None:
    config = configured(tmp_path, type="postgres", dsn="${STATE_DSN}", schema="etl")
    address = config.store_address
    assert address == PostgresStore("shop", tmp_path / ".tailrace/shop", DSN, "etl")
    assert configured(tmp_path, type="postgres", dsn=DSN).store_address == replace(address, schema="tailrace")
    assert CANARY not in f"{config!r} {address!r} {config.model_dump_json()}"


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ({"type": "postgres"}, "store.dsn is missing"),
        ({"type": "sqlite", "dsn": DSN}, "store.dsn is not a key here"),
        ({"type": "postgres", "dsn": DSN, "scheme": "x"}, "did you mean schema"),
        ({"type": "redis"}, "store.type names no store type that is installed; it can be postgres, sqlite"),
    ],
)
def test_an_impossible_store_is_refused(tmp_path: Path, store: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, **store)
    assert said in str(refused.value)
    assert CANARY not in str(refused.value)


def test_a_database_without_a_dsn_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a dsn"):
        PostgresStore("shop", tmp_path).open()


STRANGER = """
from dataclasses import dataclass
from typing import ClassVar, Literal
from tailrace import Pipeline
from tailrace.config.pipeline import StateStoreOptions
from tailrace.state import StateDatabase, StoreAddress

class FarAwayOptions(StateStoreOptions):
    type: Literal["far_away"]
    region: str = "here"

@dataclass(frozen=True)
class FarAwayStore(StoreAddress):
    Options: ClassVar[type[StateStoreOptions]] = FarAwayOptions
    region: str = "here"

    def connect(self, *, writes: bool) -> StateDatabase:
        raise NotImplementedError
"""


def test_another_package_provides_a_type_of_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far_away_store.py").write_text(STRANGER)
    info = tmp_path / "far_away_store-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far-away-store\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tailrace.stores]\nfar_away = far_away_store:FarAwayStore\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = configured(tmp_path, type="far_away", region="north", lease="5s")
    address = config.store_address
    assert (type(address).__name__, address.name, vars(address)["region"]) == ("FarAwayStore", "shop", "north")
    assert config.store.lease == 5
    with pytest.raises(ConfigError, match="did you mean region"):
        configured(tmp_path, type="far_away", regoin="north")


def test_a_pipeline_takes_a_store_and_gives_it_its_name_and_folder(tmp_path: Path) -> None:
    options = {"source": {"type": "postgres", "dsn": "host=a"}, "destination": {"type": "delta", "path": "lake"}}
    state = str(tmp_path / "state")
    pipeline = Pipeline(name="shop", **options, state=state, store=PostgresStore(dsn=DSN, schema="etl"))
    assert pipeline.store == PostgresStore("shop", tmp_path / "state", DSN, "etl")
    described = Pipeline(name="shop", **options, state=state, store={"type": "postgres", "dsn": DSN, "schema": "etl"})
    assert described.store == pipeline.store
