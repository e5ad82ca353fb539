"""The operating system account that a private Postgres server runs under, and files that this account can reach.

PostgreSQL refuses to run as root. For root (containers, CI) the server runs under an unprivileged account. For any
other user it runs under the user's own account, and everything in this module does nothing.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

_CANDIDATES = ("postgres", "nobody")


class _Identity(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True)
class Account:
    """A uid and gid. If `switched`, it is not our own account, so files must be given to it."""

    uid: int
    gid: int
    switched: bool

    @classmethod
    def choose(cls) -> Account:
        """Our own account, unless we are root: then the account `postgres`, or else `nobody`."""
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid(), switched=False)
        known = {entry.pw_name: entry for entry in pwd.getpwall()}
        for name in _CANDIDATES:
            if name in known:
                return cls(known[name].pw_uid, known[name].pw_gid, switched=True)
        return cls(65534, 65534, switched=True)

    @property
    def identity(self) -> _Identity:
        """The arguments that make `subprocess` run a program under this account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.switched else {}

    def own_dir(self, path: Path, mode: int) -> Path:
        """Make `path` a directory that this account owns, with exactly this mode."""
        path.mkdir(parents=True, exist_ok=True)
        if self.switched:
            os.chown(path, self.uid, self.gid)
        path.chmod(mode)
        return path

    def own_file(self, path: Path) -> Path:
        """Give `path` to this account and deny access to all others."""
        if self.switched:
            os.chown(path, self.uid, self.gid)
        path.chmod(0o600)
        return path

    def cache(self) -> Path:
        """A directory of this account in the system's temporary directory, the same for all our processes.

        Raises PermissionError if another user created it first, because that user could put any files into it.
        """
        path = Path(tempfile.gettempdir()) / f"tailrace-postgres-{self.uid}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            owner = path.lstat().st_uid
            if path.is_symlink() or owner not in (self.uid, os.geteuid()):
                raise PermissionError(f"{path} belongs to uid {owner}, not to uid {self.uid}; remove it") from None
        return self.own_dir(path, 0o700)

    def place(self, path: Path) -> Path:
        """Where to create a directory that is meant for `path`, so that this account can reach it.

        That is `path` itself wherever possible. Inside a private directory (root's home, a test's) it is a directory
        in the cache, always the same for the same path. Then `path` becomes a link to it, and a directory whose link
        is gone is removed.
        """
        path = path.absolute()
        if not self.switched or self._reaches(path.parent):
            return path
        for origin in self.cache().glob("data-*.origin"):
            with suppress(FileNotFoundError):  # another process is removing them too
                if not os.path.lexists(origin.readlink()):
                    shutil.rmtree(origin.with_suffix(""), ignore_errors=True)
                    origin.unlink()
        place = self.cache() / f"data-{hashlib.sha256(bytes(path)).hexdigest()[:16]}"
        if not path.is_symlink():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                path.rmdir()
            path.symlink_to(place)
            place.with_suffix(".origin").unlink(missing_ok=True)
            place.with_suffix(".origin").symlink_to(path)
        return place

    def reach(self, install: Path) -> Path:
        """`install` itself, or a copy in the cache if this account has no access to it."""
        if not self.switched or self._reaches(install):
            return install
        package = install.parent
        copy = self.cache() / f"install-{hashlib.sha256(bytes(install.resolve())).hexdigest()[:16]}"
        if not copy.exists():
            unfinished = Path(tempfile.mkdtemp(dir=self.cache()))
            unfinished.chmod(0o755)
            shutil.copytree(install, unfinished / package.name / install.name, symlinks=True)
            # A wheel keeps the shared libraries of its programs in a folder next to the package.
            libraries = package.with_name(f"{package.name}.libs")
            if libraries.exists():
                shutil.copytree(libraries, unfinished / libraries.name)
            try:
                unfinished.rename(copy)
            except OSError:  # another process was first; its copy is as good
                shutil.rmtree(unfinished)
                if not copy.exists():
                    raise
        return copy / package.name / install.name

    def _reaches(self, directory: Path) -> bool:
        directory = directory.resolve()
        return all(self._passes(each) for each in (directory, *directory.parents) if each.exists())

    def _passes(self, directory: Path) -> bool:
        info = directory.stat()
        if info.st_uid == self.uid:
            return bool(info.st_mode & 0o100)
        if info.st_gid == self.gid:
            return bool(info.st_mode & 0o010)
        return bool(info.st_mode & 0o001)
