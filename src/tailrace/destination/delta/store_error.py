"""What went wrong with a table's storage: outages to wait for, and damage that stops the table."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltalake.exceptions import DeltaError

from tailrace.destination.delta.table_folder import LOG, TablePath
from tailrace.errors import TableError, UnavailableError
from tailrace.system.store_problem import explain

# delta-rs raises most failures of a store as OSError; what is left begins with these words. Names of tables, columns
# and files come after them, so none can be taken for an outage.
_DOWN = re.compile(
    r"(?:(?:Generic error|Generic DeltaTable error|Kernel error|Transaction failed|Log storage error"
    r"|Failed to read delta log object): )*"
    r"(?:Error interacting with object store|Generic (?:S3|GCS|MicrosoftAzure|LocalFileSystem|HTTP) error)\b"
)


@contextmanager
def reaching(place: TablePath, table: str) -> Iterator[None]:
    """Turn the errors of a full or read-only disk and of an unreachable object store into UnavailableError."""
    try:
        yield
    except FileNotFoundError as error:
        if not place.is_local or not Path(place.base, LOG).is_dir():
            raise _unavailable(place, table, "ENOENT", str(error)) from error
        raise TableError(
            f"a file of the table is no longer in {place.uri}",
            table=table,
            fix=f"restore it, then tailrace retry FILE {table}; or tailrace resync FILE {table}",
        ) from error
    except OSError as error:
        raise _unavailable(place, table, _reason(error), str(error)) from error
    except DeltaError as error:
        if _DOWN.match(str(error)):
            raise _unavailable(place, table, str(error).splitlines()[0], str(error)) from error
        raise log_error(place, table, f"delta-rs reported an error: {str(error).splitlines()[0]}") from error


def log_error(place: TablePath, table: str, problem: str) -> TableError:
    """A log that cannot be read as a whole."""
    return TableError(
        f"the log of the Delta table is not as it was written: {problem}",
        table=table,
        fix=f"check the log in {place.uri}/{LOG}; if it is damaged, move {place.uri} away, then copy the table "
        f"again: tailrace resync FILE {table}",
    )


def _reason(error: OSError) -> str:
    if error.errno:
        return errno.errorcode.get(error.errno, "error")
    return (str(error).splitlines() or ["error"])[0]


def _unavailable(place: TablePath, table: str, reason: str, text: str = "") -> UnavailableError:
    problem = None if place.is_local else explain(text)
    if problem is not None:
        return UnavailableError(f"cannot use {place.uri}: {problem.reason}", table=table, fix=problem.fix)
    access = "this user may write there" if place.is_local else "the network and storage_options allow access"
    return UnavailableError(
        f"cannot use {place.uri}: {reason}",
        table=table,
        fix=f"check that {place.uri} is there and has space and that {access}; tailrace retries by itself",
    )
