"""The tables of a state store, in the words of any database."""

from __future__ import annotations

from dataclasses import dataclass

FORMAT = 6
"""The version of the layout; a store of a newer one is refused, an older one is upgraded by its first writer."""


@dataclass(frozen=True)
class ColumnTypes:
    """How a database calls the types of columns, and what ends a CREATE TABLE. Texts sort by code point."""

    integer: str = "BIGINT"
    real: str = "DOUBLE PRECISION"
    blob: str = "BYTEA"
    text: str = "TEXT"
    ending: str = ""


OF_PIPELINE = (
    "table_state",
    "schema_version",
    "progress",
    "source_status",
    "request",
    "dead_letter",
    "sender_watermark",
    "sender_queue",
    "applied_batch",
    "held_batch",
    "report",
    "planned_batch",
    "activity",
    "batch_detail",
    "sample",
)
"""What is kept for each pipeline. Not `sender_lease`: its epochs are counted on through every life of a pipeline."""

_TABLES = """
CREATE TABLE pipeline (
    name {text} PRIMARY KEY, created_at {text} NOT NULL, epoch {text} NOT NULL, fingerprint {text} NOT NULL,
    run {integer} NOT NULL DEFAULT 0, changed {integer} NOT NULL DEFAULT 0, serial {integer} NOT NULL DEFAULT 0,
    owner_pid {integer}, owner_host {text}, owner_started {text}, owner_machine {text},
    lease_until {text}
){ending};
CREATE TABLE table_state (
    pipeline {text} NOT NULL, upstream_id {text} NOT NULL, name {text} NOT NULL,
    state {text} NOT NULL CHECK (state NOT IN ('SyncWait', 'Catchup')), since {text} NOT NULL,
    reason {text}, fix {text}, retry {text}, attempts {integer} NOT NULL DEFAULT 0, next_try {text}, paused_at {text},
    resume {text}, failed_in {text}, rows_copied {integer} NOT NULL DEFAULT 0, rows_total {integer},
    chunks_done {integer} NOT NULL DEFAULT 0, chunks_total {integer},
    changes_applied {integer} NOT NULL DEFAULT 0, position {text},
    last_change_committed_at {text}, last_applied_at {text},
    PRIMARY KEY (pipeline, upstream_id)
){ending};
CREATE TABLE schema_version (
    pipeline {text} NOT NULL, upstream_id {text} NOT NULL, position {text} NOT NULL,
    version {integer} NOT NULL, schema {text} NOT NULL,
    PRIMARY KEY (pipeline, upstream_id, position), UNIQUE (pipeline, upstream_id, version)
){ending};
CREATE TABLE progress (
    pipeline {text} NOT NULL, batch_id {integer} NOT NULL, "offset" {text} NOT NULL, position {text},
    rows {integer} NOT NULL, bytes {integer} NOT NULL, seconds {real} NOT NULL, at {text} NOT NULL,
    PRIMARY KEY (pipeline, batch_id)
){ending};
CREATE TABLE source_status (
    pipeline {text} PRIMARY KEY, gear {text}, received {text}, journal_bytes {integer}, server {text},
    slot_restart {text}, slot_confirmed {text}, error {text}, fix {text}, at {text} NOT NULL
){ending};
CREATE TABLE request (
    pipeline {text} NOT NULL, id {integer} NOT NULL, kind {text} NOT NULL, "table" {text} NOT NULL, argument {text},
    at {text} NOT NULL, done_at {text}, outcome {text},
    PRIMARY KEY (pipeline, id)
){ending};
CREATE TABLE dead_letter (
    pipeline {text} NOT NULL, id {integer} NOT NULL, upstream_id {text} NOT NULL, "table" {text} NOT NULL,
    position {text} NOT NULL, kind {text} NOT NULL, reason {text} NOT NULL, fix {text}, raw {blob}, version {integer},
    tries {integer} NOT NULL, first_at {text} NOT NULL, last_at {text} NOT NULL, status {text} NOT NULL,
    PRIMARY KEY (pipeline, id), UNIQUE (pipeline, upstream_id, position)
){ending};
"""

_SINCE_3 = """
CREATE TABLE sender_lease (
    pipeline {text} PRIMARY KEY, epoch {integer} NOT NULL DEFAULT 0, writer {text}, node {text},
    owner_pid {integer}, owner_host {text}, owner_started {text}, owner_machine {text}, lease_until {text}
){ending};
CREATE TABLE sender_watermark (
    pipeline {text} NOT NULL, "table" {text} NOT NULL, position {text} NOT NULL,
    PRIMARY KEY (pipeline, "table")
){ending};
CREATE TABLE sender_queue (
    pipeline {text} NOT NULL, queue {text} NOT NULL, node {text} NOT NULL, place {text} NOT NULL, at {text} NOT NULL,
    PRIMARY KEY (pipeline, queue)
){ending};
"""

_SINCE_4 = """
CREATE TABLE applied_batch (
    pipeline {text} PRIMARY KEY, batch_id {integer} NOT NULL, ending {integer}
){ending};
CREATE TABLE held_batch (
    pipeline {text} NOT NULL, upstream_id {text} NOT NULL, batch_id {integer} NOT NULL, ending {integer},
    version {integer}, least {integer}, name {text},
    PRIMARY KEY (pipeline, upstream_id)
){ending};
CREATE TABLE report (
    pipeline {text} NOT NULL, subject {text} NOT NULL, value {text} NOT NULL, at {text} NOT NULL,
    PRIMARY KEY (pipeline, subject)
){ending};
"""

_SINCE_5 = """
CREATE TABLE planned_batch (
    pipeline {text} NOT NULL, batch_id {integer} NOT NULL, entry {text} NOT NULL,
    PRIMARY KEY (pipeline, batch_id)
){ending};
"""

_SINCE_6 = """
CREATE TABLE activity (
    pipeline {text} NOT NULL, upstream_id {text} NOT NULL, hour {text} NOT NULL, copied {integer} NOT NULL,
    inserts {integer} NOT NULL, updates {integer} NOT NULL, deletes {integer} NOT NULL,
    PRIMARY KEY (pipeline, upstream_id, hour)
){ending};
CREATE TABLE batch_detail (
    pipeline {text} NOT NULL, batch_id {integer} NOT NULL, detail {text} NOT NULL,
    PRIMARY KEY (pipeline, batch_id)
){ending};
CREATE TABLE sample (
    pipeline {text} NOT NULL, at {text} NOT NULL, value {text} NOT NULL,
    PRIMARY KEY (pipeline, at)
){ending};
"""

_LATER = {3: _SINCE_3, 4: _SINCE_4, 5: _SINCE_5, 6: _SINCE_6}
"""The tables that each format added."""


def statements(types: ColumnTypes, found: int = 0) -> list[str]:
    """What makes the tables that a store of format `found` (0: an empty one) lacks, one statement each."""
    # A store of the first format is made again from nothing.
    tables = ("" if found >= 2 else _TABLES) + "".join(_LATER[each] for each in _LATER if each > found)
    made = tables.format(**vars(types)).strip()
    return [statement.rstrip(";") for statement in made.split(";\n")]
