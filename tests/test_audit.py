"""The audit of the pinned dependencies finds what is wrong with them, and is not stopped by a missing network."""

from __future__ import annotations

import json
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tools.audit import ROOT, Index, audit, check_lock, read_lock

DIGEST, OTHER = "a" * 64, "b" * 64
LOCK = f"""\
good==1.5 \\
    --hash=sha256:{DIGEST} \\
    --hash=sha256:{OTHER}
    # via tailrace (pyproject.toml)
other[extra]==2.0 --hash=sha256:{OTHER}
"""
PROJECT: dict[str, Any] = {"dependencies": ["good>=1"], "optional-dependencies": {"more": ["good<2"]}}


def test_the_lock_of_this_project_is_complete() -> None:
    pins = read_lock((ROOT / "requirements.lock").read_text("utf-8"))
    assert len(pins) > 50
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert check_lock(pins, project) == []


@pytest.mark.parametrize(
    ("lock", "wanted", "said"),
    [
        ("good==1.5\n", "good>=1", ["good 1.5 has no hash"]),
        (LOCK, "missing", ["missing is not in the lock"]),
        (LOCK, "Good>=2", ["good 1.5 is not what pyproject.toml allows: Good>=2"]),
    ],
)
def test_a_lock_that_lacks_something_is_wrong(lock: str, wanted: str, said: list[str]) -> None:
    assert check_lock(read_lock(lock), {"dependencies": [wanted], "optional-dependencies": {}}) == said


class _IndexPages(BaseHTTPRequestHandler):
    pages: dict[str, str]

    def do_GET(self) -> None:
        page = self.pages.get(self.path)
        self.send_response(200 if page is not None else 404)
        self.end_headers()
        self.wfile.write((page or "").encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[tuple[dict[str, str], Index]]:
    """The pages of an index on this machine, by their paths, and the index."""
    found = {"/simple/good/": "", "/simple/other/": ""}
    kind = type("_Pages", (_IndexPages,), {"pages": found})
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield found, Index(f"http://127.0.0.1:{server.server_port}/simple/")
        finally:
            server.shutdown()
            thread.join()


def test_a_withdrawn_file_that_the_lock_accepts_is_a_fault(pages: tuple[dict[str, str], Index]) -> None:
    found, index = pages
    found["/simple/good/"] = f'<a href="/good.whl#sha256={DIGEST}" data-yanked="it deletes files">good.whl</a>'
    found["/simple/other/"] = f'<a href="/other.whl#sha256={"c" * 64}" data-yanked="">other.whl</a>'
    lines = list(audit(LOCK, PROJECT, index))
    assert [line for is_fault, line in lines if is_fault] == ["good 1.5 was withdrawn: it deletes files"]
    assert lines[-1] == (False, "not asked for known vulnerabilities: the index answers with status 404")


def test_a_known_vulnerability_is_a_fault(pages: tuple[dict[str, str], Index], monkeypatch: pytest.MonkeyPatch) -> None:
    found, index = pages
    known = [
        {"id": "V-1", "aliases": ["CVE-1"], "fixed_in": ["1.6", "2.0"], "withdrawn": None},
        {"id": "V-2", "aliases": [], "fixed_in": [], "withdrawn": "2026-01-01"},
    ]
    found["/pypi/good/1.5/json"] = json.dumps({"vulnerabilities": known})
    found["/pypi/other/2.0/json"] = json.dumps({"vulnerabilities": []})
    lines = list(audit(LOCK, PROJECT, index))
    assert [line for is_fault, line in lines if is_fault] == ["good 1.5 is vulnerable: V-1, fixed in 1.6, 2.0"]
    monkeypatch.setattr("tools.audit.IGNORED", {"CVE-1": "not used that way"})
    assert list(audit(LOCK, PROJECT, index))[-1] == (False, "no known vulnerabilities")


def test_without_a_network_nothing_fails_and_it_is_said() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_port
    lines = list(audit(LOCK, PROJECT, Index(f"http://127.0.0.1:{port}/simple")))
    assert not any(is_fault for is_fault, _ in lines)
    assert sum("the index does not answer" in line for _, line in lines) == 2
    assert list(audit(LOCK, PROJECT, None))[-1][1].endswith("pip does not say which index it uses")


def test_the_index_is_the_one_that_pip_is_told_to_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.example:8080/own/simple")
    index = Index.of_pip()
    assert index is not None
    assert vars(index) == {"_url": "http://index.example:8080/own/simple"}
