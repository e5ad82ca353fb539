"""`tailrace metrics`: what Prometheus reads is what the state holds."""

from __future__ import annotations

import re
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import urllib3
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner, Result

from tailrace.cli import app, prometheus
from tailrace.config.pipeline import load
from tailrace.model.change import end_of
from tailrace.state import BatchRecord, RunnerLock, SourceStatus, SqliteStore, StateStore, TableUpdate
from tailrace.state.state_machine import WAY
from tests.support.runner import command

HOSTILE = 'public."a""b\\'
DELTA = "{type: delta, path: ./lake}"


def write(folder: Path, destination: str = DELTA) -> Path:
    file = folder / "shop.yaml"
    file.write_text(
        f"name: shop\nsource: {{type: postgres, dsn: '${{UNSET}}'}}\ndestination: {destination}\nstate: state"
    )
    return file


def make_state(file: Path) -> StateStore:
    config = load(file, connects=False)
    store = SqliteStore(config.name, config.state).open()
    store.add_table("1", "public.orders")
    store.add_table("2", HOSTILE)
    update = TableUpdate("1", WAY[1:], rows_copied=12_345_678, changes_applied=5, position=str(end_of(1000)))
    store.apply_batch(BatchRecord(7, {"lsn": 1000}, str(end_of(1000)), 15, 100, 2.0), [update])
    store.fail_table("2", "the key is gone", fix="ALTER TABLE")
    store.put_source_status(SourceStatus("streaming", str(end_of(1500)), 77, str(end_of(3000))))
    return store


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """Every value by the name of its metric, its table and its state."""
    return {
        (sample.name, sample.labels.get("table", ""), sample.labels.get("state", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["pipeline"] == "shop"
    }


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_figures_are_those_of_the_status_and_need_no_variable_of_the_source(tmp_path: Path) -> None:
    file = write(tmp_path)
    with make_state(file), RunnerLock(tmp_path / "state"):
        found = samples(invoke("metrics", file).stdout)
    assert found["tailrace_running", "", ""] == 1
    assert found["tailrace_batch", "", ""] == 7
    assert found["tailrace_journal_bytes", "", ""] == 77
    names = ("seconds", "rows", "bytes")
    assert [found[f"tailrace_batch_{name}", "", ""] for name in names] == [2.0, 15, 100]
    assert found["tailrace_lag_bytes", "", ""] == 2000
    assert found["tailrace_table_rows_copied_total", "public.orders", ""] == 12_345_678
    assert found["tailrace_table_state", "public.orders", "Ready"] == 1
    assert found["tailrace_table_state", "public.orders", "Errored"] == 0
    assert found["tailrace_table_state", HOSTILE, "Errored"] == 1
    assert ("tailrace_table_lag_bytes", HOSTILE, "") not in found
    without_runner = samples(invoke("metrics", file).stdout)
    assert without_runner["tailrace_running", "", ""] == 0


def test_a_pipeline_that_never_ran_has_one_figure_that_says_so(tmp_path: Path) -> None:
    assert samples(invoke("metrics", write(tmp_path)).stdout) == {("tailrace_up", "", ""): 0}


def test_a_queue_that_waits_is_among_the_figures(tmp_path: Path) -> None:
    file = write(tmp_path, "{type: webhook, url: '${HOOK_URL}'}")
    make_state(file).close()
    found = samples(invoke("metrics", file).stdout)
    assert found["tailrace_queue_pending", "", ""] == 0
    assert found["tailrace_queue_lag_seconds", "", ""] == 0
    assert found["tailrace_queue_running", "", ""] == 0


@contextmanager
def serving(file: Path, listen: str = "127.0.0.1:0") -> Iterator[str]:
    """Where the figures are served within the block. A signal ends it without output."""
    serving = command("metrics", str(file), "--listen", listen)
    with subprocess.Popen(serving, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            yield process.stdout.readline().removeprefix("serving ").strip()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_figures_are_served_until_a_signal_also_before_the_first_run(tmp_path: Path, listen: str) -> None:
    file = write(tmp_path)
    with serving(file, listen) as url:
        assert samples(urllib3.request("GET", url, retries=False).data.decode()) == {("tailrace_up", "", ""): 0}
        make_state(file).close()
        answer = urllib3.request("GET", url, retries=False)
        assert (answer.status, answer.headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
        assert samples(answer.data.decode())["tailrace_table_state", "public.orders", "Ready"] == 1


def test_an_address_that_is_invalid_or_taken_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path)
    assert invoke("metrics", file, "--listen", "9187").exit_code == 2
    assert invoke("metrics", file, "--listen", "192.0.2.1:9187").exit_code == 4


def test_an_invalid_host_name_is_a_wrong_argument(tmp_path: Path) -> None:
    refused = invoke("metrics", write(tmp_path), "--listen", "a..b:9187")
    assert refused.exit_code == 2
    assert "names no host" in refused.stderr


def test_a_client_that_hangs_up_leaves_no_traceback(tmp_path: Path) -> None:
    with serving(write(tmp_path)) as url:
        place = urllib3.util.parse_url(url)
        for said in (b"", b"GET /metrics HTTP/1.1\r\n"):
            with socket.create_connection((place.host, place.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(said)
        assert urllib3.request("GET", url, retries=False).status == 200


def test_a_table_that_was_dropped_and_created_again_has_each_line_once(tmp_path: Path) -> None:
    file = write(tmp_path)
    with make_state(file) as store:
        store.add_table("0", "public.orders")
    text = invoke("metrics", file).stdout
    lines = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    assert samples(text)["tailrace_table_state", "public.orders", "Init"] == 1


def test_every_figure_is_on_the_page_of_the_commands(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text("utf-8")
    documented = re.findall(r"`(tailrace_\w+)`", page)
    assert documented == [
        figure.name
        for figure in (
            prometheus.UP,
            *prometheus.PIPELINE,
            prometheus.PHASE,
            prometheus.SLOT,
            *prometheus.TABLE,
            prometheus.STATE,
            *prometheus.QUEUE,
        )
    ]


def test_what_is_not_known_has_no_line(tmp_path: Path) -> None:
    file = write(tmp_path)
    SqliteStore("shop", load(file, connects=False).state).open().close()
    found = samples(invoke("metrics", file).stdout)
    assert found["tailrace_running", "", ""] == 0
    assert ("tailrace_batch", "", "") not in found
