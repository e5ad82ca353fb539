"""Change capture for SQLite files, with the tables and semantics of Turso's CDC, and readers for the resulting tape.

`capture` covers one apsw connection, `enable` every writer of a file. See docs/sqlite.md.
"""

from __future__ import annotations

from tailrace.capture.exclusion import excluded
from tailrace.capture.hook import capture, captured
from tailrace.capture.layout import CaptureState, CdcVersion
from tailrace.capture.pragma import connect, register_functions
from tailrace.capture.record import bin_record_json_object, table_columns_json_array
from tailrace.capture.tape import Tape, check_sequence, purge
from tailrace.capture.trigger import disable, enable

__all__ = [
    "CaptureState",
    "CdcVersion",
    "Tape",
    "bin_record_json_object",
    "capture",
    "captured",
    "check_sequence",
    "connect",
    "disable",
    "enable",
    "excluded",
    "purge",
    "register_functions",
    "table_columns_json_array",
]
