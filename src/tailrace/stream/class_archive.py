"""An archive of the classes that Spark loads, with which its Java starts some seconds sooner.

Java calls it class data sharing. The archive belongs to one Java and one Spark; it lies in the user's cache, is made by
`tailrace warm`, and is used when it is there. Java itself passes over one that does not fit.
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
from tailrace.stream.java import cache_folder, find_java
from tailrace.stream.spark_home import spark_home

REHEARSAL = "tailrace.stream.rehearsal"
_SECONDS = 300.0
# What Java has to say about an archive goes to standard output, where data may be printed.
_SILENT = "-Xlog:disable"
# Beside an archive, a link to the Spark it belongs to.
_OWNER = ".owner"
_AS_BEFORE = "none needed: Spark starts as before"


@dataclass(frozen=True)
class Archive:
    """The archive for one Java and the installed Spark.

    `base` holds Java's own classes, for a Java that comes without an archive of them; None otherwise.
    """

    java: Path
    file: Path
    base: Path | None

    @classmethod
    def here(cls) -> Archive | None:
        """The one for this machine; None without a Java or a place to keep it."""
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
        """Java's options for a start with the archive; none where it is not there or cannot be named."""
        if not self.exists or " " in str(self.file):
            return ""
        files = str(self.file) if self.base is None else f"{self.base}:{self.file}"
        return f"-Xshare:auto -XX:SharedArchiveFile={files} {_SILENT}"

    def make(self) -> None:
        """Run a small pipeline and keep the classes it loaded. Takes half a minute; replaces what was there.

        Raises PreflightError when this Java cannot do it or the cache cannot be written.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.file.parent) as folder:
                # Before the archive itself, so that nobody takes it for one without an owner.
                link = Path(folder, "owner")
                link.symlink_to(Path(pyspark.__file__).parent)
                link.replace(self.file.with_suffix(_OWNER))
                self._make(Path(folder))
            self._forget_others()
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
            raise PreflightError(f"{self.java} keeps no archive of classes", fix=_AS_BEFORE)
        (folder / "spark").replace(self.file)

    def _run(self, command: list[str]) -> None:
        try:
            # Java writes the archive as it ends; it has ended when nobody holds its output any more.
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"{Path(command[0]).name} did not end within {_SECONDS:g} s", fix="try again"
            ) from error
        if done.returncode:
            raise PreflightError(f"{Path(command[0]).name} ended with code {done.returncode}", fix=_AS_BEFORE)

    def _forget_others(self) -> None:
        """Remove what no Spark needs any more. Those of other environments of this user stay."""
        package = Path(pyspark.__file__).parent
        for old in self.file.parent.glob("spark-*.jsa"):
            owner = old.with_suffix(_OWNER)
            if old != self.file and (not owner.exists() or owner.readlink() == package):
                for file in (old, owner, old.with_name(old.name.replace("spark-", "base-", 1))):
                    file.unlink(missing_ok=True)
        for home in self.file.parent.glob("spark-*/"):
            if not (home / "jars").exists():
                shutil.rmtree(home, ignore_errors=True)
