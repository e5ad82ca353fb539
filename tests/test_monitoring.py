"""The files for Grafana and Prometheus use metrics that exist, as they can be read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.cli import prometheus

ROOT = Path(__file__).parents[1]
BOARD = ROOT / "deploy/grafana/tailrace.json"
RULES = ROOT / "deploy/prometheus/tailrace.yaml"

LABELS = {
    spec.name: {"pipeline", *more}
    for specs, more in (
        ((prometheus.UP, *prometheus.PIPELINE, *prometheus.QUEUE), ()),
        ((prometheus.PHASE,), ("phase",)),
        (prometheus.TABLE, ("table",)),
        ((prometheus.STATE,), ("table", "state")),
    )
    for spec in specs
}
"""Every metric with its labels."""


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BOARD.read_text("utf-8"))
    return found


def expressions() -> Iterator[tuple[str, str, str]]:
    """Where each expression is, itself, and what else names its labels."""
    for panel in board()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]
    for rule in yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"], " ".join(rule["annotations"].values())


@pytest.mark.parametrize(("place", "expression", "text"), list(expressions()))
def test_an_expression_uses_metrics_and_labels_that_exist(place: str, expression: str, text: str) -> None:
    names = re.findall(r"\btailrace_\w+", expression)
    assert names, place
    assert [name for name in names if name not in LABELS] == []
    known = set.intersection(*(LABELS[name] for name in names))
    used = set(re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", expression))
    used |= {name.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for name in group.split(",")}
    used |= set(re.findall(r"\{\{(\w+)\}\}", text)) | set(re.findall(r"\$labels\.(\w+)", text))
    assert used <= known, place
    for opening, closing in ("()", "[]", "{}"):
        assert expression.count(opening) == expression.count(closing), place


def test_the_board_has_what_an_import_into_grafana_needs() -> None:
    found = board()
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= found.keys()
    assert "id" not in found  # Grafana gives it one
    variables = {each["name"]: each for each in found["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert variables["pipeline"]["datasource"]["uid"] == "${datasource}"
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        # No data source of one installation, so that it loads into every other.
        assert {panel["datasource"]["uid"]} | {one["datasource"]["uid"] for one in panel["targets"]} == {
            "${datasource}"
        }
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies over another"
        taken |= cells
        assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"])


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    rules = yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert {"summary", "action"} == rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert re.fullmatch(r"\d+m", rule["for"])
