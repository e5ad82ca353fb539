"""The durable log of received changes, between a receiver and Spark. DESIGN.md in this folder describes it."""

from __future__ import annotations

from tailrace.journal.cursor import Cursor, cursors
from tailrace.journal.frame import Frame, FrameRef, grouped
from tailrace.journal.frame_reader import FrameReader
from tailrace.journal.journal import Journal
from tailrace.journal.reader import JournalReader
from tailrace.journal.recovery import Damage
from tailrace.journal.storage import JournalPlace, ObjectPlace, check_journal, open_storage
from tailrace.journal.writer import JournalWriter

__all__ = [
    "Cursor",
    "Damage",
    "Frame",
    "FrameReader",
    "FrameRef",
    "Journal",
    "JournalPlace",
    "JournalReader",
    "JournalWriter",
    "ObjectPlace",
    "check_journal",
    "cursors",
    "grouped",
    "open_storage",
]
