"""The receiver: a process of its own that stores what rqlite posts, whether Spark runs or not.

One process, one event loop, one listener for any number of clusters. An error of one cluster stops that one; the
process ends only when nothing can be received at all. It writes its status to the journal's folder every second.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import unquote

import uvicorn

from tailrace.errors import OwnedError, TailraceError, UnavailableError
from tailrace.option.value import split_listen
from tailrace.source.rqlite.cluster_journal import Cluster
from tailrace.source.rqlite.endpoint import BODY_SECONDS, CdcEndpoint, Limits
from tailrace.source.rqlite.option import RqliteOptions
from tailrace.source.rqlite.request import folder_of
from tailrace.system.atomic_file import make_private_folder, remove
from tailrace.system.child_process import BUSY, write_status
from tailrace.system.file_lock import is_current, is_locked, try_lock
from tailrace.system.http_listener import HttpConnection, HttpServer, listening, secure

_log = logging.getLogger(__name__)

STATUS = "receiver"
"""The name of the status file in the journal's folder."""
LOCK = "receiver.lock"
MAINTENANCE_SECONDS = 1.0
LOOK_SECONDS = 0.1
CONNECTIONS = 256
GARBAGE_OBJECTS = 1_000_000
KEEP_ALIVE_SECONDS = 75
"""Longer than most pauses of a quiet cluster, so that its connection is still open for the next change."""


@dataclass(frozen=True)
class RqliteReceiverOptions:
    """The options that the receiver gets on its standard input."""

    journal: str
    segment_bytes: int
    max_bytes: int
    listen: str
    path: str
    max_body: int
    max_requests: float | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None

    @classmethod
    def of(cls, options: RqliteOptions) -> RqliteReceiverOptions:
        """The receiving half of a source's options."""
        auth, tls = options.auth, options.tls
        return cls(
            journal=str(options.journal.path),
            segment_bytes=options.journal.segment_bytes,
            max_bytes=options.journal.max_bytes,
            listen=options.listen,
            path=options.path,
            max_body=options.max_body,
            max_requests=options.max_requests,
            username=auth.username if auth else None,
            password=auth.password.reveal() if auth else None,
            cert=str(tls.cert) if tls else None,
            key=str(tls.key) if tls else None,
            client_ca=str(tls.client_ca) if tls and tls.client_ca else None,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RqliteReceiverOptions:
        return cls(**json.loads(text))


def is_receiving(journal: Path) -> bool:
    """Whether some process receives into this journal now."""
    return is_locked(journal / LOCK)


class RqliteReceiver:
    """Serves the endpoint until it is stopped. One per journal: `run` of a second one raises OwnedError."""

    def __init__(self, options: RqliteReceiverOptions, stopping: Callable[[], bool]) -> None:
        self.options = options
        self.journal = Path(options.journal)
        self.endpoint = CdcEndpoint(options.path, _limits(options), self._make_cluster)
        self.port = 0
        self._stopping = stopping
        self._started = False

    def run(self, on_status: Callable[[dict[str, object]], None] = lambda status: None) -> None:
        """Serve until stopped. `on_status` gets the content of the status file, about once a second.

        Raises OwnedError when another process receives into the journal, UnavailableError when the address is taken
        or the disk does not answer, ConfigError when the certificate cannot be used.
        """
        # A large transaction makes millions of objects, none of them in cycles: the search for cycles would cost most.
        gc.set_threshold(GARBAGE_OBJECTS)
        with receiving_alone(self.journal):
            try:
                with listening(split_listen(self.options.listen), CONNECTIONS, option="source.listen") as listener:
                    self.port = listener.getsockname()[1]
                    self._open_known()
                    asyncio.run(self._serve(listener, on_status))
            except TailraceError as error:
                self._publish(error, on_status)
                raise
            else:
                self._publish(None, on_status)
            finally:
                self._close()

    def describe(self, error: TailraceError | None) -> dict[str, object]:
        """The status file."""
        return {
            "pid": os.getpid(),
            "at": time.time(),
            "listen": f"{split_listen(self.options.listen)[0]}:{self.port}",
            "receiving": self._started and error is None,
            "answers": {str(code): count for code, count in sorted(self.endpoint.answers.items())},
            "services": {one.service: one.describe() for one in self.endpoint.clusters},
            "retrying": self.endpoint.retrying(),
            "error": error.describe() if error else None,
        }

    def _publish(self, error: TailraceError | None, on_status: Callable[[dict[str, object]], None]) -> None:
        status = self.describe(error)
        try:
            write_status(self.journal, STATUS, status)
        except OSError as failed:
            _log.warning("the status cannot be written: %s", failed.strerror)
        on_status(status)

    def _make_cluster(self, service: str) -> Cluster:
        return Cluster(
            service, self.journal, segment_bytes=self.options.segment_bytes, max_bytes=self.options.max_bytes
        )

    def _open_known(self) -> None:
        """Open the clusters that posted before, so that an error of one shows at once."""
        for folder in sorted(self.journal.iterdir()):
            service = unquote(folder.name)
            if folder.is_dir() and (folder / "lock").exists() and folder_of(service) == folder.name:
                cluster = self._make_cluster(service)
                self.endpoint.add(cluster)
                try:
                    cluster.open()
                except UnavailableError as error:
                    _log.warning("cluster %r: %s", service, error)  # its next request tries again

    async def _serve(self, listener: socket.socket, on_status: Callable[[dict[str, object]], None]) -> None:
        server = HttpServer(self._configure())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        tended = 0.0
        try:
            while not self._stopping() and not serving.done():
                if server.started and not self._started:
                    self._started = True
                    tended = 0.0
                if time.monotonic() - tended > MAINTENANCE_SECONDS:
                    await asyncio.to_thread(self._maintain)
                    self._publish(None, on_status)
                    tended = time.monotonic()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._started = False
            server.should_exit = True
            await serving

    def _maintain(self) -> None:
        for cluster in self.endpoint.clusters:
            try:
                cluster.maintain()
            except TailraceError as error:
                _log.warning("cluster %r: %s", cluster.service, error)

    def _close(self) -> None:
        for cluster in self.endpoint.clusters:
            try:
                cluster.close()
            except TailraceError as error:
                _log.warning("cluster %r: %s", cluster.service, error)

    def _configure(self) -> uvicorn.Config:
        cert, key, client_ca = self.options.cert, self.options.key, self.options.client_ca
        context = secure(cert, key, client_ca) if cert is not None else None
        return uvicorn.Config(
            self.endpoint.application,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,  # lower levels log every bad request, and anyone can send those without limit
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(BODY_SECONDS / 6),
            ssl_context_factory=(lambda config, default: context) if context is not None else None,
        )


def _limits(options: RqliteReceiverOptions) -> Limits:
    credentials = f"{options.username}:{options.password}" if options.username is not None else None
    return Limits(options.max_body, options.max_requests, credentials)


@contextmanager
def receiving_alone(journal: Path) -> Iterator[None]:
    """Hold the journal for this process during the context; creates its folder.

    Raises OwnedError while another process holds it, UnavailableError when the disk does not answer.
    """
    lock = journal / LOCK
    try:
        make_private_folder(journal)
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UnavailableError(
            f"{journal} cannot be used: {error.strerror}",
            fix="check that its disk is mounted, not full and belongs to this user; or change source.journal.path",
        ) from error
    try:
        deadline = time.monotonic() + LOOK_SECONDS
        while not try_lock(file):
            if time.monotonic() > deadline:
                raise OwnedError(
                    f"another process receives into {journal}",
                    fix="stop it, the pipeline or tailrace receive, or give this one its own journal",
                )
        if not is_current(file, lock):
            raise UnavailableError(f"{journal} is being reset", fix="nothing to do: tailrace retries by itself")
        yield
    finally:
        os.close(file)


def remove_journal(journal: Path) -> None:
    """Remove everything in it, and the folder itself if permitted. A second call completes an interrupted one.

    Raises OwnedError while a process receives into it, UnavailableError when something cannot be removed.
    """
    if not journal.exists():
        return
    with receiving_alone(journal):
        remove(journal, last=LOCK)  # the lock goes last, so that no receiver starts in a folder that is being removed


def run(options: str, stopping: Callable[[], bool]) -> int:
    """The process, for `tailrace.system.child_process.serve`: takes the options as JSON, returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    receiver = RqliteReceiver(RqliteReceiverOptions.from_json(options), stopping)
    try:
        receiver.run()
    except OwnedError:
        return BUSY
    except TailraceError as error:
        _log.error("%s", error)
        return error.exit_code
    return 0
