"""What went wrong with a table's storage: outages to wait for, and damage that stops the table.

Why an object store could not be used comes from the text in which delta-rs reports it.

The text is a tree: each line is the cause of the one before it. Lines name files, and with them tables, and quote what
the server answered, which may hold keys: only what is recognised here is shown.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltalake.exceptions import DeltaError

from tailrace.destination.delta.table_folder import LOG, TablePath
from tailrace.errors import TableError, UnavailableError

_DRAWN = re.compile(r"\x1b\[\d+m|↳")
_REQUEST = re.compile(r"Error performing [A-Z]+ (\S+)(?: .*)? in \S+(?:, after .*?)? - (.*)")
_STATUS = re.compile(r"(\d{3}) [A-Z][A-Za-z ]+")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MISSING = frozenset({"NoSuchBucket", "ContainerNotFound", "NoSuchContainer"})
_UNKNOWN_KEYS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "AuthenticationFailed"}
)
_REGION = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
_CREDENTIAL_HOSTS = ("169.254.", "metadata.google.internal", "[fd00:ec2::254]")
"""Where delta-rs asks for credentials when none are configured."""


@dataclass(frozen=True)
class StoreProblem:
    """What is wrong with a store, and what to do about it."""

    reason: str
    fix: str


def explain(text: str) -> StoreProblem | None:
    """The cause that a text of delta-rs names; None for one that is not known."""
    lines = [_DRAWN.sub("", line).strip() for line in text.splitlines()]
    requests = [found for line in lines if (found := _REQUEST.fullmatch(line))]
    if not requests:
        return None
    url, answer = requests[-1].groups()
    address = re.sub(r"^\w+://", "", url).partition("/")[0]
    host = re.sub(r"^\w+://", "", url)
    details = [answer, *lines[lines.index(requests[-1].string) + 1 :]]
    status = next((found[1] for line in details if (found := _STATUS.fullmatch(line))), "")
    code = next((found[1] for line in details if (found := _CODE.search(line))), "")
    said = " ".join(filter(None, (status, code)))
    if host.startswith(_CREDENTIAL_HOSTS):
        return StoreProblem(
            "no credentials are configured, and this machine gives none",
            "set the keys of the store in storage_options of the destination, or in its environment variables",
        )
    if code in _MISSING:
        return StoreProblem(f"the bucket does not exist ({said})", "create it, or correct the destination's path")
    if code in _REGION or "incorrectly configured region" in answer:
        return StoreProblem("the bucket is in another region", "correct region in storage_options of the destination")
    if code in _UNKNOWN_KEYS or status == "401":
        return StoreProblem(
            f"the store does not accept the credentials ({said})", "correct the keys in storage_options"
        )
    if status == "403":
        return StoreProblem(
            f"the credentials do not give the right to do this ({said})",
            "allow them to list, read, write and delete there, or use others in storage_options",
        )
    if status:
        return StoreProblem(f"{address} answers {said}", "wait for it; tailrace retries by itself")
    cause = re.sub(r" \(os error \d+\)", "", details[-1]).lower()
    return StoreProblem(
        f"{address} does not answer: {cause}",
        "check the network, and endpoint_url and region in storage_options; tailrace retries by itself",
    )


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
