"""Builds the documentation as a site, and refuses one that is incomplete or needs another host.

    python -m tools.site ZENSICAL       # `make docs` does it, with the program of its own environment

Pages are written for a reader of the repository as well, so they link to files outside of docs/. The site has no such
files: each that a page links to is copied to `files/` of the site, and the link follows.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ROOT / ".build/pages"
SITE = ROOT / ".build/site"

_LINK = re.compile(r"\]\((?P<path>[^)#\s]+)(?:#[^)\s]*)?\)")
_LOADS = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "image": ("href",),
    "img": ("src", "srcset"),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "use": ("href",),
    "video": ("src", "poster"),
}
_LINKS_THAT_LOAD = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload"}
_STYLE_LOADS = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


def stage(docs: Path, pages: Path) -> None:
    """Fills `pages` from `docs`. A link to a file elsewhere in the repository leads to a copy of it."""
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(docs, pages, ignore=shutil.ignore_patterns("template.md"))
    for page in sorted(pages.rglob("*.md")):
        original = docs / page.relative_to(pages)
        text = page.read_text("utf-8")
        for link in {found["path"]: found for found in _LINK.finditer(text)}.values():
            target = (original.parent / link["path"]).resolve()
            if "://" in link["path"] or target.is_relative_to(docs.resolve()):
                continue
            place = _copy(target, docs, pages)
            steps = "../" * (len(page.relative_to(pages).parts) - 1)
            text = text.replace(f"]({link['path']}", f"]({steps}{place.relative_to(pages).as_posix()}")
        page.write_text(text, "utf-8")


def _copy(file: Path, docs: Path, pages: Path) -> Path:
    # As plain text a browser shows it, and no builder takes it for a page.
    place = pages / "files" / file.relative_to(docs.resolve().parent)
    place = place.with_name(place.name + ".txt")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)
    return place


class _Loads(HTMLParser):
    """Collects what a browser fetches by itself while it shows a page. Links that a reader may follow are not that."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.anchors: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name.removeprefix("xlink:"): value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        names = _LOADS.get(tag, ())
        if tag == "link" and _LINKS_THAT_LOAD & set(given.get("rel", "").split()):
            names = ("href",)
        self.found += [given[name] for name in names if given.get(name)]


def foreign_loads(text: str) -> list[str]:
    """The addresses on other hosts that a browser would fetch to show a page of HTML, or to use a sheet of CSS."""
    parser = _Loads()
    parser.feed(text)
    return [address for address in [*parser.found, *_STYLE_LOADS.findall(text)] if urlsplit(address).netloc]


def problems(site: Path) -> Iterator[str]:
    """What is wrong with a built site: loads from other hosts, links and anchors that lead nowhere."""
    parsed: dict[Path, _Loads] = {}
    for file in sorted([*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]):
        text = file.read_text("utf-8")
        for address in foreign_loads(text):
            yield f"{file.relative_to(site)} loads {address}"
        if file.suffix == ".html":
            parsed[file.resolve()] = page = _Loads()
            page.feed(text)
    for file, page in parsed.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or file.name == "404.html":
                continue
            target = (file.parent / parts.path).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{file.relative_to(site.resolve())} links to {link}, which is not there"
            elif parts.fragment and target in parsed and parts.fragment not in parsed[target].anchors:
                yield f"{file.relative_to(site.resolve())} links to {link}, and that page has no such anchor"


def listed(nav: list[object]) -> Iterator[str]:
    """The pages that the site's menu names, in order."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, list):
                yield from listed(value)
            else:
                yield str(value)


def main(zensical: str) -> int:
    """Builds the site. Returns 1, with the reasons on standard error, if it is not fit to be published."""
    stage(DOCS, PAGES)
    shutil.rmtree(SITE, ignore_errors=True)
    subprocess.run([zensical, "build", "--clean", "--strict"], cwd=ROOT, check=True)
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    pages = {page.relative_to(PAGES).as_posix() for page in PAGES.rglob("*.md")}
    found = [f"{name} is not in the menu of mkdocs.yml" for name in sorted(pages - set(listed(menu)))]
    found += problems(SITE)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
