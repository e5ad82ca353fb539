# ruff: noqa: S608 - the table's name is a constant
"""The remote of a sync: a server of Turso's protocol, ours or Turso's own, or another file."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

import apsw
import urllib3

from tailrace.errors import ConfigError, PreflightError, TailraceError, UnavailableError
from tailrace.option.value import Secret, require_header_text
from tailrace.sync.file_error import naming
from tailrace.sync.file_stamp import LOOK_SECONDS, FileStamp, read_stamp
from tailrace.sync.hrana import Step, decode_value, encode_query, encode_transaction
from tailrace.sync.preflight import MARK_TABLE, require_servable
from tailrace.sync.protobuf import MalformedMessageError, PullHeader, PullRequest, decode_page, read_delimited
from tailrace.sync.sql_batch import SqlBatch
from tailrace.system import turso_lock
from tailrace.system.side_file import make_side_file

_SECONDS = 120.0
_LARGEST_BYTES = 1_000_000_000
"""SQLite's own limit: no stranger writes into a file of this machine."""
_LARGEST_PAGES = (1 << 32) - 2
_ANSWER_BYTES = 64 << 20
_MARK = f"SELECT pull_gen, change_id FROM {MARK_TABLE} WHERE client_id = ?"
_FIXES = {
    401: "set the token: --token-env NAME",
    403: "set the token: --token-env NAME",
    413: "start the server with a larger --max-body",
}


_Read = TypeVar("_Read")


class RefusedPushError(TailraceError):
    """The remote rolled a push back: a constraint met rows of others. Pull, and try again."""


class PushMark(NamedTuple):
    """The last change of a client that the remote has. A higher generation fences pushes that were sent before it."""

    generation: int = 0
    change_id: int = 0


class Remote(Protocol):
    """What a sync needs of its remote. `sent` and `received` count bytes."""

    sent: int
    received: int

    def pull(self, revision: str, image: Path) -> str | None:
        """Bring the image from a revision to the current one, which is returned; None if nothing changed.

        Interrupted, it may leave a part of an image instead, which the same pull completes.
        """
        ...

    def wait(self, revision: str, seconds: float) -> bool:
        """Wait until the remote has another revision, at most so long; whether it has. It may return earlier.

        Called in a thread of its own. Raises UnavailableError if the remote does not answer.
        """
        ...

    def mark(self, client: str) -> PushMark:
        """The mark of this client, also if it never pushed."""
        ...

    def push(self, steps: Sequence[Step]) -> None:
        """Run the steps as one transaction. Raises RefusedPushError if it was rolled back."""
        ...


def open_remote(address: str, token: Secret | None, ca: Path | None) -> Remote:
    """Raises ConfigError for an address that is none."""
    scheme = urlsplit(address).scheme.lower()
    if scheme in ("http", "https", "libsql"):
        return HttpRemote(address.replace("libsql:", "https:", 1), token, ca)
    return FileRemote(Path(address))


class HttpRemote:
    def __init__(self, url: str, token: Secret | None, ca: Path | None) -> None:
        parts = urlsplit(url)
        if token is not None and parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise ConfigError("a token must not be sent unencrypted", fix="use https://, or a tunnel to this machine")
        if not parts.hostname or parts.username or parts.query or parts.fragment:
            raise ConfigError("the remote must be a URL such as https://host:port", fix="give a token by --token-env")
        if token is not None:
            require_header_text(token.reveal(), "the token")
        self.sent = self.received = 0
        self._shown = f"{parts.scheme}://{parts.hostname}"
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token.reveal()}"} if token is not None else {}
        self._pool = urllib3.PoolManager(
            retries=False, timeout=_SECONDS, ca_certs=str(ca) if ca is not None else None, num_pools=1
        )

    def pull(self, revision: str, image: Path) -> str | None:
        answer = self._post("pull-updates", PullRequest(client_revision=revision).encode(), "application/protobuf")
        try:
            messages = read_delimited(lambda size: self._counted(answer.read(size)))
            header = PullHeader.decode(next(messages, b""))
            is_new = header.revision != revision or not revision
            if is_new:
                write_pages(image, header.pages, map(decode_page, messages))
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._unavailable("the answer broke off") from error
        except MalformedMessageError as error:
            raise PreflightError(
                f"{self._shown} does not answer as a sync server: {error}", fix="check the URL of the remote"
            ) from None
        finally:
            answer.close()  # its connection is kept if all of it was read
        if is_new:
            return header.revision
        # Of a pull that broke off, no one knows which pages the image has.
        return None if image.exists() else self.pull("", image)

    def wait(self, revision: str, seconds: float) -> bool:
        """A long poll. Of its answer only the revision is read: another client may change it before the pull."""
        request = PullRequest(client_revision=revision, long_poll_ms=int(seconds * 1000)).encode()
        answer = self._post("pull-updates", request, "application/protobuf")
        try:
            return PullHeader.decode(next(read_delimited(answer.read), b"")).revision != revision
        except (urllib3.exceptions.HTTPError, OSError, MalformedMessageError) as error:
            raise self._unavailable("the answer broke off") from error
        finally:
            answer.close()

    def mark(self, client: str) -> PushMark:
        return self._batch(encode_query(_MARK, (client,)), _read_mark)

    def push(self, steps: Sequence[Step]) -> None:
        self._batch(encode_transaction(steps), _require_success)

    def _batch(self, request: dict[str, Any], read: Callable[[Any], _Read]) -> _Read:
        answer = self._post("v2/pipeline", json.dumps(request, ensure_ascii=False).encode(), "application/json")
        try:
            content = self._counted(answer.read(_ANSWER_BYTES))
            return read(json.loads(content)["results"][0]["response"]["result"])
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._unavailable("the answer broke off") from error
        except (ValueError, LookupError, TypeError, AttributeError):
            raise PreflightError(
                f"{self._shown} does not answer as a sync server", fix="check the URL of the remote"
            ) from None
        finally:
            answer.close()

    def _post(self, path: str, body: bytes, kind: str) -> urllib3.BaseHTTPResponse:
        self.sent += len(body)
        headers = {**self._headers, "Content-Type": kind, "User-Agent": "tailrace"}
        try:
            answer = self._pool.request(
                "POST", f"{self._url}/{path}", body=body, headers=headers, preload_content=False, redirect=False
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            why = (
                "its certificate is not trusted"
                if "CERTIFICATE_VERIFY_FAILED" in str(error)
                else "it cannot be reached"
            )
            raise self._unavailable(why) from error
        if answer.status == 200:
            return answer
        # Something else than a sync server may answer anything.
        is_text = answer.headers.get("Content-Type", "").startswith("text/plain")
        reason = f": {answer.read(300).decode('utf-8', 'replace')}" if is_text else ""
        answer.close()
        if answer.status >= 500 or answer.status in (408, 429):
            raise self._unavailable(f"it answers {answer.status}")
        fix = _FIXES.get(answer.status, "check the URL of the remote")
        raise PreflightError(f"{self._shown} answers {answer.status}{reason}", fix=fix)

    def _counted(self, data: bytes) -> bytes:
        self.received += len(data)
        return data

    def _unavailable(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"{self._shown}: {why}", fix="check that the server runs, then sync again; changes made meanwhile are kept"
        )


class FileRemote:
    """Another SQLite file on this machine, in use or not. It is read whole each time."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigError(f"there is no file {path}", fix="give a file or a URL as the remote")
        self.sent = self.received = 0
        self._path = path.resolve()
        self._pulled: FileStamp | None = None
        with self._opened() as batch:
            require_servable(batch.connection, path)

    def pull(self, revision: str, image: Path) -> str | None:
        self._pulled = read_stamp(self._path)
        draft = image.with_name(image.name + ".new")
        draft.unlink(missing_ok=True)
        make_side_file(draft, self._path)
        with self._opened() as batch, closing(apsw.Connection(str(draft))) as copy:
            with copy.backup("main", batch.connection, "main") as backup:
                backup.step(-1)
            copy.execute("PRAGMA journal_mode = DELETE")
        with draft.open("r+b") as opened:
            opened.seek(18)
            opened.write(b"\x01\x01")
            opened.seek(0)
            now = hashlib.file_digest(opened, "sha256").hexdigest()
            os.fsync(opened.fileno())
        if now == revision:
            draft.unlink()
            return None
        self.received += draft.stat().st_size
        draft.replace(image)
        return now

    def wait(self, revision: str, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while self._pulled is not None and read_stamp(self._path) == self._pulled:
            if time.monotonic() >= ends:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def mark(self, client: str) -> PushMark:
        with self._opened() as batch:
            result = batch.pipeline(encode_query(_MARK, (client,)))
        return _read_mark(result["results"][0]["response"]["result"])

    def push(self, steps: Sequence[Step]) -> None:
        with self._opened() as batch:
            result = batch.pipeline(encode_transaction(steps))
        _require_success(result["results"][0]["response"]["result"])

    @contextmanager
    def _opened(self) -> Iterator[SqlBatch]:
        # SQLite and Turso do not see each other's locks.
        if turso_lock.is_locked_whole(self._path):
            raise UnavailableError(f"{self._path} is open in Turso", fix="close it there, then sync again")
        with (
            naming(self._path),
            turso_lock.shut_out(self._path),
            closing(SqlBatch(self._path, seconds=_SECONDS, largest_bytes=_LARGEST_BYTES)) as batch,
        ):
            yield batch


def _read_mark(result: Any) -> PushMark:
    answered = result["step_results"][0]  # without a table of marks there was no push
    if not answered or not answered["rows"]:
        return PushMark()
    generation, change_id = (int(str(decode_value(value))) for value in answered["rows"][0])
    return PushMark(generation, change_id)


def _require_success(result: Any) -> None:
    errors = [error for error in result["step_errors"] if error]
    if errors and errors[0].get("code") == "SQLITE_BUSY":
        raise UnavailableError(
            "the remote is locked by a program that writes to it", fix="sync again when it is done; changes are kept"
        )
    if errors:
        raise RefusedPushError(
            f"the remote refused a push: {errors[0].get('message', 'no reason given')}",
            fix="sync again; if it stays, compare the tables of both sides",
        )
    if not result["step_results"] or result["step_results"][-2] is None:
        raise RefusedPushError("the remote did not commit a push", fix="sync again")


def part_of(image: Path) -> Path:
    """Where an image is while pages are written into it."""
    return image.with_name(image.name + ".part")


def write_pages(image: Path, pages: int, changed: Iterator[tuple[int, bytes]]) -> None:
    """Write pages into the image, durable when this returns. Interrupted, it leaves the part of the image."""
    part = part_of(image)
    if image.exists():
        image.rename(part)
    file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if pages > _LARGEST_PAGES:
            raise MalformedMessageError(f"a database cannot have {pages} pages")
        for number, data in changed:
            if number >= pages:
                raise MalformedMessageError("a page is beyond the end of its database")
            os.pwrite(file, data, number * len(data))
        os.ftruncate(file, pages * 4096)
        # The image has no log of its own.
        os.pwrite(file, b"\x01\x01", 18)
        os.fsync(file)
    finally:
        os.close(file)
    part.rename(image)
