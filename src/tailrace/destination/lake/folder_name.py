"""The name of a table's folder, for any name a database allows.

A plain name (ASCII letters, digits, `_`, `-`) stays as it is: `public.orders` is in `public/orders`. In any other
name every other byte becomes ~XX, so two names never share a directory (~ and not %, which delta-rs decodes on its
way to the disk). Names that differ only in case get separate folders only on a case-sensitive file system; `check`
warns about them.
"""

from __future__ import annotations

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_RESERVED = frozenset(["con", "prn", "aux", "nul", *(f"com{n}" for n in range(10)), *(f"lpt{n}" for n in range(10))])


def encode(part: str) -> str:
    """One part of a table's name as a directory name. Different parts give different directories."""
    data = part.encode("utf-8", "surrogatepass")
    # Readers skip directories that begin with an underscore, and some systems keep a few names for devices.
    first_is_safe = not part.startswith("_") and part.lower() not in _RESERVED
    return "".join(
        chr(byte) if byte in _PLAIN and (index or first_is_safe) else f"~{byte:02X}" for index, byte in enumerate(data)
    )
