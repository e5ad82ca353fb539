"""The documentation's site is complete, and a browser needs no other host to show it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tools.site import DOCS, ROOT, foreign_loads, listed, problems, stage

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
SOURCES = sorted(page for page in DOCS.rglob("*.md") if page.name != "template.md")


def test_the_menu_lists_every_page_once() -> None:
    assert sorted(listed(CONFIG["nav"])) == [page.relative_to(DOCS).as_posix() for page in SOURCES]


@pytest.mark.parametrize(("start", "prefix"), [(DOCS / "index.md", ""), (ROOT / "README.md", "docs/")])
def test_every_page_but_decisions_is_reached_from_the_start(start: Path, prefix: str) -> None:
    text = start.read_text("utf-8")
    named = {page.name for page in DOCS.glob("*.md") if f"]({prefix}{page.name}" in text}
    assert sorted({page.name for page in DOCS.glob("*.md")} - named) == ["index.md"]


def test_the_theme_takes_no_fonts_scripts_or_styles_from_elsewhere() -> None:
    assert CONFIG["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css", "extra_templates"} & CONFIG.keys()


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_needs_nothing_from_another_host(page: Path) -> None:
    text = page.read_text("utf-8")
    assert re.findall(r"!\[[^]]*\]\((?:https?:)?//[^)]*\)", text) == []
    assert foreign_loads(text) == []
    # The theme would fetch its program for diagrams.
    assert "```mermaid" not in text


@pytest.mark.parametrize("picture", sorted(DOCS.rglob("*.svg")), ids=lambda picture: picture.name)
def test_a_picture_needs_nothing_from_another_host_and_says_what_it_shows(picture: Path) -> None:
    text = picture.read_text("utf-8")
    assert foreign_loads(text) == []
    assert "<title" in text
    assert "<script" not in text


@pytest.mark.parametrize(
    "loads",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<script src="//cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<link rel="preconnect" href="https://fonts.example">',
        '<img src="https://img.example/badge.svg">',
        '<svg><image xlink:href="https://img.example/a.png"/></svg>',
        '<div style="background: url(https://img.example/a.png)"></div>',
        "@import 'https://fonts.example/css';",
        "@font-face { src: url(//fonts.example/a.woff2) }",
    ],
)
def test_a_load_from_another_host_is_found(loads: str) -> None:
    assert len(foreign_loads(loads)) == 1


def test_a_link_that_a_reader_may_follow_is_no_load() -> None:
    assert (
        foreign_loads('<a href="https://example.org/">there</a><link rel="canonical" href="https://a.example/">') == []
    )


def test_dead_links_and_anchors_of_the_built_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top">A</h1><a href="b.html#here">1</a><a href="#top">2</a>')
    (tmp_path / "b.html").write_text('<a href="a.html#gone">3</a><a href="c.html">4</a><a href="a.html">5</a>')
    assert list(problems(tmp_path)) == [
        "a.html links to b.html#here, and that page has no such anchor",
        "b.html links to a.html#gone, and that page has no such anchor",
        "b.html links to c.html, which is not there",
    ]


def test_a_file_outside_of_the_pages_comes_along_when_a_page_links_to_it(tmp_path: Path) -> None:
    docs, pages = tmp_path / "docs", tmp_path / "pages"
    (docs / "deep").mkdir(parents=True)
    (tmp_path / "unit.service").write_text("[Service]")
    (docs / "a.md").write_text("[unit](../unit.service) [b](deep/b.md) [web](https://example.org/)")
    (docs / "deep/b.md").write_text("[unit](../../unit.service)")
    stage(docs, pages)
    expected = "[unit](files/unit.service.txt) [b](deep/b.md) [web](https://example.org/)"
    assert (pages / "a.md").read_text() == expected
    assert (pages / "deep/b.md").read_text() == "[unit](../files/unit.service.txt)"
    assert (pages / "files/unit.service.txt").read_text() == "[Service]"
