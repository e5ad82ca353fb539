"""Dates and timestamps that Arrow's own parser cannot read: BC, years past 9999, infinity.

Postgres writes them in ISO style (`0044-03-15 BC`, `12026-01-01 00:00:00+00`, `-infinity`). They are rare, so
plain Python parses each distinct text once.
"""

from __future__ import annotations

import re
from typing import Final

from tailrace.source.postgres.pgoutput.message import EPOCH_US

DAY_US: Final = 86_400_000_000
INT64_MAX: Final = 2**63 - 1
INT64_MIN: Final = -(2**63)

_TEXT = re.compile(r"(\d{4,})-(\d\d)-(\d\d)(?: (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?(?:\+00)?)?( BC)?")


def parse_day(text: str) -> int | None:
    """Days since 1970-01-01, or None for an infinity, which no count of days can hold."""
    return None if _infinite(text) else _fields(text)[0]


def parse_microsecond(text: str) -> int | None:
    """Microseconds since 1970-01-01 UTC, or None for an infinity and for what 64 bits cannot hold."""
    if _infinite(text):
        return None
    days, microseconds = _fields(text)
    total = days * DAY_US + microseconds
    return total if total <= INT64_MAX else None


def format_microsecond(since_2000: int, zone: str) -> str:
    """The text Postgres gives for its own timestamp `since_2000`; `zone` is `+00` or empty.

    Needed for the copy, where values come in binary and those that do not fit Arrow's epoch still need their text.
    """
    if since_2000 == INT64_MAX:
        return "infinity"
    if since_2000 == INT64_MIN:
        return "-infinity"
    days, rest = divmod(since_2000 + EPOCH_US, DAY_US)
    year, month, day = _civil(days)
    seconds, microseconds = divmod(rest, 1_000_000)
    fraction = f".{microseconds:06}".rstrip("0") if microseconds else ""
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{fraction}{zone}"
    return f"{year:04}-{month:02}-{day:02} {clock}" if year > 0 else f"{1 - year:04}-{month:02}-{day:02} {clock} BC"


def _infinite(text: str) -> bool:
    return text in ("infinity", "-infinity")


def _fields(text: str) -> tuple[int, int]:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError("not a date or timestamp in DateStyle ISO at TimeZone UTC")
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    fraction = int((match[7] or "").ljust(6, "0"))
    days = _days(1 - year if match[8] else year, month, day)
    return days, ((hour * 60 + minute) * 60 + second) * 1_000_000 + fraction


def _days(year: int, month: int, day: int) -> int:
    """Days from 1970-01-01 to a date of the proleptic Gregorian calendar; year 0 is 1 BC."""
    # March comes first so that the leap day is the last day of its year.
    shifted = year - (month < 3)
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return shifted * 365 + shifted // 4 - shifted // 100 + shifted // 400 + of_year - 719_468


def _civil(days: int) -> tuple[int, int, int]:
    """The inverse of `_days`."""
    era, of_era = divmod(days + 719_468, 146_097)
    year_of_era = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted_month = (5 * of_year + 2) // 153
    month = (shifted_month + 2) % 12 + 1
    return era * 400 + year_of_era + (month < 3), month, of_year - (153 * shifted_month + 2) // 5 + 1
