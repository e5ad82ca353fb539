"""An archive of the classes that Spark loads, with which the JVM starts some seconds faster.

Java calls this class data sharing. An archive belongs to one Java and one Spark. It is in the user's cache, `tailrace
warm` creates it, and it is used if it exists. Java ignores an archive that does not match.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyspark

from tailrace.errors import PreflightError, UnavailableError
from tailrace.stream.java import find_java
from tailrace.stream.spark_home import spark_home
from tailrace.system.cache_folder import cache_folder

REHEARSAL = "tailrace.stream.rehearsal"
_SECONDS = 300.0
# Java prints messages about an archive to standard output, where a destination may print data.
_SILENT = "-Xlog:disable"
# The suffix of a link next to an archive, which points to the Spark that the archive belongs to.
_OWNER = ".owner"
_NO_FIX = "none needed: Spark starts without the archive"


@dataclass(frozen=True)
class Archive:
    """The archive for one Java and the installed Spark.

    `base` is an archive of Java's own classes, needed if Java comes without one; otherwise None.
    """

    java: Path
    file: Path
    base: Path | None

    @classmethod
    def here(cls) -> Archive | None:
        """The archive for this machine; None without a Java or a cache folder."""
        java = find_java()
        try:
            folder = cache_folder()
        except OSError:
            return None
        if java is None:
            return None
        home = java.parent.parent
        made_of = [
            *(str(spark_home()), pyspark.__file__, pyspark.__version__),
            *(str(home), str((home / "lib" / "modules").stat().st_mtime_ns)),
        ]
        name = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
        has_base = (home / "lib" / "server" / "classes.jsa").exists()
        return cls(java, folder / f"spark-{name}.jsa", None if has_base else folder / f"base-{name}.jsa")

    @property
    def exists(self) -> bool:
        return self.file.exists() and (self.base is None or self.base.exists())

    @property
    def options(self) -> str:
        """Java's options for a start with the archive; empty if it does not exist or its path cannot be an option."""
        if not self.exists or " " in str(self.file):
            return ""
        files = str(self.file) if self.base is None else f"{self.base}:{self.file}"
        return f"-Xshare:auto -XX:SharedArchiveFile={files} {_SILENT}"

    def make(self) -> None:
        """Run a small pipeline and archive the classes it loaded. Takes half a minute; replaces an older archive.

        Raises PreflightError when this Java cannot create archives or the cache cannot be written.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.file.parent) as folder:
                # Create the link before the archive, so that no process removes the archive as one without an owner.
                link = Path(folder, "owner")
                link.symlink_to(Path(pyspark.__file__).parent)
                link.replace(self.file.with_suffix(_OWNER))
                self._make(Path(folder))
            self._remove_stale()
        except OSError as error:
            raise PreflightError(
                f"cannot write to {self.file.parent}: {error.strerror}",
                fix="set XDG_CACHE_HOME to a folder you may write to",
            ) from error

    def _make(self, folder: Path) -> None:
        base = ""
        if self.base is not None:
            self._run([str(self.java), "-Xshare:dump", f"-XX:SharedArchiveFile={folder / 'base'}", "-version"])
            (folder / "base").replace(self.base)
            base = f"-XX:SharedArchiveFile={self.base}"
        options = f"{base} -XX:ArchiveClassesAtExit={folder / 'spark'} {_SILENT}"
        self._run([sys.executable, "-m", REHEARSAL, str(folder), options.strip()])
        if not (folder / "spark").exists():
            raise PreflightError(f"{self.java} created no class archive", fix=_NO_FIX)
        (folder / "spark").replace(self.file)

    def _run(self, command: list[str]) -> None:
        try:
            # Java writes the archive when it exits. `run` waits for that, because it reads the output until its end.
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"{Path(command[0]).name} did not end within {_SECONDS:g} s", fix="try again"
            ) from error
        if done.returncode:
            raise PreflightError(f"{Path(command[0]).name} ended with code {done.returncode}", fix=_NO_FIX)

    def _remove_stale(self) -> None:
        """Remove archives whose Spark no longer exists. Archives of this user's other environments stay."""
        package = Path(pyspark.__file__).parent
        for old in self.file.parent.glob("spark-*.jsa"):
            owner = old.with_suffix(_OWNER)
            if old != self.file and (not owner.exists() or owner.readlink() == package):
                for file in (old, owner, old.with_name(old.name.replace("spark-", "base-", 1))):
                    file.unlink(missing_ok=True)
        for home in self.file.parent.glob("spark-*/"):
            if not (home / "jars").exists():
                shutil.rmtree(home, ignore_errors=True)
