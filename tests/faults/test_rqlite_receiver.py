"""Faults where rqlite's events come in: kills, damaged journals, rebuilt clusters, planted secrets."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path

import pytest
import urllib3

from tailrace.journal import Cursor
from tailrace.model.change import Position
from tailrace.source.rqlite.receiver import RqliteReceiverOptions
from tailrace.testing.certificate import make_authority
from tailrace.testing.wait import wait_until
from tests.support.rqlite_posting import Entry, Running, body, entry, insert, lines, make_options, running


def ids(journal: Path) -> list[int]:
    return [one["after"]["id"] for one in lines(journal)]


class Leader:
    """Sends entries in order and goes on only after 200, as rqlite does; a new receiver makes no difference to it."""

    def __init__(self, options: RqliteReceiverOptions) -> None:
        self.options = options
        self.acknowledged = 0

    def send(self, count: int, failpoints: str = "") -> None:
        """Send so many batches to a receiver of its own, until they are acknowledged or the receiver dies."""
        receiver = Running(self.options, failpoints)
        try:
            for _ in range(count):
                if receiver.post(self._batch()) == 200:
                    self.acknowledged += 3
        except urllib3.exceptions.HTTPError:
            assert receiver.process.wait() == -signal.SIGKILL
        finally:
            receiver.kill()

    def _batch(self) -> bytes:
        row = self.acknowledged
        entries: list[Entry] = [
            entry(row + 4, insert(row + 1)),
            entry(0, insert(row + 2)),
            entry(row + 5, insert(row + 3)),
        ]
        return body(entries)


@pytest.mark.parametrize("place", ["rqlite.before_append", "rqlite.appended", "journal.before_fsync"])
def test_a_kill_loses_nothing_acknowledged_and_doubles_nothing(tmp_path: Path, place: str) -> None:
    leader = Leader(make_options(tmp_path / "journal"))
    for nth in (1, 4, 2):
        before = leader.acknowledged
        leader.send(10, f"{place}:kill@{nth}")
        # What was killed may be there already, so that one more counts as sent.
        assert leader.acknowledged - before in (3 * (nth - 1), 3 * nth)
        assert ids(tmp_path / "journal")[: leader.acknowledged] == list(range(1, leader.acknowledged + 1))
    leader.send(2)
    assert ids(tmp_path / "journal") == list(range(1, leader.acknowledged + 1))


def test_a_kill_while_frames_are_removed_keeps_what_is_known(tmp_path: Path) -> None:
    options = make_options(tmp_path / "journal")
    wide = "x" * 300_000
    sent = [body([entry(index, insert(index, v=wide))]) for index in range(1, 10)]
    receiver = Running(options, "journal.before_retain:kill@2")
    for content in sent:
        assert receiver.post(content) == 200
    Cursor(receiver.journal / "rqlite", "reader").advance(Position(8, 1))
    assert receiver.process.wait() == -signal.SIGKILL
    receiver.kill()
    with running(options) as receiver:
        for content in sent:
            assert receiver.post(content.replace(b'"n1"', b'"n2"')) == 200
        assert receiver.post(body([entry(10, insert(10))])) == 200
        wait_until(lambda: receiver.status()["services"]["rqlite"]["received"] == 1)
        assert receiver.status()["services"]["rqlite"]["duplicates"] == 9


def test_a_torn_end_is_sent_again(tmp_path: Path) -> None:
    options = make_options(tmp_path / "journal")
    with running(options) as receiver:
        for index in range(1, 6):
            assert receiver.post(body([entry(index, insert(index))])) == 200
        receiver.kill()
    # As if the power had gone in the middle of the next append, which was never answered.
    newest = max((tmp_path / "journal" / "rqlite").glob("*.seg"))
    with newest.open("ab") as file:
        file.write(b"\xf7TrF" + bytes(60))
    with running(options) as receiver:
        for index in range(5, 8):
            assert receiver.post(body([entry(index, insert(index))])) == 200
    assert ids(tmp_path / "journal") == list(range(1, 8))


@pytest.mark.parametrize("at", [0.3, 0.6])
def test_a_damaged_journal_stops_its_cluster_with_the_fix_and_no_other(tmp_path: Path, at: float) -> None:
    options = make_options(tmp_path / "journal")
    with running(options) as receiver:
        for index in range(1, 20):
            for service in ("bad", "good"):
                assert receiver.post(body([entry(index, insert(index))], service=service)) == 200
        receiver.kill()
    file = max((tmp_path / "journal" / "bad").glob("*.seg"))
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 4
    file.write_bytes(content)
    with running(options) as receiver:
        assert receiver.post(body([entry(20, insert(20))], service="bad")) == 503
        assert receiver.post(body([entry(20, insert(20))], service="good")) == 200
        error = receiver.status()["services"]["bad"]["error"]
        assert error["kind"] == "DamagedError"
        assert "tailrace reset" in error["fix"]
        assert receiver.get("/healthz").status == 503
        assert receiver.status()["error"] is None


def test_a_rebuilt_cluster_stops_and_a_restart_does_not_let_it_pass(tmp_path: Path) -> None:
    options = make_options(tmp_path / "journal")
    with running(options) as receiver:
        for index in range(3, 30):
            assert receiver.post(body([entry(index, insert(index))])) == 200
        assert receiver.post(body([entry(4, insert(1, "another"))])) == 503
    with running(options) as receiver:
        # By now the rebuilt cluster has grown past what was known of the old one.
        assert receiver.post(body([entry(31, insert(31))])) == 503
        assert receiver.status()["services"]["rqlite"]["error"]["position"] == str(Position(4, 0))
    assert ids(tmp_path / "journal") == list(range(3, 30))


def test_no_secret_shows_in_logs_status_metrics_or_the_process_list(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "authority")
    key = authority.key_file.read_text().splitlines()[1]
    options = make_options(
        tmp_path / "journal",
        username="rq",
        password="canary-password",
        cert=str(authority.cert_file),
        key=str(authority.key_file),
    )
    assert "canary-password" not in repr(options)
    with running(options) as receiver:
        receiver.pool = urllib3.PoolManager(ca_certs=str(authority.ca_file), retries=False)
        right = urllib3.make_headers(basic_auth="rq:canary-password")
        wrong = urllib3.make_headers(basic_auth="rq:canary-guess")
        row = insert(1, v="canary-row")
        assert receiver.post(body([entry(1, row)]), headers=right) == 200
        assert receiver.post(body([entry(1, insert(2, v="canary-row"))]), headers=right) == 503
        assert receiver.post(b'{"payload": "canary-row"}', headers=right) == 400
        assert receiver.post(body([entry(1, row)]), headers=wrong) == 401
        shown = [receiver.get("/metrics", headers=right).data, receiver.get("/healthz").data]
        process = Path(f"/proc/{receiver.process.pid}")
        shown += [(process / name).read_bytes() for name in ("cmdline", "environ")]
        wait_until(lambda: "400" in receiver.status()["answers"])
        receiver.stop()
        shown += [json.dumps(receiver.status()).encode(), receiver.log.read_bytes()]
        small = (file for file in receiver.journal.rglob("*") if file.is_file() and file.suffix != ".seg")
        shown += [file.read_bytes() for file in small]
        for text, secret in itertools.product(shown, ("canary", key, right["authorization"].split()[1])):
            assert secret.encode() not in text
