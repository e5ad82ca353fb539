"""Durations, sizes and counts as people read them."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """`3 h 40 min` for people."""
    minutes = int(seconds // 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def format_count(count: int, noun: str) -> str:
    """`1 table`, `1,200 tables`: of a noun whose plural has an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_bytes(count: int) -> str:
    """`12.3 MB` for people."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
