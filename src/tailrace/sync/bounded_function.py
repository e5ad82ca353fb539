"""SQL functions that take as long as the product of their arguments' sizes, bounded: SQLite cannot interrupt them.

Searching 30 MB for another 30 MB takes a day. What they return is what SQLite's own return, so they may be in checks,
generated columns and indexes.
"""

from __future__ import annotations

from collections.abc import Callable

import apsw

_ARGUMENTS = {"instr": 2, "replace": 3, "trim": 2, "ltrim": 2, "rtrim": 2, "unhex": 2}
_LARGEST_PRODUCT = 50_000_000
"""Bytes times bytes: a second at most."""


def bound_functions(connection: apsw.Connection) -> None:
    """Replace these functions on a connection. A call that would take longer raises apsw.TooBigError."""
    own = apsw.Connection(":memory:")

    def bounded(sql: str) -> Callable[..., apsw.SQLiteValue]:
        def call(*arguments: apsw.SQLiteValue) -> apsw.SQLiteValue:
            if _size(arguments[0]) * _size(arguments[1]) > _LARGEST_PRODUCT:
                raise apsw.TooBigError("the arguments of a function are too large")
            (result,) = next(own.execute(sql, arguments))
            return result

        return call

    for name, count in _ARGUMENTS.items():
        sql = f"SELECT {name}({', '.join('?' * count)})"
        connection.create_scalar_function(name, bounded(sql), count, deterministic=True, flags=apsw.SQLITE_INNOCUOUS)


def _size(value: apsw.SQLiteValue) -> int:
    return len(value) if isinstance(value, str | bytes) else 1
