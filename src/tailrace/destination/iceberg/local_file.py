"""Files of a warehouse on a local disk that are durable once they are closed: a commit must not name a file that a
power cut can take back."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, cast

from pyiceberg.io import InputFile, OutputFile, OutputStream
from pyiceberg.io.pyarrow import PyArrowFileIO

from tailrace.system import atomic_file


class DurableStream(io.FileIO):
    """A new file, durable under its name when it is closed."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self._path = path
        super().__init__(path, "wb" if overwrite else "xb")

    def close(self) -> None:
        if not self.closed:
            os.fsync(self.fileno())
            super().close()
            atomic_file.sync(self._path.parent)


class DurableFile(OutputFile):
    def __init__(self, location: str, files: PyArrowFileIO) -> None:
        super().__init__(location)
        self._path = Path(location.removeprefix("file://"))
        self._files = files

    def __len__(self) -> int:
        return self._path.stat().st_size

    def exists(self) -> bool:
        return self._path.exists()

    def to_input_file(self) -> InputFile:
        found: InputFile = self._files.new_input(self.location)
        return found

    def create(self, overwrite: bool = False) -> OutputStream:
        atomic_file.make_folder(self._path.parent)
        return cast(OutputStream, io.BufferedWriter(DurableStream(self._path, overwrite=overwrite), 1 << 20))


class LocalFileIO(PyArrowFileIO):
    """PyIceberg's own access to files, with writes that are durable."""

    def new_output(self, location: str) -> Any:
        return DurableFile(location, self)
