"""An object store that cannot be used says why, and what to do, in the words of people."""

from __future__ import annotations

import pytest

from tailrace.destination.delta.destination import DeltaDestination
from tailrace.errors import UnavailableError
from tailrace.option.value import Secret
from tailrace.system.store_problem import explain
from tailrace.testing.destination import ITEMS, insert
from tests.support.destination_writing import write
from tests.support.refusing_store import refusing


def problems(endpoint: str) -> list[UnavailableError]:
    """What a check and a write raise."""
    options = {
        "endpoint_url": endpoint,
        "allow_http": "true",
        "access_key_id": "k",
        "secret_access_key": "CANARY",
        "region": "nowhere",
        "max_retries": "0",
    }
    destination = DeltaDestination(
        path="s3://bucket/lake", storage_options={name: Secret(value) for name, value in options.items()}
    )
    found: list[UnavailableError] = []
    for attempt in (lambda: destination.check([ITEMS]), lambda: write(destination, 0, insert(id=1, name="a", price=1))):
        with pytest.raises(UnavailableError) as caught:
            attempt()
        assert "CANARY" not in str(caught.value)
        found.append(caught.value)
    return found


@pytest.mark.parametrize(
    ("status", "code", "reason", "fix"),
    [
        (404, "NoSuchBucket", "the bucket does not exist", "create it"),
        (403, "InvalidAccessKeyId", "does not accept the credentials", "correct the keys"),
        (403, "AccessDenied", "do not give the right", "allow them"),
        (503, "SlowDown", "answers 503 SlowDown", "retries by itself"),
        (301, "PermanentRedirect", "another region", "correct region"),
    ],
)
def test_a_store_that_refuses_is_reported_with_its_reason(status: int, code: str, reason: str, fix: str) -> None:
    with refusing(status, f"<Error><Code>{code}</Code><AWSAccessKeyId>CANARY</AWSAccessKeyId></Error>") as endpoint:
        for problem in problems(endpoint):
            assert reason in problem.message
            assert fix in (problem.fix or "")
            assert "space" not in (problem.fix or "")


def test_a_store_that_does_not_answer_is_reported_with_its_address() -> None:
    for problem in problems("http://127.0.0.1:1"):
        assert "127.0.0.1:1 does not answer: connection refused" in problem.message
        assert "endpoint_url" in (problem.fix or "")


def test_missing_credentials_are_reported_as_missing() -> None:
    asked = "Error performing PUT http://169.254.169.254/latest/api/token in 498.901µs - HTTP error"
    found = explain(f"Generic S3 error\n  \x1b[31m↳\x1b[0m {asked}\n   \x1b[31m↳\x1b[0m operation timed out\n")
    assert found is not None
    assert "no credentials" in found.reason


def test_the_name_of_a_table_is_never_taken_for_a_reason() -> None:
    asked = "Error performing GET http://h/b/NoSuchBucket/403 Forbidden/_delta_log in 1ms - HTTP error"
    found = explain(f"Generic S3 error\n ↳ {asked}\n  ↳ operation timed out\n")
    assert found is not None
    assert found.reason == "h does not answer: operation timed out"
    assert explain("something else") is None
