"""Change capture for SQLite files, in the tables and with the semantics of Turso's, and the tape it makes.

`capture` is for one apsw connection, `enable` for every writer of a file. See docs/sqlite.md.
"""

from __future__ import annotations

from tailrace.sqlite.hook import capture, captured
from tailrace.sqlite.mode import CaptureState
from tailrace.sqlite.record_json import bin_record_json_object, table_columns_json_array
from tailrace.sqlite.sequence import check_sequence, purge
from tailrace.sqlite.tape import Tape
from tailrace.sqlite.trigger import disable, enable

__all__ = [
    "CaptureState",
    "Tape",
    "bin_record_json_object",
    "capture",
    "captured",
    "check_sequence",
    "disable",
    "enable",
    "purge",
    "table_columns_json_array",
]
