"""Change capture for SQLite files, in the tables and with the semantics of Turso's, and the tape it makes.

`capture` is for one apsw connection, `enable` for every writer of a file. See docs/sqlite.md.
"""

from __future__ import annotations

from tailrace.capture.hook import capture, captured
from tailrace.capture.layout import CaptureState
from tailrace.capture.record import bin_record_json_object, table_columns_json_array
from tailrace.capture.tape import Tape, check_sequence, purge
from tailrace.capture.trigger import disable, enable

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
