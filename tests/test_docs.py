"""The documentation says what the code does, and its examples work."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tailrace.advice import ADVICE
from tailrace.cli import app
from tailrace.cli.error import EXIT_CODES
from tailrace.config.pipeline import json_schema, load_all
from tailrace.state import SourceStatus
from tailrace.state.record import DeadLetter
from tailrace.state.status import PipelineStatus, TableStatus
from tailrace.verify.comparison import Verdict

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])
LINKING = sorted(
    page
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "src").rglob("*.md")]
    if page.name != "template.md"  # its links are examples
)
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
VARIABLES = {
    "KAFKA_PASSWORD": "secret",
    "SHOP_DSN": "postgresql://shop@localhost/shop",
    "REPLICA_DSN": "postgresql://replica@localhost/reports",
    "STATE_DSN": "postgresql://state@localhost/state",
    "ALERT_URL": "https://alert.example/in",
    "ALERT_TOKEN": "token",
    "HOOK_URL": "https://hook.example/in",
    "HOOK_TOKEN": "token",
    "CATALOG_TOKEN": "token",
    "SEARCH_URL": "https://search.example/in",
    "HOOK_SECRET": "whsec_c2VjcmV0",
}

# What a piece of a file needs around it.
REST = {
    "name": "shop",
    "source": "{type: postgres, dsn: postgresql://shop@localhost/shop}",
    "destination": "{type: delta, path: ./lake}",
}


def blocks(page: Path, *languages: str) -> list[str]:
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def documents() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, block in enumerate(blocks(page, "yaml"), start=1):
            yield f"{page.name} {number}", block
    for example in EXAMPLES:
        yield example.name, example.read_text("utf-8")


def command_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in blocks(page, "console", "sh", "bash"):
            for line in block.splitlines():
                if found := re.match(r"(?:\$ )?(?:\w+=\S+ )*(tailrace .*)", line):
                    yield page.name, found[1]


def commands(group: Any, words: tuple[str, ...] = ("tailrace",)) -> Iterator[tuple[str, ...]]:
    if not hasattr(group, "commands"):
        yield words
        return
    for name, command in group.commands.items():
        yield from commands(command, (*words, name))


def parse(line: str) -> None:
    """Parse a command line as `tailrace` would. Raises UsageError for one it would refuse."""
    command: Any = typer.main.get_command(app)
    words = list(itertools.takewhile(lambda word: word not in (">", "|"), shlex.split(line, comments=True)[1:]))
    while hasattr(command, "commands"):
        with command.make_context("tailrace", words, resilient_parsing=True) as context:
            _, command, words = command.resolve_command(context, words)
    command.make_context(command.name, list(words)).close()


@pytest.mark.parametrize(("place", "text"), list(documents()), ids=lambda value: value if "\n" not in value else "")
def test_every_file_that_is_shown_can_be_loaded(
    place: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    shown = set(yaml.safe_load(re.sub(r"\$\{\w+\}", "text", text)))
    file = tmp_path / "shop.yaml"
    given = shown | ({"destination"} if "destinations" in shown else set())
    file.write_text(text + "".join(f"\n{key}: {value}" for key, value in REST.items() if key not in given))
    config = load_all(file)[0]
    for settings in config.tables.settings:
        assert config.tables.select([settings]) == [settings], f"{place} has settings for a table it does not follow"


@pytest.mark.parametrize(("place", "text"), list(documents()), ids=lambda value: value if "\n" not in value else "")
def test_every_file_that_is_shown_is_yaml_for_every_parser(place: str, text: str) -> None:
    assert yaml.safe_load(text), place


@pytest.mark.parametrize(("page", "line"), list(command_lines()))
def test_every_command_that_is_shown_is_one(page: str, line: str) -> None:
    parse(line)


def test_every_command_is_on_a_page() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    every = list(commands(typer.main.get_command(app)))
    assert ("tailrace", "errors", "skip") in every
    assert [words for words in every if not re.search(rf"\b{' '.join(words)}\b", text)] == []


def test_every_key_of_a_file_is_on_a_page() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    keys = {key for model in json_schema()["$defs"].values() for key in model.get("properties", {})}
    assert [key for key in sorted(keys) if not re.search(rf"\b{key}\b", text)] == []


def test_every_extra_is_on_the_page_of_the_configuration() -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert [
        extra for extra in project["optional-dependencies"] if extra != "dev" and f"| `{extra}` |" not in page
    ] == []


def test_the_page_of_commands_has_every_key_of_the_status() -> None:
    page = (DOCS / "commands.md").read_text("utf-8")
    keys = {
        field.name
        for kind in (PipelineStatus, TableStatus, SourceStatus, DeadLetter, Verdict)
        for field in fields(kind)
    }
    hidden = {"raw", "upstream_id", "failed_in", "counts", "safe_wal_bytes"}  # the latter two under other names
    assert [key for key in sorted(keys - hidden) if f"`{key}`" not in page] == []


def test_the_page_of_commands_has_every_exit_code() -> None:
    page = (DOCS / "commands.md").read_text("utf-8")
    assert [int(code) for code in re.findall(r"^\| (\d+) \| .+ \|$", page, re.MULTILINE)] == list(EXIT_CODES)


def test_the_page_of_errors_says_what_the_code_does() -> None:
    page = (DOCS / "errors.md").read_text("utf-8")
    rows = re.findall(r"^\| \[`([\w-]+)`\]\(#\1\) \| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
    assert rows == [
        (kind.code, kind.__name__, f"{kind.exit_code} | {advice.stops} | {advice.retry} | {advice.text}")
        for kind, advice in ADVICE.items()
    ]


def test_every_code_of_an_error_is_explained_at_the_place_that_the_error_names() -> None:
    assert len({kind.code for kind in ADVICE}) == len(ADVICE)
    for kind in ADVICE:
        page, _, anchor = kind("what happened").docs.partition("#")
        assert anchor == kind.code
        assert anchor in anchors(ROOT / page)


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_documentation_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def behaviours() -> Iterator[tuple[str, str, str]]:
    """The rows of the page of behaviours: what, the module, the test."""
    for line in (DOCS / "seeds.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[0] not in ("behaviour", "---"):
            yield cells[0], cells[1].strip("`"), cells[2].strip("`")


def test_every_behaviour_is_where_the_page_says_and_held_by_the_test_it_names() -> None:
    missing = []
    for what, module, test in behaviours():
        file, _, name = test.partition("::")
        held = [path for path in (ROOT / "tests" / file, ROOT / "src/tailrace" / file) if path.is_file()]
        if not (ROOT / "src/tailrace" / module).is_file():
            missing.append(f"{what}: no {module}")
        if not held or not re.search(rf"^ *def {name}\(", held[0].read_text("utf-8"), re.MULTILINE):
            missing.append(f"{what}: no {test}")
    assert missing == []


def test_the_page_of_behaviours_covers_all_five_subjects() -> None:
    page = (DOCS / "seeds.md").read_text("utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert [section.count("\n| ") - 1 >= 9 for section in sections] == [True] * 5
