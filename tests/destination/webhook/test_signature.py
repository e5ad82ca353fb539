"""Requests are signed so that their receiver knows who sent them, when, and that no one changed them."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.destination.webhook.signature import SIGNATURE, TIMESTAMP, TOLERANCE_SECONDS, key_of, sign, verify
from tailrace.errors import ConfigError

KEY = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(KEY).decode()
NOW = 1_700_000_000

secrets = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda text: not text.startswith("whsec_"))
names = st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1)


def test_a_signature_is_the_hmac_of_id_timestamp_and_body() -> None:
    headers = sign([SECRET], "msg_1", NOW, b'{"a":1}')
    expected = hmac.new(KEY, b'msg_1.1700000000.{"a":1}', hashlib.sha256).digest()
    assert headers == {
        "webhook-id": "msg_1",
        "webhook-timestamp": "1700000000",
        "webhook-signature": "v1," + base64.b64encode(expected).decode(),
    }


def test_the_known_answer_of_rfc_4231_comes_out() -> None:
    # Its second case signs "what do ya want for nothing?", which has no dots; the key and the hash are what is tested.
    signed = hmac.digest(key_of("Jefe"), b"what do ya want for nothing?", "sha256").hex()
    assert signed == "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"


@given(st.lists(secrets, min_size=1, max_size=3), names, st.binary())
def test_what_was_signed_with_any_of_the_secrets_is_verified(all_secrets: list[str], name: str, body: bytes) -> None:
    headers = sign(all_secrets, name, NOW, body)
    for secret in all_secrets:
        assert verify([secret], headers, body, now=NOW)
        assert verify(["another", secret], {key.upper(): value for key, value in headers.items()}, body, now=NOW)


@given(secrets, secrets, names, st.binary(), st.binary())
def test_another_secret_or_body_is_refused(mine: str, other: str, name: str, body: bytes, changed: bytes) -> None:
    headers = sign([mine], name, NOW, body)
    assert verify([other], headers, body, now=NOW) == (mine == other)
    assert verify([mine], headers, changed, now=NOW) == (changed == body)
    assert not verify([mine], {**headers, "webhook-id": name + "x"}, body, now=NOW)
    assert not verify([mine], {**headers, TIMESTAMP: str(NOW + 1)}, body, now=NOW)


@pytest.mark.parametrize(("away", "fits"), [(0, True), (TOLERANCE_SECONDS, True), (TOLERANCE_SECONDS + 1, False)])
def test_a_request_from_another_time_is_refused(away: int, fits: bool) -> None:
    headers = sign([SECRET], "msg_1", NOW, b"")
    assert verify([SECRET], headers, b"", now=NOW + away) == fits
    assert verify([SECRET], headers, b"", now=NOW - away) == fits


@pytest.mark.parametrize("missing", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_request_without_one_of_the_headers_is_refused(missing: str) -> None:
    headers = sign([SECRET], "msg_1", NOW, b"body")
    assert not verify([SECRET], {name: value for name, value in headers.items() if name != missing}, b"body", now=NOW)


@pytest.mark.parametrize("timestamp", ["", "now", "-1", "1e9", "١٢٣"])
def test_a_timestamp_that_is_no_number_is_refused(timestamp: str) -> None:
    headers = {**sign([SECRET], "msg_1", NOW, b""), TIMESTAMP: timestamp}
    assert not verify([SECRET], headers, b"", now=NOW)


@pytest.mark.parametrize("signature", ["", "v1,", "v1", "v1,é", "v2,{0}", "{0}", ",{0}"])
def test_a_signature_in_another_form_is_refused(signature: str) -> None:
    headers = sign([SECRET], "msg_1", NOW, b"")
    bare = headers[SIGNATURE].removeprefix("v1,")
    assert not verify([SECRET], {**headers, SIGNATURE: signature.format(bare)}, b"", now=NOW)


def test_a_receiver_without_secrets_takes_nothing() -> None:
    assert not verify([], sign([], "msg_1", NOW, b""), b"", now=NOW)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_not base64", "whsec_YQ"])
def test_a_secret_without_a_key_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        key_of(secret)
    assert "openssl rand" in str(refusal.value)
    assert "not base64" not in str(refusal.value)
