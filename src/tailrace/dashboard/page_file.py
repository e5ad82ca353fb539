"""The files of the page: listed once at the start, and nothing else is ever served."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

_TYPES: Mapping[str, str] = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "ico": "image/x-icon",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "png": "image/png",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "webmanifest": "application/manifest+json",
    "woff2": "font/woff2",
}
"""By the end of a name. Files of other kinds, and those without an end such as licences, are served as text."""
_COMPRESSED = ("css", "html", "js", "json", "svg", "txt")
_PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class PageFile:
    """A file as it is sent."""

    type: str
    body: bytes
    compressed: bytes | None
    tag: str


def list_files() -> dict[str, PageFile]:
    """Every file of the page by its path, such as `/app.js`; the page itself is `/`."""
    found = dict(_walk(files("tailrace.dashboard") / "page", ""))
    if "/index.html" in found:
        found["/"] = found["/index.html"]
    return found


def _walk(folder: Traversable, path: str) -> Iterator[tuple[str, PageFile]]:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        place = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _walk(entry, place)
        elif not entry.name.startswith("."):
            yield place, _read(entry)


def _read(entry: Traversable) -> PageFile:
    end, body = entry.name.rpartition(".")[2].lower(), entry.read_bytes()
    compressed = gzip.compress(body, mtime=0) if end in _COMPRESSED else None
    return PageFile(_TYPES.get(end, _PLAIN), body, compressed, hashlib.sha256(body).hexdigest()[:20])
