"""The demo, as it runs right after an installation; `make demo` is the same with more rows."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.support.runner import command


def test_the_demo_copies_follows_and_compares(tmp_path: Path) -> None:
    demo = command("demo", "--folder", str(tmp_path / "demo"), "--rows", "500", "--seconds", "3", "--json")
    done = subprocess.run(demo, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    end = json.loads(done.stdout[done.stdout.index("\n{\n") :])
    assert end["equal"]
    assert end["rows"].keys() >= {"public.orders", "public.order_items", "public.customers", "public.documents"}
    assert all(end["rows"].values())
    assert min(end["traffic"][kind] for kind in ("insert", "update", "delete")) > 0


def test_a_demo_without_a_terminal_can_be_killed_and_goes_on_in_few_lines(tmp_path: Path) -> None:
    words = command("demo", "--folder", str(tmp_path / "demo"), "--rows", "500", "--seconds")
    with subprocess.Popen([*words, "600"], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert any("from now on every change follows" in line for line in demo.stdout)
        demo.kill()
    done = subprocess.run([*words, "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 35
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 110
    assert any("rows in 6 tables were copied before" in line for line in lines)
    assert any(re.search(r"as a page: http://127\.0\.0\.1:\d+/$", line) for line in lines)
    assert any("rows are equal" in line for line in lines)
    placed = next(line.split() for line in lines if line.startswith("  placed"))
    assert int(placed[1].replace(",", "")) > 0
    steps = [re.fullmatch(r"(  \S+ (?:status|dashboard|demo) .*\S)  +(\S.*)", line) for line in lines[-3:]]
    assert len({step.start(2) for step in steps if step}) == 1, "what each does begins at one column"
    assert "http://127.0.0.1:8470/" in lines[-2]
    assert CHATTER.search(done.stderr) is None


CHATTER = re.compile(r"WARNING: |Setting default log level|incubator")
"""What Spark and Java say at their start."""
