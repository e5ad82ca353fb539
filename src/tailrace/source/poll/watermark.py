"""Where a consumer keeps how far it has polled. A pipeline needs none of this: its offsets are Spark's."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tailrace.errors import DamagedError
from tailrace.source import Offset
from tailrace.wholefile import creating


class WatermarkStore(Protocol):
    """The watermarks of all tables of one source, saved after what is behind them was applied, never before."""

    def load(self, of: str) -> Offset | None:
        """What was saved last for the source of this name; None when nothing was.

        Raises DamagedError for something that cannot be read or is of another source.
        """
        ...

    def save(self, of: str, offset: Offset) -> None:
        """Replace it. Durable when it returns, as far as the store is."""
        ...


class MemoryWatermarks:
    """Watermarks that end with the process: the next one copies every table again."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def load(self, of: str) -> Offset | None:
        return json.loads(self._texts[of]) if of in self._texts else None

    def save(self, of: str, offset: Offset) -> None:
        self._texts[of] = json.dumps(offset)


@dataclass(frozen=True)
class FileWatermarks:
    """Watermarks in a file that is replaced as a whole, with a checksum."""

    path: Path

    def load(self, of: str) -> Offset | None:
        if not self.path.exists():
            return None
        try:
            raw = json.loads(self.path.read_text())
            text, check, owner = raw["offset"], raw["check"], raw["of"]
            offset = json.loads(text) if zlib.crc32(text.encode()) == check else None
        except (ValueError, KeyError, TypeError, AttributeError):
            offset = None
        if offset is None:
            raise self._unfit("cannot be read: it does not match its checksum")
        if owner != of:
            raise self._unfit(f"is of the source {owner}, not of {of}")
        assert isinstance(offset, dict)
        return offset

    def _unfit(self, what: str) -> DamagedError:
        fix = "restore the file; or delete it, or set on_bad_watermark to permissive: every table is copied again then"
        return DamagedError(f"the stored watermark {self.path} {what}", fix=fix)

    def save(self, of: str, offset: Offset) -> None:
        text = json.dumps(offset)
        with creating(self.path) as file:
            file.write(json.dumps({"of": of, "check": zlib.crc32(text.encode()), "offset": text}).encode())
