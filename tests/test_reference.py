"""The pages that are written by a program say what the program knows."""

from __future__ import annotations

import pytest

from tailrace.config.pipeline import json_schema
from tools.reference import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_reference_is_current(name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == PAGES[name](), "run `make reference`"


def test_every_key_of_a_file_is_described() -> None:
    schema = json_schema()
    models = {"the file": schema, **schema["$defs"]}
    undescribed = [
        f"{name}: {key}"
        for name, model in models.items()
        for key, value in model["properties"].items()
        # A section is described by its own table, and the word after `type` by its heading.
        if key != "type" and not {"description", "$ref", "discriminator", "anyOf"} & value.keys()
    ]
    assert undescribed == []


def test_the_reference_has_every_section_and_command() -> None:
    keys, commands = ((DOCS / f"reference-{name}.md").read_text("utf-8") for name in ("keys", "commands"))
    assert all(
        f"## source, type {name}\n" in keys for name in ("postgres", "sqlite", "turso", "rqlite", "slatedb", "poll")
    )
    assert all(f"## tailrace {name}\n" in commands for name in ("run", "errors skip", "serve-sync", "slatedb tail"))
