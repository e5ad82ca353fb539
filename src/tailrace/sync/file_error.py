"""What apsw raises about a file, as errors with a fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from tailrace.errors import ConfigError, DamagedError, UnavailableError
from tailrace.system.file_header import MVCC_FIX, MVCC_REASON, is_mvcc


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in errors of SQLite for which someone can do something."""
    try:
        yield
    except apsw.NotADBError:
        if is_mvcc(path):
            raise ConfigError(f"{path} {MVCC_REASON}", fix=MVCC_FIX) from None
        raise ConfigError(f"{path} is not an SQLite database", fix="check the path") from None
    except (apsw.CantOpenError, apsw.ReadOnlyError, apsw.PermissionsError) as error:
        raise ConfigError(
            f"{path} cannot be opened for writing: {error}", fix="check the path and its rights"
        ) from None
    except apsw.BusyError:
        raise UnavailableError(f"{path} is locked by another process", fix="try again, or end that process") from None
    except apsw.FullError:
        raise UnavailableError(f"the disk of {path} is full", fix="free some space, then try again") from None
    except apsw.CorruptError as error:
        raise DamagedError(
            f"{path}: {error}", fix="PRAGMA integrity_check shows more; restore it from a backup"
        ) from None
