"""`tailrace slatedb`: the WAL of a SlateDB database, printed row by row."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.error import CommandGroup, Debug, Json
from tailrace.cli.signal import until_signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.slatedb import Cursor, WalFile, WalRow

app = typer.Typer(
    cls=CommandGroup,
    name="slatedb",
    help="Read the WAL of a SlateDB database.",
    no_args_is_help=True,
    epilog="Example: tailrace slatedb tail ./store db",
)

_AT_ONCE = 10_000
"""After how many printed rows the cursor is saved within a file."""


@app.callback()
def _group() -> None:
    """Read the WAL of a SlateDB database."""


@app.command(epilog="Example: tailrace slatedb tail s3://ledger db1 --cursor db1.cursor --follow")
def tail(
    store: Annotated[
        str, typer.Argument(metavar="STORE_DIR_OR_URL", help="The store: a folder, s3://…, gs://… or az://….")
    ],
    path: Annotated[str, typer.Argument(metavar="DB_PATH", help="The database's path in the store.")],
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="WAL_ID[:SEQ]", help="Begin with this file, after this seq; default: the first."
        ),
    ] = None,
    cursor_file: Annotated[
        Path | None,
        typer.Option("--cursor", metavar="FILE", help="Save here how far it printed, and go on from there next time."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for new rows until Ctrl-C.")] = False,
    wal_store: Annotated[
        str | None, typer.Option("--wal-store", metavar="DIR_OR_URL", help="Where the WAL is, if not in the store.")
    ] = None,
    poll: Annotated[
        float, typer.Option("--poll", metavar="SECONDS", min=0.01, help="How often to ask for the next file.")
    ] = 1.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print every row of the WAL as a JSON object: wal_id, seq, kind, key, value, create_ts, expire_ts.

    Bytes are text where they are UTF-8, else base64 under key_b64 and value_b64. The cursor is saved after what was
    printed, so that nothing is left out; after a crash some rows may be printed twice. Settings and credentials of the
    store come from the environment. Needs no Spark, and changes nothing upstream.
    """
    from tailrace.slatedb import WalReader

    cursor = _read_cursor(cursor_file, start)
    reader = WalReader(path, store, wal_store)
    with until_signal() as stopped:
        files = reader.tail(cursor, follow=follow, poll_seconds=poll, should_stop=stopped.is_set)
        for file, rows in files:
            cursor = _print_rows(file, rows, cursor, cursor_file)


def _print_rows(file: WalFile, rows: Sequence[WalRow], cursor: Cursor, cursor_file: Path | None) -> Cursor:
    from tailrace.slatedb import Cursor

    printed = 0
    for at, row in enumerate(rows):
        sys.stdout.write(json.dumps(_as_dict(file.id, row), ensure_ascii=False) + "\n")
        printed += 1
        is_whole = at + 1 == len(rows) or rows[at + 1].seq != row.seq
        if is_whole and printed >= _AT_ONCE:
            _save_cursor(cursor_file, Cursor(file.id, row.seq))
            printed = 0
    cursor = cursor.after(file, rows)
    _save_cursor(cursor_file, cursor)
    return cursor


def _as_dict(wal_id: int, row: WalRow) -> dict[str, Any]:
    return {
        "wal_id": wal_id,
        "seq": row.seq,
        "kind": row.kind,
        **_text("key", row.key),
        **_text("value", row.value),
        "create_ts": row.create_ts,
        "expire_ts": row.expire_ts,
    }


def _text(name: str, value: bytes | None) -> dict[str, str | None]:
    try:
        return {name: None if value is None else value.decode()}
    except UnicodeDecodeError:
        assert value is not None
        return {f"{name}_b64": base64.b64encode(value).decode()}


def _read_cursor(file: Path | None, start: str | None) -> Cursor:
    from tailrace.errors import DamagedError
    from tailrace.slatedb import Cursor

    if file is not None and file.exists():
        try:
            raw = json.loads(file.read_text())
            return Cursor(int(raw["wal_id"]), int(raw["last_seq"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(
                f"the cursor {file} cannot be read", fix="delete the file; --from says where to begin then"
            ) from error
    try:
        return Cursor() if start is None else Cursor.parse(start)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--from") from error


def _save_cursor(file: Path | None, cursor: Cursor) -> None:
    """First what was printed leaves this process, then the cursor moves past it."""
    from tailrace.system.atomic_file import replace_durably

    sys.stdout.flush()
    if file is not None:
        replace_durably(file, json.dumps({"wal_id": cursor.wal_id, "last_seq": cursor.last_seq}).encode())
