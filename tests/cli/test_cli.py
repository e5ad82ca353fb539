from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import IO, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tailrace.cli import app
from tailrace.cli.error import EXIT_CODES
from tailrace.config.pipeline import load
from tailrace.errors import TailraceError, name_file
from tailrace.state import RunnerLock, SourceStatus, SqliteStore, StateStore, TableState
from tests.support.removal import removals_fail

CANARY = "c4nary-Pa55"
SRC = str(Path(__file__).parents[2] / "src")

# A source and a destination as another package would bring them.
PLUGIN = """
from dataclasses import dataclass
from typing import Literal
import pyarrow as pa
from tailrace.destination import Destination, Written
from tailrace.errors import Finding, UnavailableError
from tailrace.option.value import Secret, TypedOptions
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.source import Source
from tailrace.source.option import SourceOptions

class TapOptions(SourceOptions):
    type: Literal["tap"]
    token: Secret
    mood: str = "ready"

@dataclass(frozen=True)
class Tap(Source):
    Options = TapOptions

    def check(self):
        if self.options.mood == "down":
            raise UnavailableError("the tap does not answer", fix="turn it on")
        if self.options.mood == "broken":
            raise RuntimeError(f"login with {self.options.token.reveal()} failed")
        bad = Finding("error", "tap", "it is dry", "fill it\\nand wait")
        return [Finding("ok", "tap", "it runs"), *([bad] if self.options.mood == "dry" else [])]

    def tables(self):
        columns = (Column("id", pa.int64(), False, "bigint"),)
        keyed = TableSchema(TableName("public", "a"), columns, ("id",))
        return [keyed, TableSchema(TableName("public", "log"), columns)]

    def follow(self, schemas, *, is_receiving=False):
        raise NotImplementedError

    def read(self, split):
        return iter(())

    def progress(self, offset):
        return []

class Sink(Destination):
    type: Literal["sink"] = "sink"

    def check(self, tables):
        if tables is None:
            return [Finding("warning", "sink", "tables are not known")]
        return [Finding("warning", "sink", f"{len(tables)} tables will come")]

    def write_changes(self, batch):
        return Written()
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    site = tmp_path / "site"
    info = site / "tap_and_sink-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "tap_and_sink.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tap-and-sink\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tailrace.sources]\ntap = tap_and_sink:Tap\n[tailrace.destinations]\nsink = tap_and_sink:Sink\n"
    )
    monkeypatch.syspath_prepend(str(site))
    invalidate_caches()
    yield
    sys.modules.pop("tap_and_sink", None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path, "ready")


def write(folder: Path, mood: str) -> Path:
    path = folder / "shop.yaml"
    source = f"{{type: tap, token: {CANARY}, mood: {mood}}}"
    path.write_text(f"name: shop\nsource: {source}\ndestination: {{type: sink}}\nstate: ./state\n")
    return path


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert CANARY not in result.output
    return result


def make_state(file: Path) -> StateStore:
    config = load(file)
    store = SqliteStore(config.name, config.state).open()
    store.add_table("1", "public.a")
    store.fail_table("1", "the key is gone", fix="ALTER TABLE public.a ADD PRIMARY KEY (id)")
    store.put_source_status(SourceStatus("streaming", journal_bytes=12_300))
    return store


def test_help_comes_at_once_and_loads_nothing_heavy() -> None:
    program = (
        "import sys; from tailrace.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'pyspark', 'pyarrow', 'psycopg', 'deltalake', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    seconds: dict[str, list[float]] = {program: [], "import typer.rich_utils": []}
    for _, (each, taken) in itertools.product(range(3), seconds.items()):
        timed = f"{each}\nimport sys, time; print(time.process_time(), file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, env=environment())
        assert done.returncode == 0, done.stderr
        assert ("resync" in done.stdout) == (each == program)
        taken.append(float(done.stderr))
    # Seconds of the processor, because the machine may be busy. Most of it is Python and typer.
    helping, bare = map(min, seconds.values())
    assert helping < 2.5 * bare


def test_reading_a_file_does_not_load_spark(tmp_path: Path) -> None:
    path = tmp_path / "shop.yaml"
    path.write_text("name: s\nsource: {type: postgres, dsn: x}\ndestination: {type: delta, path: l}\n")
    program = (
        "import sys; from tailrace.config.pipeline import load\n"
        "heavy = {'pyspark', 'psycopg', 'deltalake', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        f"load({str(path)!r})\n"
        "assert 'pyspark' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("plugin")
def test_only_running_a_pipeline_loads_spark(file: Path, tmp_path: Path) -> None:
    with make_state(file) as store:
        keep_letter(store)
    commands = [
        *(["tables"], ["check"], ["status"], ["metrics"], ["pause"], ["resume"], ["retry"], ["resync", "public.a"]),
        *(["skip", "public.a"], ["errors list"], ["reset", "--yes"]),
    ]
    program = (
        "import sys; from tailrace.cli import app\n"
        f"for name, *rest in {commands!r}:\n"
        f"    app([*name.split(), {str(file)!r}, *rest], standalone_mode=False)\n"
        "    assert 'pyspark' not in sys.modules, name"
    )
    paths = {"PYTHONPATH": os.pathsep.join([SRC, str(tmp_path / "site")])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment() | paths, check=False
    )
    assert done.returncode == 0, done.stderr


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SRC}


def every_command(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from every_command(command, (*words, name))


@pytest.mark.parametrize("words", list(every_command(typer.main.get_command(app))), ids=" ".join)
def test_every_command_has_help_with_an_example_that_could_be_run(words: tuple[str, ...]) -> None:
    result = invoke(*words, "--help")
    assert result.exit_code == 0
    assert f"Example: {' '.join(('tailrace', *words))}" in result.output
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    example = shlex.split(re.sub(r"\. Exit codes:.*| > .*", "", command.epilog).removeprefix("Example: "))
    command, rest = typer.main.get_command(app), example[1:]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    command.make_context(command.name, rest).close()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str) -> None:
    for words, wanted in (("tailrace sta", "status"), ("tailrace run --on", "--once")):
        asked = {
            "_TAILRACE_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
            "_TYPER_COMPLETE_ARGS": words,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        program = [str(Path(sys.executable).with_name("tailrace"))]
        done = subprocess.run(program, capture_output=True, text=True, env=environment() | asked, check=False)
        assert wanted in done.stdout, done.stderr


def test_every_exit_code_of_an_error_is_documented() -> None:
    def kinds(kind: type[TailraceError]) -> Iterator[type[TailraceError]]:
        yield kind
        for inner in kind.__subclasses__():
            yield from kinds(inner)

    assert {kind.exit_code for kind in kinds(TailraceError)} | {0, 130, 141} == set(EXIT_CODES)
    shown = " ".join(invoke("--help").output.split())
    assert "8 a table is in error" in shown


def test_a_wrong_file_exits_with_2_and_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"nam: shop\nsource: {{type: postgres, dsn: 'postgres://u:{CANARY}@h/d'}}\n")
    result = invoke("check", path)
    assert result.exit_code == 2
    assert "line 1, nam is not a key here; did you mean name?" in result.stderr
    assert "fix: " in result.stderr
    assert result.stdout == ""
    answer = json.loads(invoke("check", path, "--json").stdout)["error"]
    assert (answer["kind"], answer["exit_code"]) == ("ConfigError", 2)
    assert (answer["code"], answer["docs"]) == ("config", "docs/errors.md#config")
    assert "rename `nam` to `name`" in answer["fix"]


@pytest.mark.usefixtures("plugin")
def test_a_check_that_finds_nothing_wrong_exits_with_0(file: Path) -> None:
    result = invoke("check", file)
    assert result.exit_code == 0
    assert "ok      tap: it runs\nwarning sink: 2 tables will come\n" in result.stdout


@pytest.mark.usefixtures("plugin")
def test_a_check_that_finds_an_error_exits_with_3(tmp_path: Path) -> None:
    path = write(tmp_path, "dry")
    result = invoke("check", path)
    assert result.exit_code == 3
    assert "error   tap: it is dry\n        fix: fill it\n        and wait\n" in result.stdout
    answer = json.loads(invoke("check", path, "--json").stdout)
    assert (answer["ok"], [finding["level"] for finding in answer["findings"]]) == (False, ["ok", "error", "warning"])


@pytest.mark.usefixtures("plugin")
def test_a_check_finds_a_state_folder_that_cannot_be_made(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != file.parent)
    result = invoke("check", file)
    assert result.exit_code == 3
    assert f"error   state: {file.parent} is not writable\n        fix: let this user write there" in result.stdout


@pytest.mark.usefixtures("plugin")
def test_an_upstream_that_is_down_exits_with_4(tmp_path: Path) -> None:
    result = invoke("check", write(tmp_path, "down"))
    assert result.exit_code == 4
    assert result.stderr == "error[unavailable]: the tap does not answer\n  fix: turn it on\n"


@pytest.mark.usefixtures("plugin")
def test_an_error_as_json_is_one_line_as_the_events_of_a_run_are(tmp_path: Path) -> None:
    [line] = invoke("run", write(tmp_path, "down"), "--json").stdout.splitlines()
    assert json.loads(line)["error"]["exit_code"] == 4


@pytest.mark.usefixtures("plugin")
def test_an_unexpected_error_is_reported_in_a_line_without_its_text(tmp_path: Path) -> None:
    result = invoke("check", write(tmp_path, "broken"))
    assert result.exit_code == 1
    assert "unexpected RuntimeError in " in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("plugin")
def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = invoke("check", write(tmp_path, "down"), "--debug")
    assert result.exit_code == 4
    assert "Traceback" in result.stderr


@pytest.mark.usefixtures("plugin")
def test_tables_are_listed_with_their_keys(file: Path) -> None:
    assert invoke("tables", file).stdout.splitlines() == [
        "public.a  key id  1 columns",
        "public.log  key none: append-only  1 columns",
    ]
    answer = json.loads(invoke("tables", file, "--json").stdout)["tables"]
    assert (answer[0]["state"], answer[0]["since"], answer[0]["reason"], answer[0]["paused_at"]) == (None,) * 4
    assert answer[0]["columns"] == [{"name": "id", "type": "int64", "upstream_type": "bigint", "nullable": False}]


@pytest.mark.usefixtures("plugin")
def test_tables_that_were_followed_are_listed_with_their_state(file: Path) -> None:
    with make_state(file) as store:
        store.add_table("2", "public.log")
        store.pause_table("2")
        since = store.tables()[0].since[TableState.ERRORED]
        assert invoke("tables", file).stdout.splitlines() == [
            "public.a  key id  1 columns  Errored",
            "    the key is gone",
            "public.log  key none: append-only  1 columns  Init, paused",
        ]
        first, second = json.loads(invoke("tables", file, "--json").stdout)["tables"]
    assert (first["state"], first["since"], first["reason"]) == ("Errored", since.isoformat(), "the key is gone")
    assert (second["state"], second["reason"]) == ("Init", None)
    assert second["paused_at"] is not None


@pytest.mark.usefixtures("plugin")
def test_status_before_the_first_run_says_so(file: Path) -> None:
    result = invoke("status", file)
    assert result.exit_code == 2
    assert "has not run yet" in result.stderr
    assert not (file.parent / "state").exists()


@pytest.mark.usefixtures("plugin")
def test_status_shows_each_table_and_its_error_while_a_runner_works(file: Path) -> None:
    with make_state(file), RunnerLock(file.parent / "state"):
        result = invoke("status", file)
        answer = json.loads(invoke("status", file, "--json").stdout)
    assert result.exit_code == 0
    assert f"shop · process {os.getpid()} · streaming · journal 12.3 kB" in result.stdout
    assert "public.a: the key is gone\n  fix: ALTER TABLE public.a ADD PRIMARY KEY (id)" in result.stdout
    assert answer["tables"][0]["state"] == "Errored"
    assert answer["runner"]["pid"] == os.getpid()


@pytest.mark.usefixtures("plugin")
def test_a_resync_is_left_for_the_runner(file: Path) -> None:
    with make_state(file) as store:
        asked = invoke("resync", file, "public.a")
        assert asked.stdout.startswith(
            "public.a will be copied again; its old rows stay until the new copy is complete"
        )
        assert "at its next start" in asked.stdout
        with RunnerLock(file.parent / "state"):
            answer = json.loads(invoke("resync", file, "public.a", "--json").stdout)
        assert (answer["table"], answer["runner"]) == ("public.a", os.getpid())
        assert [(request.kind, request.table) for request in store.open_requests()] == [("resync", "public.a")]


@pytest.mark.usefixtures("plugin")
def test_a_resync_of_an_unknown_table_is_refused(file: Path) -> None:
    with make_state(file) as store:
        result = invoke("resync", file, "public.b")
        assert result.exit_code == 2
        assert "has no table public.b; did you mean public.a?" in result.stderr
        assert store.open_requests() == []


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("kind", ["pause", "resume", "retry"])
def test_what_is_asked_for_all_tables_is_asked_for_each(file: Path, kind: str) -> None:
    with make_state(file) as store:
        store.add_table("2", "public.log")
        for each in ("1", "2"):
            store.fail_table(each, "why") if kind == "retry" else store.recover_table(each)
            store.pause_table(each) if kind == "resume" else None
        assert [line.split()[0] for line in invoke(kind, file).stdout.splitlines()] == ["public.a", "public.log"]
        answer = json.loads(invoke(kind, file, "public.log", "--json").stdout)
        assert (answer["kind"], answer["table"], answer["runner"]) == (kind, "public.log", None)
        assert len(json.loads(invoke(kind, file, "--json").stdout)["requests"]) == 2
        # The same request again, while it is open, is the same one.
        assert [(asked.kind, asked.table) for asked in store.open_requests()] == [
            (kind, "public.a"),
            (kind, "public.log"),
        ]


@pytest.mark.usefixtures("plugin")
def test_nothing_is_asked_for_tables_that_need_none_of_it(file: Path) -> None:
    with make_state(file) as store:
        store.recover_table("1")
        store.add_table("2", "public.log")
        store.pause_table("2")
        for kind, table, answer in (
            ("retry", None, "no table of pipeline p is in error: nothing to do"),
            ("retry", "public.a", "public.a is not in error: nothing to do"),
            ("resume", "public.a", "public.a is not paused: nothing to do"),
            ("pause", "public.log", "public.log is paused already: nothing to do"),
        ):
            arguments = [kind, file, *([table] if table else [])]
            done = invoke(*arguments)
            assert (done.exit_code, done.stdout.strip().replace("pipeline shop", "pipeline p")) == (0, answer)
            assert json.loads(invoke(*arguments, "--json").stdout)["requests"] == []
        assert store.open_requests() == []
        # Of all tables, only those are asked for that it does something for.
        assert invoke("resume", file).stdout.startswith("public.log will go on")
        assert invoke("pause", file).stdout.split()[0] == "public.a"
        # A pause that waits can be taken back, and so can a resume.
        assert invoke("resume", file, "public.a").stdout.startswith("public.a will go on")
        assert invoke("pause", file, "public.log").stdout.startswith("public.log will be paused")


def test_the_version_is_printed_as_programs_do(file: Path) -> None:
    assert invoke("--version").stdout == invoke("version").stdout != ""


def test_help_names_flags_alone(file: Path) -> None:
    for command in ([], ["run"], ["tape"], ["tape", "show"], ["errors", "list"], ["queue", "purge"]):
        page = invoke(*command, "--help").stdout
        assert "--help" in page
        assert "bool" not in page.lower()


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("kind", ["pause", "resume", "retry", "skip", "resync"])
def test_nothing_can_be_asked_of_a_pipeline_that_never_ran(file: Path, kind: str) -> None:
    result = invoke(kind, file, "public.a")
    assert result.exit_code == 2
    assert "has not run yet" in result.stderr
    assert not (file.parent / "state").exists()


def keep_letter(store: StateStore) -> int:
    raw = f"I{CANARY}".encode()
    letter = store.put_dead_letter(
        "1", "public.a", "0" * 32, kind="UnfitError", reason="column v does not fit", raw=raw
    )
    return letter.id


@pytest.mark.usefixtures("plugin")
def test_dead_letters_are_listed_and_shown_without_their_values(file: Path, tmp_path: Path) -> None:
    with make_state(file) as store:
        assert invoke("errors", "list", file).stdout == "no change waits\n"
        number = keep_letter(store)
        assert f"{number}  public.a  at {'0' * 32}  waiting, tried 1 time" in invoke("errors", "list", file).stdout
        answer = json.loads(invoke("errors", "show", file, number, "--json").stdout)
        assert (answer["table"], answer["reason"], answer["bytes"]) == (
            "public.a",
            "column v does not fit",
            len(CANARY) + 1,
        )
        assert "column v does not fit" in invoke("errors", "show", file, number, "--raw", tmp_path / "change").stdout
        assert (tmp_path / "change").read_bytes() == f"I{CANARY}".encode()
        assert invoke("errors", "show", file, 99).exit_code == 2
        refused = invoke("errors", "show", file, number, "--raw", tmp_path / "no folder" / "change")
        assert (refused.exit_code, "name another file with --raw" in refused.stderr) == (2, True)
        store.settle_dead_letter(number, "skipped")
        assert json.loads(invoke("errors", "list", file, "--json").stdout) == {"errors": []}
        assert len(json.loads(invoke("errors", "list", file, "--all", "--json").stdout)["errors"]) == 1


@pytest.mark.usefixtures("plugin")
def test_dead_letters_are_retried_and_skipped_by_their_number(file: Path) -> None:
    with make_state(file) as store:
        refused = invoke("skip", file, "public.a")
        assert refused.exit_code == 2
        assert "no change of public.a waits to be skipped" in refused.stderr
        number = keep_letter(store)
        assert invoke("errors", "retry", file, number).exit_code == 0
        assert invoke("errors", "skip", file, number).exit_code == 0
        assert invoke("skip", file, "public.a").exit_code == 0
        assert [(asked.kind, asked.table, asked.argument) for asked in store.open_requests()] == [
            ("retry", "public.a", None),
            ("skip", "public.a", str(number)),
            ("skip", "public.a", None),
        ]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("command", "message", "fix"),
    [
        ("verify", "a source of `type: tap` cannot be read as a whole", "the method `read_table`"),
        ("queue status", "the destination sink has no queue", "`destination: {type: webhook}`"),
        ("queue drain", "the destination sink has no queue", "`destination: {type: webhook}`"),
        ("maintain", "a destination of type sink has nothing to maintain", "tailrace run shop.yaml"),
        ("queue purge", "the destination sink has no queue", "`destination: {type: webhook}`"),
        ("receive", "nothing is pushed to a source of type tap", "`tailrace run shop.yaml`"),
        ("prepare", "a source of type tap needs nothing to be installed", "tailrace run shop.yaml"),
    ],
)
def test_a_command_for_what_the_source_or_destination_cannot_do_is_refused_with_the_fix(
    file: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str, fix: str
) -> None:
    monkeypatch.chdir(file.parent)
    result = invoke(*command.split(), file.name, "--json")
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["kind"]) == (2, "ConfigError")
    assert message in error["message"]
    assert fix in error["fix"]


@pytest.mark.usefixtures("plugin")
def test_metrics_of_a_destination_without_a_queue_have_none(file: Path) -> None:
    make_state(file).close()
    figures = invoke("metrics", file).stdout
    assert 'tailrace_up{pipeline="shop"} 1.0' in figures
    assert "tailrace_queue" not in figures


@pytest.mark.usefixtures("plugin")
def test_a_fix_names_the_file_so_that_it_can_be_run_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "my shop"
    folder.mkdir()
    file = write(folder, "ready")
    with make_state(file) as store:
        fix = "tailrace resync FILE public.a"
        store.fail_table("1", "the rows are gone", fix=fix)
        store.put_dead_letter("1", "public.a", "0" * 32, kind="UnfitError", reason="it does not fit", fix=fix)
    refused = invoke("resync", file, "public.b")
    assert f"`tailrace status '{file}'` lists its tables" in refused.stderr
    named = f"tailrace resync '{file}' public.a"
    assert f"fix: {named}" in " ".join(invoke("status", file).stdout.split())
    assert [table["fix"] for table in json.loads(invoke("status", file, "--json").stdout)["tables"]] == [named]
    assert [letter["fix"] for letter in json.loads(invoke("errors", "list", file, "--json").stdout)["errors"]] == [
        named
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tailrace reset FILE, then tailrace run FILE", "tailrace reset shop.yaml, then tailrace run shop.yaml"),
        ("`tailrace errors skip FILE ID` passes over it", "`tailrace errors skip shop.yaml ID` passes over it"),
        ("tailrace sqlite enable FILE", "tailrace sqlite enable FILE"),
        ("a file called FILE", "a file called FILE"),
    ],
)
def test_only_commands_that_take_the_pipelines_file_are_given_its_name(text: str, named: str) -> None:
    assert name_file(text, Path("shop.yaml")) == named


def test_the_script_to_install_is_json_where_that_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text("name: shop\nsource: {type: postgres, dsn: host=a}\ndestination: {type: delta, path: l}\n")
    script = invoke("prepare", file, "--print-sql").stdout
    assert json.loads(invoke("prepare", file, "--print-sql", "--json").stdout) == {"sql": script.removesuffix("\n")}


@pytest.mark.usefixtures("plugin")
def test_a_reset_forgets_everything_but_is_refused_while_the_pipeline_runs(file: Path) -> None:
    checkpoint = file.parent / "state" / "checkpoint"
    with make_state(file) as store:
        checkpoint.mkdir()
        before = store.pipeline()
        with RunnerLock(file.parent / "state"):
            assert invoke("reset", file, "--yes").exit_code == 5
        assert invoke("reset", file, "--yes", "--json").exit_code == 0
        assert not checkpoint.exists()
        assert store.tables() == []
        after = store.pipeline()
        assert after.epoch != before.epoch
        assert after.run > before.run
        assert invoke("reset", file, "--yes").exit_code == 0
    assert CliRunner().invoke(app, ["reset", str(file)], input="n\n").exit_code == 1
    asked = CliRunner().invoke(app, ["reset", str(file), "--json"], input="n\n")
    assert "Forget" in asked.stderr
    assert "Forget" not in asked.stdout, "the question stands beside the data, not in it"


@pytest.mark.usefixtures("plugin")
def test_a_reset_that_cannot_remove_the_checkpoint_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_state(file):
        commits = file.parent / "state" / "checkpoint" / "commits"
        commits.mkdir(parents=True)
        (commits / "0").touch()
        with removals_fail(monkeypatch):
            refused = invoke("reset", file, "--yes")
        assert refused.exit_code == 4
        assert "belongs to this user" in refused.stderr
        assert invoke("reset", file, "--yes").exit_code == 0
        assert not commits.exists()


@pytest.mark.usefixtures("plugin")
def test_no_secret_reaches_the_state(file: Path) -> None:
    make_state(file).close()
    files = [path for path in (file.parent / "state").rglob("*") if path.is_file()]
    assert files
    assert all(CANARY.encode() not in path.read_bytes() for path in files)


def test_a_demo_in_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    result = invoke("demo", "--folder", tmp_path / "taken")
    assert result.exit_code == 2
    assert "fix: choose another --folder" in result.stderr


def test_the_schema_is_json() -> None:
    assert "PostgresOptions" in json.loads(invoke("schema").stdout)["$defs"]


def test_the_version_names_the_parts() -> None:
    assert invoke("version").stdout.startswith("tailrace ")
    assert {"tailrace", "pyspark", "python"} <= set(json.loads(invoke("version", "--json").stdout))


_SERVICE = """
import sys, threading
from tailrace.cli.run import drained_by_signals
stop, asked = threading.Event(), threading.Event()
def drain():
    print("drained", flush=True)
    if sys.argv[1] == "obeys": stop.set()
    asked.set()
class Remote:
    def __del__(self):
        print("finalizing", flush=True)
        threading.Event().wait(60)
try:
    with drained_by_signals(drain, lambda text: None):
        print("runs", flush=True)
        if sys.argv[1] == "finalizes":
            asked.wait(60)
            del [Remote()][0]
        try:
            while not stop.wait(60): pass
        finally:
            if sys.argv[1] == "fails": raise ValueError("half an answer is left on the line")
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
print("ended", flush=True)
"""


def start_service(manner: str) -> subprocess.Popen[str]:
    service = subprocess.Popen(
        [sys.executable, "-c", _SERVICE, manner],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    assert said_by(service) == "runs"
    return service


def said_by(service: subprocess.Popen[str]) -> str:
    assert service.stdout is not None
    return service.stdout.readline().strip()


def end(service: subprocess.Popen[str]) -> int:
    code = service.wait()
    assert service.stdout is not None
    service.stdout.close()
    return code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains(number: signal.Signals) -> None:
    service = start_service("obeys")
    service.send_signal(number)
    assert [said_by(service), said_by(service)] == ["drained", "ended"]
    assert end(service) == 0


@pytest.mark.parametrize("manner", ["dallies", "fails"])
def test_the_second_signal_stops_at_once(manner: str) -> None:
    service = start_service(manner)
    service.send_signal(signal.SIGTERM)
    assert said_by(service) == "drained"
    service.send_signal(signal.SIGINT)
    assert said_by(service) == "interrupted"
    assert end(service) == 130


def test_a_second_signal_that_comes_in_a_finalizer_is_not_lost() -> None:
    service = start_service("finalizes")
    service.send_signal(signal.SIGTERM)
    assert [said_by(service), said_by(service)] == ["drained", "finalizing"]
    service.send_signal(signal.SIGTERM)
    assert said_by(service) == "interrupted"
    assert end(service) == 130


def run_into(output: IO[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from tailrace.cli import main; main()", *map(str, arguments)],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        check=False,
    )


# The output of a command, the help that typer prints, and an error as JSON.
OUTPUTS = [["schema"], ["version", "--json"], ["status", "--help"], ["status", "none.yaml", "--json"]]


@pytest.mark.parametrize("arguments", OUTPUTS)
def test_a_command_whose_output_pipe_is_closed_ends_without_a_message(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        result = run_into(closed, *arguments)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("arguments", OUTPUTS)
def test_an_output_on_a_full_disk_exits_with_4_and_the_fix(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        result = run_into(full, *arguments)
    assert result.returncode == 4
    assert result.stderr.splitlines() == [
        "error[unavailable]: the output cannot be written: No space left on device",
        "  fix: free some space there, or write the output elsewhere",
    ]


def test_what_the_encoding_of_the_output_lacks_is_escaped_as_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    result = subprocess.run(
        [sys.executable, "-c", "from tailrace.cli import main; main()", "status", "ü🦫.yaml", "--json"],
        capture_output=True,
        check=False,
    )
    assert result.returncode == 2
    assert "ü🦫.yaml" in json.loads(result.stdout.decode("latin-1"))["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "message", "command"),
    [
        (["status", "--json"], "Missing argument 'FILE'", "status"),
        (["status", "shop.yaml", "--jsn", "--json"], "No such option: --jsn", "status"),
        (["errors", "show", "shop.yaml", "one", "--json"], "Invalid value for 'ID'", "errors show"),
        (["statsu", "shop.yaml", "--json"], "No such command 'statsu'", ""),
        (["--json", "status", "shop.yaml"], "No such option: --json", ""),
    ],
)
def test_a_wrong_call_is_reported_as_json_where_the_call_asks_for_json(
    arguments: list[str], message: str, command: str
) -> None:
    result = invoke(*arguments)
    [line] = result.stdout.splitlines()
    answer = json.loads(line)["error"]
    assert (result.exit_code, answer["kind"], answer["exit_code"], result.stderr) == (2, "ConfigError", 2, "")
    assert message in answer["message"]
    assert f"{command} --help`" in answer["fix"]


def test_a_wrong_call_is_reported_as_text_elsewhere() -> None:
    result = invoke("status")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Missing argument 'FILE'" in result.stderr


def test_findings_have_no_color_where_none_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text(
        "{name: app, source: {type: sqlite, path: none.db}, destination: {type: sqlite, path: there.db}}"
    )
    results = [
        CliRunner().invoke(app, ["check", str(tmp_path / "app.yaml")], color=True, env={"NO_COLOR": wish})
        for wish in ("", "1")
    ]
    assert ["\x1b" in one.stdout for one in results] == [True, False]


@pytest.mark.usefixtures("plugin")
def test_an_unexpected_error_of_a_run_is_kept_in_the_state_folder_and_the_screen_names_it(tmp_path: Path) -> None:
    result = invoke("run", write(tmp_path, "broken"))
    kept = tmp_path / "state" / "last-error.txt"
    assert result.exit_code == 1
    assert str(kept) in result.stderr
    assert "builtins.RuntimeError" in kept.read_text()
    assert CANARY not in result.output + kept.read_text()
