"""Audits the dependencies that `requirements.lock` pins; `make check` runs it.

    python -m tools.audit

Always: every pin has hashes, and every dependency of the package, its extras included, is pinned to a version that it
allows. Where pip's index answers: no pinned file was withdrawn (yanked) there. Where the index also tells of
vulnerabilities: none is known of a pinned version. What cannot be asked is said and fails nothing, so that an audit
without a network passes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
IGNORED: Mapping[str, str] = {}
"""Vulnerabilities that do not concern tailrace: their id, and why."""

_SECONDS = 10.0
_THREADS = 8
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?:.*\\\n)*.*)", re.M)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Pin:
    """One version that the lock installs, and the files of it that it accepts."""

    name: str
    version: str
    hashes: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def read_lock(text: str) -> list[Pin]:
    found = (match.groups() for match in _PIN.finditer(text))
    return [Pin(canonicalize_name(name), version, frozenset(_HASH.findall(rest))) for name, version, rest in found]


def check_lock(pins: list[Pin], project: Mapping[str, Any]) -> list[str]:
    """What is wrong with the lock itself."""
    pinned = {pin.name: pin for pin in pins}
    wrong = [f"{pin} has no hash" for pin in pins if not pin.hashes]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    for requirement in map(Requirement, wanted):
        pin = pinned.get(canonicalize_name(requirement.name))
        if pin is None:
            wrong.append(f"{requirement.name} is not in the lock")
        elif not requirement.specifier.contains(pin.version, prereleases=True):
            wrong.append(f"{pin} is not what pyproject.toml allows: {requirement}")
    return wrong


class _Links(HTMLParser):
    """The sha256 of each withdrawn file of an index page, with the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.yanked: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and "data-yanked" in values:
            _, _, digest = (values.get("href") or "").partition("#sha256=")
            self.yanked[digest] = values["data-yanked"] or "no reason given"


class Index:
    """A package index, as pip is configured to use it."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    @classmethod
    def of_pip(cls) -> Index | None:
        """The one that pip uses; None where pip does not say."""
        environment = {**os.environ, "COLUMNS": "500"}
        command = [sys.executable, "-m", "pip", "install", "--help"]
        said = subprocess.run(command, capture_output=True, text=True, env=environment, check=False).stdout
        found = re.search(r"--index-url <url>.*?\(default\s+(https?://[^\s)]+)", said, re.S)
        return cls(found[1]) if found else None

    def yanked(self, pin: Pin) -> list[str]:
        """Why files that the lock accepts were withdrawn. Raises OSError when the index does not answer."""
        links = _Links()
        links.feed(self._get(f"{self._url}/{pin.name}/", "text/html").decode())
        reasons = {links.yanked[digest] for digest in pin.hashes & links.yanked.keys()}
        return [f"{pin} was withdrawn: {reason}" for reason in sorted(reasons)]

    def vulnerabilities(self, pin: Pin) -> list[str]:
        """What is known of this version. Raises OSError when the index does not tell."""
        address = f"{self._url.removesuffix('/simple')}/pypi/{pin.name}/{pin.version}/json"
        found = json.loads(self._get(address, "application/json")).get("vulnerabilities") or []
        return [
            f"{pin} is vulnerable: {each['id']}, fixed in {', '.join(each.get('fixed_in') or ['no version'])}"
            for each in found
            if not each.get("withdrawn") and IGNORED.keys().isdisjoint([each["id"], *(each.get("aliases") or [])])
        ]

    def _get(self, url: str, kind: str) -> bytes:
        # The address is that of the configured index.
        with urlopen(Request(url, headers={"Accept": kind}), timeout=_SECONDS) as answer:  # noqa: S310
            content: bytes = answer.read()
            return content


def ask(pins: list[Pin], question: Callable[[Pin], list[str]]) -> tuple[list[str], str | None]:
    """What the index has to say about the pins; or why it could not be asked."""
    try:
        first = question(pins[0])  # where no one answers, one wait is enough
        with ThreadPoolExecutor(_THREADS) as pool:
            return [*first, *(each for found in pool.map(question, pins[1:]) for each in found)], None
    except HTTPError as error:
        return [], f"the index answers with status {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        return [], f"the index does not answer ({type(error).__name__})"


def audit(lock: str, project: Mapping[str, Any], index: Index | None) -> Iterator[tuple[bool, str]]:
    """Lines to print, each with whether it is a fault."""
    pins = read_lock(lock)
    wrong = check_lock(pins, project)
    yield from ((True, each) for each in wrong)
    if not wrong:
        yield False, f"{len(pins)} pins, all with hashes and as pyproject.toml allows"
    if index is None:
        yield False, "not asked for withdrawn files and vulnerabilities: pip does not say which index it uses"
        return
    for subject, question in (("withdrawn files", index.yanked), ("known vulnerabilities", index.vulnerabilities)):
        found, unasked = ask(pins, question)
        yield from ((True, each) for each in found)
        if not found:
            yield False, f"not asked for {subject}: {unasked}" if unasked else f"no {subject}"


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    is_wrong = False
    for is_fault, line in audit((ROOT / "requirements.lock").read_text("utf-8"), project, Index.of_pip()):
        is_wrong |= is_fault
        print(f"{'error' if is_fault else 'ok'}: {line}", file=sys.stderr if is_fault else sys.stdout)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
