"""Errors keep what they say on their way between processes."""

from __future__ import annotations

import json
import pickle

import pytest

from tailrace import errors
from tailrace.errors import TailraceError, revive

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TailraceError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_the_same_after_json_and_after_pickle(kind: type[TailraceError]) -> None:
    error = kind("what happened", fix="what mends it", table="public.t", position="00")
    for again in (revive(json.loads(json.dumps(error.describe()))), pickle.loads(pickle.dumps(error))):
        assert type(again) is kind
        assert str(again) == str(error)


def test_a_kind_that_is_not_known_is_a_plain_error() -> None:
    assert type(revive({"kind": "Sequence", "message": "odd"})) is TailraceError
