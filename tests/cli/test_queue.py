"""`tailrace queue` as people use it, in processes of their own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.destination.webhook.queue import QueueReader, QueueWriter
from tailrace.errors import DamagedError
from tailrace.testing.endpoint import Reply, WebhookEndpoint, always
from tests.support.runner import command
from tests.support.webhook_queue import batch, ids, numbered, opened


def write_file(folder: Path, url: str) -> Path:
    file = folder / "shop.yaml"
    content = {
        "name": "shop",
        "source": {"type": "postgres", "dsn": "${NOT_NEEDED}"},
        "destination": {
            "type": "webhook",
            "url": url,
            "allow_private": True,
            "retry": {"min": "10ms", "max": "50ms"},
            "leader": {"seconds": "1s"},
        },
        "state": "state",
    }
    file.write_text(yaml.safe_dump(content))
    return file


def fill(folder: Path, count: int) -> Path:
    queue = folder / "state" / "queue"
    with opened(queue) as writer:
        writer.append(batch(0), [numbered(0, count)])
    return queue


def run(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        command("queue", *arguments, "--json"),
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "NOT_NEEDED": "postgresql://shop@localhost/shop", **(environment or {})},
    )
    return done.returncode, json.loads(done.stdout)


def test_status_counts_what_waits_and_needs_no_variable_of_the_file(tmp_path: Path) -> None:
    file = write_file(tmp_path, "${HOOK_URL}")
    assert run("status", str(file))[1]["pending"] == 0
    fill(tmp_path, 1234)
    code, status = run("status", str(file))
    assert code == 0
    assert (status["pending"], status["running"], status["leader"]) == (1234, False, False)


def test_status_of_a_queue_whose_place_is_not_known_is_refused(tmp_path: Path) -> None:
    file = write_file(tmp_path, "stdout")
    content = yaml.safe_load(file.read_text())
    content["destination"]["queue"] = {"path": "${QUEUE}"}
    file.write_text(yaml.safe_dump(content))
    code, answer = run("status", str(file))
    assert code == 2
    assert "needs the environment variable QUEUE" in answer["error"]["message"]
    assert run("status", str(file), environment={"QUEUE": "here"})[1]["queue"] == str(tmp_path / "here")


def test_drain_sends_what_waits_and_a_second_time_there_is_nothing_to_send(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        file = write_file(tmp_path, endpoint.url)
        fill(tmp_path, 1234)
        assert run("drain", str(file)) == (0, {"pending": 0})
        assert sum(len(json.loads(request.body)) for request in endpoint.taken) == 1234
        requests = len(endpoint.requests)
        assert run("drain", str(file)) == (0, {"pending": 0})
        assert len(endpoint.requests) == requests
        assert run("status", str(file))[1]["pending"] == 0


def test_drain_gives_up_in_time_and_loses_nothing(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        endpoint.rule = always(Reply(500))
        file = write_file(tmp_path, endpoint.url)
        fill(tmp_path, 10)
        code, _ = run("drain", str(file), "--timeout", "5")
        assert code == 4
        code, status = run("status", str(file))
        assert status["pending"] == 10
        assert "500" in status["error"]
        endpoint.rule = always(Reply())
        assert run("drain", str(file)) == (0, {"pending": 0})


def test_purge_gives_up_what_waits_but_knows_the_batches_it_held(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        file = write_file(tmp_path, endpoint.url)
        queue = fill(tmp_path, 10)
        assert run("purge", str(file), "--yes") == (0, {"given_up": 10})
        with opened(queue) as writer:
            assert writer.append(batch(0), [numbered(0, 10)]) == 0
            writer.append(batch(1), [numbered(10, 2)])
        assert run("drain", str(file)) == (0, {"pending": 0})
        assert sum(len(json.loads(request.body)) for request in endpoint.taken) == 2


def test_purge_is_the_way_on_after_damage(tmp_path: Path) -> None:
    file = write_file(tmp_path, "stdout")
    queue = tmp_path / "state" / "queue"
    with opened(queue) as writer:
        for number in range(3):
            writer.append(batch(number), [numbered(number * 10, 10)])
    segment = max(queue.glob("*.seg"), key=lambda one: one.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[len(data) // 3] ^= 1
    segment.write_bytes(data)
    assert run("purge", str(file), "--yes")[0] == 0
    with QueueWriter(queue, segment_bytes=1 << 20, max_bytes=1 << 30) as writer:
        writer.append(batch(3), [numbered(30, 1)])
    assert ids(queue, QueueReader(queue).released) == ["public.t:30:0"]


def test_a_file_that_lost_its_header_shows_in_the_status_and_is_passed_by_purge(tmp_path: Path) -> None:
    file = write_file(tmp_path, "stdout")
    queue = fill(tmp_path, 10)
    with opened(queue) as writer:
        writer.append(batch(1), [numbered(10, 1)])
    oldest = min(queue.glob("*.seg"))
    data = bytearray(oldest.read_bytes())
    data[20] ^= 1
    oldest.write_bytes(data)
    code, status = run("status", str(file))
    assert (code, status["pending"]) == (0, None)
    assert "were not delivered" in status["error"]
    assert "queue purge" in status["fix"]
    assert run("drain", str(file))[0] == DamagedError.exit_code
    assert run("purge", str(file), "--yes") == (0, {"given_up": None})
    assert run("status", str(file))[1]["pending"] == 0
    with opened(queue) as writer:
        writer.append(batch(2), [numbered(11, 1)])
    assert run("status", str(file))[1]["pending"] == 1


def test_a_pipeline_without_a_queue_says_so(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "shop",
                "source": {"type": "postgres", "dsn": "postgresql://shop@localhost/shop"},
                "destination": {"type": "delta", "path": "./lake"},
            }
        )
    )
    code, report = run("status", str(file))
    assert code == 2
    assert "has no queue" in json.dumps(report)


@pytest.mark.parametrize("word", ["status", "drain", "purge"])
def test_every_command_has_an_example_in_its_help(word: str) -> None:
    done = subprocess.run(command("queue", word, "--help"), capture_output=True, text=True)
    assert f"tailrace queue {word}" in " ".join(done.stdout.split())
