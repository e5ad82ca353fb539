"""The report of a run: figures, their aims, and whether each aim was met."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """One measured number. `aim` is the lowest acceptable value or, with `sense` "most", the highest."""

    part: str
    name: str
    value: float
    unit: str = ""
    aim: float | None = None
    sense: Literal["least", "most"] = "least"

    @property
    def met(self) -> bool | None:
        if self.aim is None:
            return None
        return self.value >= self.aim if self.sense == "least" else self.value <= self.aim


class Report:
    """Prints figures as they are measured, and all of them at the end as a table and as JSON."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def add(
        self,
        part: str,
        name: str,
        value: float,
        unit: str = "",
        aim: float | None = None,
        sense: Literal["least", "most"] = "least",
    ) -> None:
        figure = Figure(part, name, value, unit, aim, sense)
        self.figures.append(figure)
        print(_line(figure), flush=True)

    def note(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    def show(self) -> None:
        print(f"\n{machine()}\n")
        print("\n".join(_line(figure) for figure in self.figures if figure.aim is not None))

    def save(self, path: Path) -> None:
        figures = [{**vars(figure), "met": figure.met} for figure in self.figures]
        path.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")


def _line(figure: Figure) -> str:
    value = f"{figure.value:,.0f}" if abs(figure.value) >= 1000 else f"{figure.value:,.2f}"
    line = f"{figure.part:<8} {figure.name:<46} {value:>12} {figure.unit:<10}"
    if figure.aim is None:
        return line.rstrip()
    return f"{line} aim {'≥' if figure.sense == 'least' else '≤'} {figure.aim:g}  {'met' if figure.met else 'NOT met'}"


def machine() -> str:
    """A description of this machine."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores ({names[0] if names else platform.machine()}), {pages / 2**30:.0f} GiB,"
        f" Python {platform.python_version()}, load {load:.1f}"
    )
