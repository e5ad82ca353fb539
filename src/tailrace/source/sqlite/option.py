"""The keys of `source:` with `type: sqlite` and `type: turso`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field

from tailrace.option.value import DurationOrOff, FilePath
from tailrace.source.option import DraftSection, SourceOptions

_HEADER = b"SQLite format 3\0"


class CapturedFileOptions(SourceOptions):
    """A database file with a capture table. Its tables are in schema `main`."""

    example_address: ClassVar[str] = "shop.db"

    path: FilePath = Field(description="the database file; on a cluster a path that every executor sees")
    cdc_table: str = Field(default="turso_cdc", min_length=1, description="the capture table")
    chunk_rows: int = Field(default=100_000, ge=1, description="how many rows of a table one task copies")
    purge: DurationOrOff = Field(
        default=None,
        description="take changes out of the capture table once they are applied and this old; or off",
    )

    @classmethod
    def for_address(cls, address: str, *, chosen: bool) -> DraftSection | None:
        path = Path(address).expanduser().absolute()
        return DraftSection(path.stem, {"path": str(path)}) if chosen and "://" not in address else None

    def for_look(self) -> Self:
        return self.model_copy(update={"purge": None})


class SqliteSourceOptions(CapturedFileOptions):
    """An SQLite file, captured by `tailrace sqlite enable FILE` or on the connections of its application."""

    type: Literal["sqlite"]

    @classmethod
    def for_address(cls, address: str, *, chosen: bool) -> DraftSection | None:
        path = Path(address).expanduser()
        if chosen or path.suffix in (".db", ".sqlite", ".sqlite3") or _is_sqlite(path):
            return super().for_address(address, chosen=True)
        return None


class TursoOptions(CapturedFileOptions):
    """A Turso file, while its application writes it (with the feature multiprocess_wal) or when it is closed."""

    type: Literal["turso"]

    def needed_extra(self) -> str | None:
        return "turso"


def _is_sqlite(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_HEADER)) == _HEADER
    except OSError:
        return False
