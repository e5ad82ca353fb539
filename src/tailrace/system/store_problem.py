"""Why an object store could not be used, from the text in which delta-rs or obstore reports it.

The text is a tree: each line is the cause of the one before it. Lines name files, and with them tables, and quote what
the server answered, which may hold keys: only what is recognised here is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_DRAWN = re.compile(r"\x1b\[\d+m|↳")
_REQUEST = re.compile(r"Error performing [A-Z]+ (\S+)(?: .*)? in \S+(?:, after .*?)? - (.*)")
_STATUS = re.compile(r"(\d{3}) [A-Z][A-Za-z ]+")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_ANSWERED = re.compile(r"(.* - )Server returned non-2xx status code: (\d{3} [A-Z][A-Za-z ]+):? ?(.*)")
_CAUSE = re.compile(r'message: "([^"]+)"')
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
    """The cause that a text of delta-rs or obstore names; None for one that is not known."""
    lines = list(_lines(text))
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
            "set the keys of the store in storage_options, or in its environment variables",
        )
    if code in _MISSING:
        return StoreProblem(f"the bucket does not exist ({said})", "create it, or correct the path")
    if code in _REGION or "incorrectly configured region" in answer:
        return StoreProblem("the bucket is in another region", "correct region in storage_options")
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


def _lines(text: str) -> Iterator[str]:
    """The lines of the tree. obstore writes one line, and then what its libraries know of it."""
    told, _, debug = text.partition("\n\nDebug source")
    for line in told.splitlines():
        plain = _DRAWN.sub("", line).strip()
        plain = plain[max(plain.rfind("Error performing "), 0) :] if debug else plain
        if debug and (answered := _ANSWERED.fullmatch(plain)):
            yield answered[1] + answered[2]
            yield answered[3]
        else:
            yield plain
    if cause := _CAUSE.search(debug):
        yield cause[1]
