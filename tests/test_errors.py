"""Errors keep their content on their way between processes."""

from __future__ import annotations

import json
import pickle

import pytest

from tailrace import errors
from tailrace.errors import LostError, TableError, TailraceError, UnfitError, revive

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TailraceError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_the_same_after_json_and_after_pickle(kind: type[TailraceError]) -> None:
    error = kind("what happened", fix="what mends it", table="public.t", position="00")
    for again in (revive(json.loads(json.dumps(error.describe()))), pickle.loads(pickle.dumps(error))):
        assert type(again) is kind
        assert str(again) == str(error)


def test_codes_stay_as_they_are() -> None:
    assert {kind.__name__: kind.code for kind in KINDS} == {
        "TailraceError": "unexpected",
        "ConfigError": "config",
        "PreflightError": "preflight",
        "UnavailableError": "unavailable",
        "OwnedError": "owned",
        "LostError": "lost",
        "DamagedError": "damaged",
        "TableError": "table",
        "SchemaChangedError": "schema-changed",
        "UnfitError": "unfit",
        "MismatchError": "mismatch",
        "StaleCopyError": "stale-copy",
    }


def test_a_kind_that_is_not_known_is_a_plain_error() -> None:
    assert type(revive({"kind": "Sequence", "message": "odd"})) is TailraceError


class DialectError(TableError):
    """A kind that only its author knows."""


class TooWideError(UnfitError):
    """A kind of a kind."""


class ForgottenError(LostError):
    """A kind that needs more than a message."""

    def __init__(self, number: int) -> None:
        super().__init__(f"file {number} is gone", fix="put it back")


@pytest.mark.parametrize(
    ("error", "nearest"),
    [
        (DialectError("what happened", fix="a fix", table="public.t", position="00"), TableError),
        (TooWideError("what happened", table="public.t"), UnfitError),
        (ForgottenError(7), LostError),
    ],
)
def test_a_kind_of_an_author_comes_back_as_the_nearest_kind_that_everyone_knows(
    error: TailraceError, nearest: type[TailraceError]
) -> None:
    error.raw = b"raw"
    for again in (revive(json.loads(json.dumps(error.describe()))), pickle.loads(pickle.dumps(error))):
        assert type(again) is nearest
        assert str(again) == str(error)
        assert again.raw == b"raw"
