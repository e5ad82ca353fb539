"""The demo, as it runs right after an installation; `make demo` is the same with more rows."""

from __future__ import annotations

import json
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
