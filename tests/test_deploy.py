"""The files of `deploy/` do what the documentation says of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tailrace.advice import ADVICE
from tests.support.database import PostgresDatabase
from tests.support.invocation import invoke

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "deploy/systemd/tailrace@.service"
IMAGE = ROOT / "deploy/container/Containerfile"
SECURITY = ROOT / "docs/security.md"


def options(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)


def test_the_service_is_not_restarted_where_only_a_person_can_help() -> None:
    # TailraceError itself stands for the unexpected, which a restart may well cure; another runner may end.
    hopeless = {
        kind.exit_code
        for kind, advice in ADVICE.items()
        if advice.stops == "pipeline"
        and advice.retry != "timed"
        and kind.__name__ not in ("TailraceError", "OwnedError")
    }
    assert [int(code) for code in options("RestartPreventExitStatus")[0].split()] == sorted(hopeless)


def test_the_service_has_a_user_of_its_own_and_folders_to_write_to() -> None:
    assert (options("User"), options("StateDirectory"), options("ProtectSystem")) == (
        ["tailrace"],
        ["tailrace"],
        ["strict"],
    )
    assert int(options("TimeoutStopSec")[0]) >= 120
    # Java compiles while it runs.
    assert options("MemoryDenyWriteExecute") == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_understands_the_service(tmp_path: Path) -> None:
    program = tmp_path / "tailrace"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "tailrace@shop.service"
    # Neither the program nor the user of the deployment exist on this machine.
    text = (
        UNIT.read_text("utf-8")
        .replace("/opt/tailrace/bin/tailrace", str(program))
        .replace("User=tailrace", "User=root")
    )
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if unit.name in line] == []


def test_the_image_runs_tailrace_without_root() -> None:
    lines = [line for line in IMAGE.read_text("utf-8").splitlines() if not line.startswith("#")]
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["1000"]
    assert any(line.startswith("ENTRYPOINT") and '"tailrace"' in line for line in lines)
    # Everything that the build copies from the repository is there.
    copied = [
        path for line in lines if line.startswith("COPY ") and "--from" not in line for path in line.split()[1:-1]
    ]
    assert copied
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_the_rights_of_the_security_page_are_enough(
    database: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = SECURITY.read_text("utf-8")
    grants = next(block for block in re.findall(r"^```sql\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    file = tmp_path / "shop.yaml"
    file.write_text(next(block for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)))
    monkeypatch.setenv("SHOP_DSN", database.server.dsn(database.name, user="tailrace"))
    database.run(
        "CREATE TABLE customers (id bigint PRIMARY KEY, name text)",
        "CREATE TABLE orders (id bigint PRIMARY KEY, total numeric(10, 2))",
        "INSERT INTO orders VALUES (1, 2.50)",
    )
    try:
        database.run(*(statement for statement in grants.split(";\n") if statement.strip()))
        found = invoke("check", file)
        assert found.exit_code == 0, found.output
        assert "public.orders: key (id)" in found.output
        assert database.rows(
            "SELECT rolsuper, rolcreatedb, rolcreaterole FROM pg_roles WHERE rolname = 'tailrace'"
        ) == [(False, False, False)]
    finally:
        database.run("DROP OWNED BY tailrace", "DROP ROLE tailrace")


@pytest.mark.parametrize("file", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda file: file.name)
def test_a_workflow_runs_commands_that_exist_with_least_rights(file: Path) -> None:
    flow = yaml.safe_load(file.read_text("utf-8"))
    assert flow["permissions"] == {"contents": "read"}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    runs = [step["run"] for job in flow["jobs"].values() for step in job["steps"] if "run" in step]
    assert any(run == ".ci/run" for run in runs)
    assert [target for run in runs for target in re.findall(r"make ([\w-]+)", run) if target not in targets] == []
