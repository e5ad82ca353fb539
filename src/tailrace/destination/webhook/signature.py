"""Signatures of requests after the Standard Webhooks scheme, for both ends.

A request carries `webhook-id`, `webhook-timestamp` (seconds) and `webhook-signature`: one `v1,BASE64` per secret, which
is the HMAC-SHA256 of `id.timestamp.body`. While a secret is being replaced there are two, and either will do.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from collections.abc import Mapping, Sequence

from tailrace.errors import ConfigError

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
TOLERANCE_SECONDS = 300
_PREFIX = "whsec_"
_VERSION = "v1"
_FIX = f"make one: printf '{_PREFIX}%s' \"$(openssl rand -base64 32)\""


def key_of(secret: str) -> bytes:
    """The key of a secret: `whsec_` and base64, or any other text as it is. Raises ConfigError for no key at all."""
    if not secret.startswith(_PREFIX):
        key = secret.encode()
    else:
        try:
            key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
        except binascii.Error:
            raise ConfigError(f"a signing secret has no base64 after {_PREFIX}", fix=_FIX) from None
    if not key:
        raise ConfigError("a signing secret is empty", fix=_FIX)
    return key


def sign(secrets: Sequence[str], request_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of a request, signed with every secret. The same request has the same headers."""
    signatures = (f"{_VERSION},{_signature(secret, request_id, str(timestamp), body)}" for secret in secrets)
    return {ID: request_id, TIMESTAMP: str(timestamp), SIGNATURE: " ".join(signatures)}


def verify(
    secrets: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float | None = None,
    tolerance_seconds: float = TOLERANCE_SECONDS,
) -> bool:
    """Whether one of the secrets signed this request not long ago. `body` is what arrived, before it is parsed.

    Names of headers may be in any case. A receiver calls it for every request, and refuses those that fail.
    """
    given = {name.lower(): value for name, value in headers.items()}
    request_id, timestamp = given.get(ID, ""), given.get(TIMESTAMP, "")
    if not request_id or not (timestamp.isascii() and timestamp.isdigit()):
        return False
    if abs((time.time() if now is None else now) - int(timestamp)) > tolerance_seconds:
        return False
    expected = [_signature(secret, request_id, timestamp, body).encode() for secret in secrets]
    found = False
    for each in given.get(SIGNATURE, "").split(" "):
        version, _, signature = each.partition(",")
        for one in expected:
            # Every pair is compared, in constant time, so that the time taken reveals nothing about the signature.
            found |= hmac.compare_digest(one, signature.encode()) and version == _VERSION
    return found


def _signature(secret: str, request_id: str, timestamp: str, body: bytes) -> str:
    signed = b".".join([request_id.encode(), timestamp.encode(), body])
    return base64.b64encode(hmac.digest(key_of(secret), signed, "sha256")).decode()
