"""`tailrace doctor`: what this machine has of what tailrace needs. Does not start Spark."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli.error import Debug, Json
from tailrace.errors import ConfigError, Finding

if TYPE_CHECKING:
    from tailrace.config.pipeline import PipelineConfig

_LITTLE_MEMORY = 2 << 30
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+).*;.*extra == ['\"]([\w-]+)['\"]")
_INTERNAL = frozenset({"dev"})
"""Extras for work on tailrace itself."""


def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Also look at what this pipeline's file needs.", show_default=False),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Explain this machine: Python, Java, Spark, memory, disk, extras. Exits with 3 if something is missing.

    With a pipeline's file, also whether the extras that it needs are installed and its variables are set. Connects to
    nothing and does not start Spark; `tailrace check` looks at source and destination.
    """
    from tailrace.cli.inspect import print_findings

    findings = [*_machine(), *_java(), *_spark(), *_workers()]
    configs, about_file = _read_file(file) if file is not None else ([], [])
    findings += [*_folders(configs[0] if configs else None), *_extras(configs), *about_file]
    print_findings(findings, file or Path("FILE"), as_json=as_json)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(3)


def _machine() -> Iterator[Finding]:
    yield Finding("ok", "Python", f"{platform.python_version()}, {platform.machine()}")
    yield Finding("ok", "tailrace", _version("tailrace") or "from a source tree")
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    yield Finding("ok", "cores", str(cores))
    free = _free_memory()
    if free is None:
        return
    if free < _LITTLE_MEMORY:
        yield Finding("warning", "memory", f"{free >> 20} MiB are free, Spark wants 2 GiB", "end other programs")
    else:
        yield Finding("ok", "memory", f"{free / (1 << 30):.1f} GiB free")


def _free_memory() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text("ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _java() -> Iterator[Finding]:
    from tailrace.stream.java import MINIMUM_VERSION, list_java

    found = list_java()
    used = next((one for one in found if one.fits), None)
    for one in found:
        version = f"version {one.version}" if one.version else "cannot be run"
        use = ", used by Spark" if one is used else "" if one.fits else f", not {MINIMUM_VERSION} or later"
        yield Finding("ok", "Java", f"{one.path} (from {one.found_by}), {version}{use}")
    if used is None:
        fix = "pip install 'tailrace[embedded]', or install a JDK and set JAVA_HOME"
        yield Finding("error", "Java", f"Spark needs Java {MINIMUM_VERSION} or later, and there is none", fix)


def _spark() -> Iterator[Finding]:
    version = _version("pyspark")
    if version is None:
        yield Finding("error", "PySpark", "is not installed", "pip install tailrace")
        return
    home = os.environ.get("SPARK_HOME")
    yield Finding("ok", "PySpark", version + (f", with the Spark of SPARK_HOME, {home}" if home else ""))
    from tailrace.stream.class_archive import Archive

    archive = Archive.here()
    if archive is not None and archive.exists:
        yield Finding("ok", "class archive", f"{archive.file}: Spark starts faster with it")
    elif archive is not None:
        yield Finding("ok", "class archive", "there is none yet; with it Spark starts faster", "tailrace warm")


def _workers() -> Iterator[Finding]:
    """Which Python a Spark session that is not tailrace's own runs data sources with."""
    named = os.environ.get("PYSPARK_PYTHON") or "python3"
    found = shutil.which(named)
    if found is not None and _has_tailrace(found):
        yield Finding("ok", "Python of Spark", f"{found}, which has tailrace")
        return
    lacks = f"{found} has no tailrace" if found else f"there is no {named}"
    message = f"{lacks}: readStream.format('tailrace') in a session of your own does not find it; `tailrace run` does"
    fix = f"activate the environment of tailrace, or: export PYSPARK_PYTHON={shlex.quote(sys.executable)}"
    yield Finding("warning", "Python of Spark", message, fix)


def _has_tailrace(python: str) -> bool:
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('pyspark_tailrace') is None)"
    try:
        return subprocess.run([python, "-c", look], capture_output=True, check=False, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _folders(config: PipelineConfig | None) -> Iterator[Finding]:
    from tailrace.destination.preflight import check_folder

    state = Path(config.state) if config is not None else Path(".tailrace").absolute()
    yield check_folder(state, "state folder", access_fix="let this user write there, or set `state` to another folder")
    conf = config.spark.conf if config is not None else {}
    named = os.environ.get("SPARK_LOCAL_DIRS") or conf.get("spark.local.dir") or tempfile.gettempdir()
    for folder in named.split(","):
        fix = "let this user write there, or set SPARK_LOCAL_DIRS to another folder"
        yield check_folder(Path(folder).absolute(), "Spark's temporary folder", access_fix=fix)


def _extras(configs: Sequence[PipelineConfig]) -> Iterator[Finding]:
    sections = [section for config in configs for section in (config.source, config.destination)]
    needed = {extra for section in sections if (extra := section.needed_extra()) is not None}
    for extra, packages in sorted(_packages().items()):
        missing = [package for package in packages if _version(package) is None]
        use = ", which the file needs" if extra in needed else ""
        if not missing:
            yield Finding("ok", f"extra {extra}", f"installed{use}")
        else:
            level: str = "error" if extra in needed else "ok"
            message = f"not installed{use}: lacks {', '.join(missing)}"
            fix = f"pip install 'tailrace[{extra}]'"
            yield Finding("error" if level == "error" else "ok", f"extra {extra}", message, fix)


def _packages() -> dict[str, list[str]]:
    """The packages of each extra, as the installed tailrace declares them."""
    try:
        declared = requires("tailrace") or []
    except PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in declared:
        if (parts := _REQUIREMENT.match(line)) and parts[2] not in _INTERNAL:
            found.setdefault(parts[2], []).append(parts[1])
    return found


def _read_file(file: Path) -> tuple[list[PipelineConfig], list[Finding]]:
    """The pipelines of the file, none if it is wrong, and what is to be said about it and its variables."""
    from tailrace.config.document import parse, references, substitute
    from tailrace.config.pipeline import load_all

    try:
        configs = load_all(file, connects=False)
        data = parse(file.read_text("utf-8"), str(file)).data
    except ConfigError as error:
        return [], [Finding("error", "file", error.message, error.fix)]
    findings = [
        Finding("error", "variable", f"{'.'.join(map(str, problem.path))} {problem.message}", problem.fix)
        for problem in substitute(data, os.environ)[1]
    ]
    names = sorted({name for _, name in references(data)} & os.environ.keys())
    findings += [Finding("ok", "variable", f"{name} is set") for name in names]
    if not findings:
        findings = [Finding("ok", "file", "refers to no variable")]
    return configs, findings


def _version(package: str) -> str | None:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return None
