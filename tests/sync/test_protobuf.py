"""The messages of the protocol."""

from __future__ import annotations

import io
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from tailrace.sync.page_selector import decode_selector
from tailrace.sync.protobuf import (
    PAGE_BYTES,
    MalformedMessageError,
    PullHeader,
    PullRequest,
    decode_page,
    delimited,
    encode_page,
    page_message_bytes,
    read_delimited,
)

NUMBERS = st.integers(0, 2**64 - 1)


@given(st.builds(PullRequest, NUMBERS, st.text(), st.text(), NUMBERS, st.binary(), NUMBERS))
def test_a_request_is_decoded_as_it_was_encoded(request: PullRequest) -> None:
    assert PullRequest.decode(request.encode()) == request


@given(st.text(max_size=40), NUMBERS, st.lists(st.integers(0, 2**31), max_size=5))
def test_an_answer_is_decoded_as_it_was_encoded(revision: str, pages: int, numbers: list[int]) -> None:
    header = PullHeader(revision, pages)
    sent = [(number, bytes([number % 256]) * PAGE_BYTES) for number in numbers]
    encoded = [encode_page(*page) for page in sent]
    assert [len(message) for message in encoded] == [page_message_bytes(number) for number in numbers]
    first, *rest = read_delimited(io.BytesIO(delimited(header.encode()) + b"".join(encoded)).read)
    assert (PullHeader.decode(first), [decode_page(message) for message in rest]) == (header, sent)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_malformed(body: bytes) -> None:
    with suppress(MalformedMessageError):
        assert isinstance(PullRequest.decode(body), PullRequest)


@given(st.sets(st.integers(0, 200_000), min_size=1) | st.just(set(range(70_000))), st.booleans())
def test_a_selector_is_the_set_that_a_roaring_bitmap_holds(chosen: set[int], optimized: bool) -> None:
    bitmap = BitMap(chosen)
    if optimized:
        bitmap.run_optimize()
    assert decode_selector(bitmap.serialize(), 100_000) == {number for number in chosen if number < 100_000}


@given(st.binary(max_size=300))
def test_any_bytes_are_a_selector_or_malformed(selector: bytes) -> None:
    with suppress(MalformedMessageError):
        assert all(number < 1000 for number in decode_selector(selector, 1000))


def test_an_answer_that_breaks_off_is_malformed() -> None:
    whole = delimited(PullHeader("a:1", 1).encode()) + encode_page(0, b"x" * PAGE_BYTES)
    for length in (1, 5, 30, len(whole) - 1):
        with pytest.raises(MalformedMessageError):
            list(read_delimited(io.BytesIO(whole[:length]).read))
