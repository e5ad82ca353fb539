"""Why a run ended, as `tailrace status` shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.errors import PreflightError, TailraceError
from tailrace.state import RunRecord, SqliteStore
from tailrace.stream.run_record import record_refusal, recorded
from tests.support.invocation import invoke


@pytest.fixture
def address(tmp_path: Path) -> SqliteStore:
    return SqliteStore("shop", tmp_path / "state")


def last(address: SqliteStore) -> RunRecord:
    with address.open_reading() as store:
        run = store.last_run()
    assert run is not None
    return run


def test_the_error_that_ends_a_run_is_kept(address: SqliteStore) -> None:
    with address.open() as store:
        with recorded(store):
            assert last(address).ended_at is None
        with pytest.raises(PreflightError), recorded(store):
            raise PreflightError("the publication is gone", fix="CREATE PUBLICATION …;")
        ended = last(address)
        assert (ended.kind, ended.message, ended.fix) == (
            "PreflightError",
            "the publication is gone",
            "CREATE PUBLICATION …;",
        )
        with recorded(store):
            pass
    assert last(address).message is None
    assert last(address).ended_at is not None


def test_the_text_of_an_unexpected_error_is_not_kept(address: SqliteStore) -> None:
    with address.open() as store, pytest.raises(ValueError, match="hunter2"), recorded(store):
        raise ValueError("hunter2")
    assert last(address).message == "unexpected ValueError"


def test_a_refused_start_is_kept_only_for_a_pipeline_that_ran(address: SqliteStore) -> None:
    refusal = PreflightError("the role lacks a right")
    record_refusal(address, refusal)
    assert not address.state_dir.exists()
    with address.open():
        pass
    record_refusal(address, refusal)
    assert last(address).message == "the role lacks a right"


@pytest.mark.parametrize("end", ["by an error", "by itself", "by a kill"])
def test_the_status_of_a_pipeline_that_does_not_run_says_how_it_ended(tmp_path: Path, end: str) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(
        "name: shop\nsource: {type: sqlite, path: a.db}\ndestination: {type: sqlite, path: b.db}\nstate: ./state\n"
    )
    with SqliteStore("shop", tmp_path / "state").open() as store:
        run = RunRecord.from_dict({**_EMPTY, "begun_at": "2026-11-18T10:00:00+00:00"})
        error = TailraceError("the slot is gone", fix="tailrace reset FILE") if end == "by an error" else None
        store.put_run(run if end == "by a kill" else run.end(error))
    said = invoke("status", file).output
    assert {
        "by an error": "the slot is gone" in said and f"fix: tailrace reset {file}" in said,
        "by itself": "the last run ended at" in said,
        "by a kill": "did not end by itself" in said,
    }[end], said
    values = json.loads(invoke("status", file, "--json").output)["last_run"]
    assert (values["message"], values["ended_at"] is None) == (error and error.message, end == "by a kill")


_EMPTY = {"ended_at": None, "kind": None, "message": None, "table": None, "fix": None}
