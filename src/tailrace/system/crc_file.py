"""The checksums that Hadoop stores next to a file, in `.NAME.crc`: the CRC-32 of every piece of some bytes."""

from __future__ import annotations

import zlib

_MAGIC = b"crc\0"


def fits(content: bytes, checksums: bytes) -> bool:
    """Whether a file has this content, as its checksums say. An unknown kind of checksums says nothing: True."""
    if not checksums.startswith(_MAGIC) or len(checksums) < 8:
        return True
    step = int.from_bytes(checksums[4:8])
    stored = [int.from_bytes(checksums[at : at + 4]) for at in range(8, len(checksums), 4)]
    return step > 0 and stored == [zlib.crc32(content[at : at + step]) for at in range(0, len(content), step)]
