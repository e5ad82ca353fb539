"""Commands on a file with several destinations: for each of them, or for the one that is named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tailrace.config.pipeline import load_all
from tailrace.dashboard.fix import fix_of
from tailrace.dashboard.pipeline import WatchedPipeline
from tailrace.state import BatchRecord, StateStore
from tests.support.invocation import invoke

DESTINATIONS = """
name: shop
source: {type: postgres, dsn: "${UNSET}"}
destinations:
  - {name: lake, type: delta, path: ./lake}
  - {name: search, type: webhook, url: "${UNSET_URL}"}
state: state
"""
TABLES = ("public.a", "public.b")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A pipeline that has run: in `search` the table a is in error."""
    file = tmp_path / "shop.yaml"
    file.write_text(DESTINATIONS)
    for number, config in enumerate(load_all(file, connects=False)):
        with config.store_address.open() as store:
            fill(store, number)
    return file


def fill(store: StateStore, number: int) -> None:
    for upstream_id, table in enumerate(TABLES):
        store.add_table(str(upstream_id), table)
    store.apply_batch(BatchRecord(number, {}, None, 0, 0, 0.0), [])
    if number:
        store.fail_table("0", "the key is gone", fix="tailrace resync FILE public.a, then tailrace run FILE")


def answer(*arguments: object) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_status_of_each_is_in_a_list_and_that_of_one_is_as_ever(file: Path) -> None:
    lake, search = answer("status", file)["destinations"]
    assert [(one["name"], one["pipeline"], one["batch"]) for one in (lake, search)] == [
        ("lake", "shop.lake", 0),
        ("search", "shop.search", 1),
    ]
    fix = f"tailrace resync {file} --destination search public.a, then tailrace run {file}"
    assert [table["fix"] for table in search["tables"]] == [fix, None]
    one = answer("status", file, "--destination", "search")
    assert one["pipeline"] == "shop.search"
    assert "destinations" not in one

    shown = invoke("status", file).stdout
    assert shown.index("shop.lake") < shown.index("shop.search")
    assert "--destination search public.a" in shown.replace("\n", " ")


def test_one_that_has_not_run_is_said_so_next_to_the_others(file: Path) -> None:
    file.write_text(DESTINATIONS.replace("state: state", "  - {name: new, type: console}\nstate: state"))
    found = answer("status", file)["destinations"]
    assert [one.get("error", {}).get("kind") for one in found] == [None, None, "ConfigError"]
    assert "has not run yet" in invoke("status", file).stdout
    assert invoke("status", file, "--destination", "new").exit_code == 2


def test_requests_go_to_each_or_to_one_and_to_one_where_they_cannot_be_taken_back(file: Path) -> None:
    lake, search = answer("pause", file)["destinations"]
    assert [len(one["requests"]) for one in (lake, search)] == [2, 2]
    assert len(answer("resume", file, "--destination", "lake")["requests"]) == 2
    assert answer("retry", file, "public.a", "--destination", "search")["table"] == "public.a"
    for command in ("resync", "skip"):
        refused = invoke(command, file, "public.a")
        assert refused.exit_code == 2
        assert "--destination lake" in refused.output
    assert answer("resync", file, "public.a", "--destination", "lake")["kind"] == "resync"
    lines = invoke("pause", file).stdout.splitlines()
    assert [line for line in lines if line.endswith(":")] == ["lake:", "search:"]


def test_dead_letters_are_listed_by_destination(file: Path) -> None:
    assert answer("errors", "list", file)["destinations"] == [
        {"name": "lake", "errors": []},
        {"name": "search", "errors": []},
    ]
    missing = invoke("errors", "show", file, 3, "--destination", "lake")
    assert f"tailrace errors list {file} --destination lake --all" in missing.output.replace("\n", " ")


def test_metrics_have_the_destination_as_a_label(file: Path) -> None:
    text = invoke("metrics", file).stdout
    found = {
        (sample.labels["pipeline"], sample.labels["destination"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "tailrace_batch"
    }
    assert found == {("shop", "lake"): 0, ("shop", "search"): 1}
    assert 'tailrace_queue_pending{destination="search",pipeline="shop"}' in text


def test_the_dashboard_shows_each_destination_as_a_pipeline_whose_commands_name_it(file: Path) -> None:
    watched = [WatchedPipeline(config, file) for config in load_all(file, connects=False)]

    async def summaries() -> list[dict[str, Any]]:
        return [await one.summary() for one in watched]

    lake, search = asyncio.run(summaries())
    assert (lake["name"], search["name"]) == ("shop.lake", "shop.search")
    assert (lake["file"], search["file"]) == (str(file), str(file))
    assert search["health"]["fix"]["commands"] == [f"tailrace run {file}"]
    fix = fix_of("tailrace resync FILE public.a, then tailrace run FILE", watched[1].file, "public.a")
    assert fix is not None
    assert fix["commands"] == [f"tailrace resync {file} --destination search public.a", f"tailrace run {file}"]
