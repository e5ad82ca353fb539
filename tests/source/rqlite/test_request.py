"""Reading what rqlite posts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.option.value import OptionContext
from tailrace.source.rqlite import catalog
from tailrace.source.rqlite.deduplication import DeduplicationWindow
from tailrace.source.rqlite.frame_builder import build
from tailrace.source.rqlite.option import RqliteOptions
from tailrace.source.rqlite.request import NotOursError, checked_service, folder_of, parse, read_line
from tests.support.rqlite_posting import body, entry, insert, recorded, update


def test_every_recorded_request_is_read_without_losing_a_value() -> None:
    for content in recorded():
        request = parse(content)
        given = json.loads(content)
        assert request.service == given.get("service_id", "rqlite")
        assert [one.index for one in request.entries] == [one["index"] for one in given["payload"]]
        assert [json.loads("{" + event.text) for one in request.entries for event in one.events] == [
            event for one in given["payload"] for event in one["events"]
        ]


def test_integers_of_64_bits_are_exact_and_larger_ones_are_reals() -> None:
    event = parse(body([entry(1, insert(1, a=2**63 - 1, b=-(2**63), c=10**20, d=1.5))])).entries[0].events[0]
    after = json.loads("{" + event.text)["after"]
    assert (after["a"], after["b"], after["d"]) == (2**63 - 1, -(2**63), 1.5)
    assert isinstance(after["c"], float)
    assert after["c"] == 1e20


def test_an_event_is_known_again_from_another_node_and_from_the_journal() -> None:
    first = parse(body([entry(7, update(1, "ä", None), at=5)], node="n1"))
    other = parse(body([entry(7, update(1, "ä", None), at=6)], node="n2"))
    (one,), (two,) = first.entries[0].events, other.entries[0].events
    assert one.known == two.known
    assert first.digest != other.digest
    frame = build(DeduplicationWindow().admit(first), first)
    _, read = read_line(bytes(frame.payload))
    assert read.known == one.known


WRONG: list[dict[str, Any]] = [
    {"op": "TRUNCATE"},
    {"table": ""},
    {"table": None},
    {"new_row_id": "1"},
    {"new_row_id": True},
    {"after": {"id": [1]}},
    {"after": {"id": True}},
    {"after": {}},
    {"after": None, "before": {"id": 1}},
    {"op": ["INSERT"]},
    {"error": 5},
    {"error": "\ud800"},
    {"after": {"id": float("nan")}},
    {"after": {"id": "\ud800"}},
]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        b"[]",
        b"{}",
        b'{"payload": 5}',
        b'{"payload": [5]}',
        b'{"service_id": 5, "payload": []}',
        b"[" * 100_000,
        b'{"payload": [{"index": -1, "events": []}]}',
        b'{"payload": [{"index": 1.5, "events": []}]}',
        b'{"payload": [{"index": 1, "commit_timestamp": "x", "events": []}]}',
        *(body([entry(1, {**insert(1), **wrong})]) for wrong in WRONG),
        b'{"payload": [{"index": 1, "events": [{"op": "INSERT", "table": "t", "after": {"id": 1e999}}]}]}',
        b'{"service_id": "\\ud800", "payload": []}',
    ],
)
def test_what_rqlite_does_not_post_is_refused_without_showing_it(content: bytes) -> None:
    with pytest.raises(NotOursError) as caught:
        parse(content)
    assert len(str(caught.value)) < 120


def test_a_refusal_holds_no_value_of_the_body() -> None:
    with pytest.raises(NotOursError) as caught:
        parse(body([entry(1, {**insert(1), "after": {"id": ["canary"]}})]))
    assert str(caught.value) == "payload[0].events[0].after holds a value that SQLite does not have"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "receiver.json", "x" * 201, "ü" * 50])
def test_a_service_that_no_folder_can_be_named_after_is_refused(name: str) -> None:
    with pytest.raises(NotOursError):
        checked_service(name)


@pytest.mark.parametrize("name", ["svc1", "a/b", "../up", "with space", "emoji 🚰", "%2e"])
def test_a_services_folder_lies_in_the_journals(name: str, tmp_path: Path) -> None:
    if name == "../up":
        with pytest.raises(NotOursError):
            checked_service(name)
        return
    assert (tmp_path / folder_of(checked_service(name))).parent == tmp_path


def test_no_two_tables_have_the_same_name_for_orders_and_versions() -> None:
    named = {
        catalog.upstream_id(*parts) for parts in (("a.b", "c"), ("a", "b.c"), ('a"', "b"), ("a", '"b'), ("a", "b"))
    }
    assert len(named) == 5
    assert "a.b" in named


def test_a_frame_lists_its_shapes_by_table_in_runs_of_the_same_columns() -> None:
    window = DeduplicationWindow()
    request = parse(
        body(
            [
                entry(4, insert(1, v=1), insert(2, v=1.5)),
                entry(5, insert(1, "other", v=None)),
                entry(6, {"op": "UPDATE", "table": "t", "new_row_id": 1, "old_row_id": 1, "error": "mismatched"}),
                entry(7, insert(3, v="x", z=None)),
                entry(8, insert(4, v=2)),
            ]
        )
    )
    placed = window.admit(request)
    frame = build(placed, request)
    tables = json.loads(frame.meta)["tables"]
    at = {one.position.commit: str(one.position) for one in placed if one.position.ordinal == 0}
    assert tables["t"]["shapes"] == [
        [at[4], {"id": "i", "v": "fi"}],
        [at[7], {"id": "i", "v": "s", "z": "n"}],
        [at[8], {"id": "i", "v": "i"}],
    ]
    assert (tables["t"]["rows"], tables["t"]["missing"]) == (5, 1)
    assert tables["other"] == {
        "rows": 1,
        "missing": 0,
        "bytes": len(bytes(frame.payload).splitlines(keepends=True)[2]),
        "shapes": [[at[5], {"id": "i", "v": "n"}]],
    }
    assert sum(one["bytes"] for one in tables.values()) == len(frame.payload)


def made(tmp_path: Path, **given: Any) -> RqliteOptions:
    return RqliteOptions.model_validate(
        {"type": "rqlite", **given}, context=OptionContext("p", tmp_path, tmp_path / "state")
    )


def test_options_have_defaults_for_one_machine(tmp_path: Path) -> None:
    options = made(tmp_path, api="http://127.0.0.1:4001/")
    assert (options.listen, options.path, options.api) == ("127.0.0.1:8099", "/cdc", "http://127.0.0.1:4001")
    assert options.journal.path == tmp_path / "state" / "journal"
    assert made(tmp_path, api={"a": "http://a:4001/"}).api == {"a": "http://a:4001"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"listen": "0.0.0.0:8099"}, "beyond this machine"),
        ({"listen": "8099"}, "host:port"),
        ({"listen": "::1:8099"}, "brackets"),
        ({"path": "cdc"}, "must begin with /"),
        ({"path": "/metrics"}, "neither /healthz nor /metrics"),
        ({"api": "http://user:canary@host:4001"}, "api_auth"),
        ({"api": "ftp://host"}, "must be a URL"),
        ({"api": {"svc": "host:4001"}}, "must be a URL"),
        ({"api": "http://host:4001", "api_tls": {"ca": "ca.pem"}}, "no `api` with https"),
        ({"api": "https://host:4001", "api_tls": {"key": "client.key"}}, "`key` needs `cert`"),
        ({"max_requests": 0}, "greater than 0"),
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        made(tmp_path, **given)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("listen", ["0.0.0.0:8099", "[::]:8099", "cdc.example.com:443"])
def test_a_listener_for_other_machines_needs_a_password_or_client_certificates(tmp_path: Path, listen: str) -> None:
    assert made(tmp_path, listen=listen, auth={"username": "u", "password": "p"}).listen == listen
    tls = {"cert": "c", "key": "k"}
    assert made(tmp_path, listen=listen, tls={**tls, "client_ca": "ca"}).listen == listen
    with pytest.raises(ValueError, match="beyond this machine"):
        made(tmp_path, listen=listen, tls=tls)
