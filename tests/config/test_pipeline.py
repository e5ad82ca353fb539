from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.pipeline import from_dict, json_schema, load
from tailrace.config.registry import open_destination
from tailrace.destination import Destination, TableBatch, Written
from tailrace.destination.delta.option import DeltaOptions
from tailrace.errors import ConfigError
from tailrace.journal import ObjectPlace
from tailrace.option.table import TableOptions
from tailrace.option.value import Dsn, parse_duration, parse_size
from tailrace.source.postgres.option import PostgresOptions

CANARY = "c4nary-Pa55"
SHOP = """\
name: shop
source: {type: postgres, dsn: ${SHOP_DSN}, publication: shop}
tables: {include: ["public.*"]}
destination: {type: delta, path: ./lake}
state: ./.tailrace/shop
"""
SMALL = {"name": "shop", "source": {"type": "postgres", "dsn": "host=a"}, "destination": {"type": "delta", "path": "l"}}


@pytest.fixture(autouse=True)
def dsn(monkeypatch: pytest.MonkeyPatch) -> str:
    value = f"postgresql://me:{CANARY}@db.example:5432/shop?sslmode=require"
    monkeypatch.setenv("SHOP_DSN", value)
    return value


def write(folder: Path, text: str) -> Path:
    path = folder / "shop.yaml"
    path.write_text(text)
    return path


def refused(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(write(folder, text))
    assert CANARY not in str(error.value)
    return str(error.value)


def test_the_file_of_the_documentation_is_read(tmp_path: Path, dsn: str) -> None:
    config = load(write(tmp_path, SHOP))
    assert isinstance(config.source, PostgresOptions)
    assert isinstance(config.destination, DeltaOptions)
    assert config.source.dsn.reveal() == dsn
    assert (config.source.publication, config.source.slot) == ("shop", "tailrace_shop")
    assert config.state == tmp_path / ".tailrace/shop"
    assert config.source.journal.path == tmp_path / ".tailrace/shop/journal"
    assert config.destination.path == str(tmp_path / "lake")


def test_defaults_come_from_the_name(tmp_path: Path) -> None:
    config = from_dict({**SMALL, "name": "my-shop"}, folder=tmp_path)
    assert isinstance(config.source, PostgresOptions)
    assert (config.source.publication, config.source.slot) == ("my-shop", "tailrace_my_shop")
    assert config.state == tmp_path / ".tailrace/my-shop"
    assert config.tables.select(["a.b", "c.d"]) == ["a.b", "c.d"]


def test_human_sizes_durations_and_off_are_understood(tmp_path: Path) -> None:
    text = SHOP.replace("publication: shop", "heartbeat: off, journal: {max_bytes: 1.5GB}, copy: {chunk_bytes: 64MiB}")
    config = load(write(tmp_path, text + "batch: {interval: 500ms}\n"))
    assert isinstance(config.source, PostgresOptions)
    assert config.source.heartbeat is None
    assert config.source.journal.max_bytes == 1_500_000_000
    assert config.source.copying.chunk_bytes == 64 * 1024 * 1024
    assert config.batch.interval == 0.5


def test_a_journal_in_an_object_store_has_room_for_the_log_of_a_long_copy(tmp_path: Path) -> None:
    def bytes_of(journal: str) -> int:
        text = SHOP.replace("publication: shop", f"journal: {{{journal}}}")
        source = load(write(tmp_path, text)).source
        assert isinstance(source, PostgresOptions)
        return source.journal.max_bytes

    assert bytes_of("segment_bytes: 64MB") == 20_000_000_000
    assert bytes_of("path: s3://bucket/journal") == 1_000_000_000_000
    assert bytes_of("path: s3://bucket/journal, max_bytes: 1GB") == 1_000_000_000


@pytest.mark.parametrize(
    ("text", "size"),
    [("32MB", 32_000_000), ("1GiB", 2**30), ("1_000", 1000), ("7 kb", 7000), (5, 5), ("0.3MB", 300_000)],
)
def test_a_size_is_bytes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1 apple", True, None, 1.5, "1e9"])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("2m", 120), ("7d", 604_800), (3, 3), ("1.5h", 5400)])
def test_a_duration_is_seconds(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_a_missing_variable_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOP_DSN")
    said = refused(tmp_path, SHOP)
    assert "line 2, source.dsn needs the environment variable SHOP_DSN, which is not set" in said
    assert "export SHOP_DSN=" in said


def test_loading_a_file_without_connecting_needs_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOP_DSN")
    assert load(write(tmp_path, SHOP), connects=False).state == tmp_path / ".tailrace/shop"
    with pytest.raises(ConfigError, match="STATE_DIR"):
        load(write(tmp_path, SHOP.replace("./.tailrace/shop", "${STATE_DIR}")), connects=False)


def test_loading_a_file_without_connecting_needs_no_variable_of_any_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOP_DSN")
    polled = "{type: poll, dsn: ${SHOP_DSN}}\ntables: {defaults: {updated_at: changed_at}}"
    pushed = "{type: rqlite, listen: ${LISTEN}, max_requests: ${MOST}, api: ${API}}"
    for source in (polled, pushed):
        text = f"name: shop\nsource: {source}\ndestination: {{type: delta, path: ./lake}}\n"
        assert load(write(tmp_path, text), connects=False).store_address.state_dir == tmp_path / ".tailrace/shop"
        with pytest.raises(ConfigError, match="is not set"):
            load(write(tmp_path, text))


@pytest.mark.parametrize(
    "destination",
    ["{type: delta, path: ./lake, compact: {files: ${MOST}}}", "{type: webhook, url: '${URL}', timeout: '${LONGEST}'}"],
)
def test_loading_a_file_without_connecting_needs_no_variable_of_the_destination(
    tmp_path: Path, destination: str
) -> None:
    text = f"name: shop\nsource: {{type: postgres, dsn: host=a}}\ndestination: {destination}\n"
    assert load(write(tmp_path, text), connects=False).store_address.state_dir == tmp_path / ".tailrace/shop"
    with pytest.raises(ConfigError, match="is not set"):
        load(write(tmp_path, text))


def test_a_default_stands_in_for_a_variable_that_is_unset_or_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SHOP.replace("./lake", "${LAKE:-/data/a, b}")
    for empty in (False, True):
        if empty:
            monkeypatch.setenv("LAKE", "")
        config = load(write(tmp_path, text))
        assert isinstance(config.destination, DeltaOptions)
        assert config.destination.path == "/data/a, b"


def test_a_value_from_the_environment_cannot_add_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "x, path: /etc}\nstate: /etc\n# ${HOME} \ue000"
    monkeypatch.setenv("SHOP_DSN", evil)
    config = load(write(tmp_path, SHOP))
    assert isinstance(config.source, PostgresOptions)
    assert config.source.dsn.reveal() == evil
    assert config.state == tmp_path / ".tailrace/shop"


def test_two_dollars_stand_for_one(tmp_path: Path) -> None:
    config = load(write(tmp_path, SHOP.replace("./lake", "/data/$${SHOP_DSN}")))
    assert isinstance(config.destination, DeltaOptions)
    assert config.destination.path == "/data/${SHOP_DSN}"


def test_every_problem_is_reported_with_its_line_and_a_near_miss_is_named(tmp_path: Path) -> None:
    said = refused(
        tmp_path,
        """\
name: Shop!
source:
  type: postgres
  dsn: ${SHOP_DSN}
  publicaton: shop
  journal: {max_bytes: lots, segment: 3}
tables: {include: [orders]}
destinaton: {type: delta, path: ./lake}
batch: {max_rows: -3}
""",
    )
    assert "line 1, name may hold only a-z, 0-9, _ and -" in said
    assert "line 5, source.publicaton is not a key here; did you mean publication?" in said
    assert "line 6, source.journal.max_bytes is not a size" in said
    assert "line 6, source.journal.segment is not a key here; did you mean segment_bytes?" in said
    assert "line 7, tables.include.0 is not a pattern" in said
    assert "line 8, destinaton is not a key here; did you mean destination?" in said
    assert "line 9, batch.max_rows should be greater than or equal to 1" in said
    assert "line 1, destination is missing" in said
    assert "rename `publicaton` to `publication`" in said
    assert len(said.splitlines()) < 24


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{type: postgers, dsn: x}", "source.type names no source type that is installed; did you mean postgres?"),
        ("{dsn: x}", "source.type is missing; it can be poll, postgres, rqlite, slatedb, sqlite, tape, turso"),
        ("{type: postgres}", "source.dsn is missing"),
        ("5", "source must be a section of keys"),
        ("{type: postgres, dsn: 5}", "source.dsn must be a text"),
        ("{type: postgres, dsn: x, slot: My-Slot}", "source.slot may hold only a-z, 0-9 and _"),
        ("{type: postgres, dsn: x, acknowledge: never}", "source.acknowledge should be 'journal' or 'applied'"),
    ],
)
def test_a_wrong_source_is_explained(tmp_path: Path, section: str, expected: str) -> None:
    text = f"name: shop\nsource: {section}\ndestination: {{type: delta, path: l}}\n"
    assert expected in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "does not hold keys and values"),
        ("- a\n", "does not hold keys and values"),
        ("name: shop\nname: other\n", "line 2, name is there twice"),
        (f"name: shop\n  source: {{dsn: {CANARY}\n", "is not YAML: line 2"),
        (f"name: !{CANARY} x\n", "is not YAML: line 1"),
        (f"name: *{CANARY}\n", "is not YAML: line 1"),
        (f"name: {CANARY}\x00\n", "is not YAML"),
        ("a: &a [*a]\n", "is not YAML"),
        (f"name: shop\nsource: {{type: {CANARY}}}\n", "names no source type"),
        (f"name: {CANARY}\nstate: [{CANARY}]\n", "name may hold only"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_quotes_nothing(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refused(tmp_path, text)


def test_a_name_that_is_too_long_for_its_slot_is_reported_as_such(tmp_path: Path) -> None:
    text = SHOP.replace("name: shop", f"name: {'a' * 60}")
    assert "source.slot made of the pipeline's name is longer than 63 bytes; set it, or" in refused(tmp_path, text)
    load(write(tmp_path, text.replace("publication: shop", "publication: shop, slot: short")))


@pytest.mark.parametrize("state", ["./taken", "./taken/deeper"])
def test_a_file_where_the_state_should_be_is_refused_at_once(tmp_path: Path, state: str) -> None:
    (tmp_path / "taken").touch()
    text = SHOP.replace("./.tailrace/shop", state)
    assert f"state needs a folder, and {tmp_path / 'taken'} is a file" in refused(tmp_path, text)


def test_a_state_folder_that_cannot_be_accessed_is_refused(tmp_path: Path) -> None:
    text = SHOP.replace("./.tailrace/shop", "./" + "a" * 300)
    assert "state is out of reach: File name too long; choose another path" in refused(tmp_path, text)


def test_a_journal_may_be_in_an_object_store_and_its_keys_stay_secret(tmp_path: Path) -> None:
    journal = {"path": "s3://bucket/journal/", "storage_options": {"secret_access_key": CANARY}}
    source: dict[str, Any] = {"type": "postgres", "dsn": "x"}
    config = from_dict({**SMALL, "source": {**source, "journal": journal}}, folder=tmp_path)
    assert isinstance(config.source, PostgresOptions)
    place = config.source.journal.place
    assert (str(place), CANARY in repr(config), CANARY in repr(place)) == ("s3://bucket/journal", False, False)
    assert isinstance(place, ObjectPlace)
    assert place.options == {"secret_access_key": CANARY}
    assert config.source.journal.local_folder(config.state) == config.state / "journal"
    for local in ((tmp_path / "my journal").as_uri(), "./my journal"):
        config = from_dict({**SMALL, "source": {**source, "journal": {"path": local}}}, folder=tmp_path)
        assert isinstance(config.source, PostgresOptions)
        assert config.source.journal.place == tmp_path / "my journal"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("source: {type: postgres, dsn: x, journal: {path: ftp://b/j}}", "a URL that begins with s3://, gs://"),
        ("source: {type: postgres, dsn: x, journal: {path: s3:///j}}", "names a bucket"),
        ("source: {type: postgres, dsn: x, journal: {path: ./j, storage_options: {a: b}}}", "`path` is a local folder"),
        ("source: {type: rqlite, journal: {path: s3://b/j}}", "keeps its journal in a folder"),
        ("source: {type: postgres, dsn: x}\nstate: s3://b/state", "store: {type: postgres"),
        ("source: {type: sqlite, path: s3://b/app.db}", "must be a local path, not a URL"),
    ],
)
def test_a_url_where_a_path_is_wanted_is_refused_with_what_to_do(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refused(tmp_path, f"name: shop\n{text}\ndestination: {{type: delta, path: ./lake}}\n")
    assert not (tmp_path / "s3:").exists()


def test_a_state_that_is_no_path_is_refused(tmp_path: Path) -> None:
    assert "state must be a path, as text" in refused(tmp_path, SHOP.replace("./.tailrace/shop", "5"))


def test_a_file_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        load(tmp_path / "none.yaml")


def test_a_file_in_another_encoding_is_to_be_saved_as_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_bytes("name: caf\u00e9".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8") as refused:
        load(file)
    assert refused.value.fix == "save it as UTF-8"


def test_no_secret_shows_in_text_or_json(tmp_path: Path) -> None:
    text = SHOP.replace("path: ./lake", f"path: s3://b/lake, storage_options: {{key: {CANARY}}}")
    config = load(write(tmp_path, text))
    assert CANARY not in repr(config) + str(config) + config.model_dump_json() + str(config.model_dump())
    assert "postgresql://me:***@db.example:5432/shop" in repr(config)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("dsn", "masked"),
    [
        ("postgres://u:S3C@h:5432/db?password=S3C", "postgres://u:***@h:5432/db"),
        ("postgres://h/db", "postgres://h/db"),
        ("host=h port=5 user=u password=S3C dbname=db", "host=h port=5 user=u password=*** dbname=db"),
        ("host=h password='S3C host=x' user=u", "host=h password=*** user=u"),
        ("host=h password='S\\'3C' user=u", "host=h password=*** user=u"),
        ("postgres://u:S3@C@h/db", "***"),
        ("postgres://u:S3/C@h/db", "***"),
        ("postgres://u:S3?C@h/db", "***"),
        ("password=S3 C host=h", "***"),
        ("S3C", "***"),
    ],
)
def test_a_connection_string_shows_only_what_is_surely_harmless(dsn: str, masked: str) -> None:
    assert str(Dsn(dsn)) == masked


@given(st.text(alphabet="ab:@/?#&='\\ %.[],", min_size=1, max_size=12))
def test_no_password_however_odd_is_shown(odd: str) -> None:
    password = f"S3{odd}C4"
    for dsn in (f"postgres://user:{password}@host/db", f"host=h user=u password={password} dbname=db"):
        shown = str(Dsn(dsn))
        assert "S3" not in shown
        assert "C4" not in shown


def test_tables_are_chosen_by_pattern() -> None:
    tables = TableOptions(include=["public.*", 'odd."a.b"'], exclude=["public.tmp_*", "*.secret"])
    names = ["public.orders", "public.tmp_1", "public.secret", "publicity.x", 'odd."a.b"', "odd.c"]
    assert tables.select(names) == ["public.orders", 'odd."a.b"']
    assert TableOptions(include=["public.*", "sales.ordres"]).idle_patterns(names) == ["sales.ordres"]


def test_a_setting_of_a_table_that_nothing_honours_is_refused(tmp_path: Path) -> None:
    text = SHOP.replace('["public.*"]', '["public.*"], settings: {public.orders: {exclude_columns: [card]}}')
    assert "line 3, tables.settings.public.orders.exclude_columns is not a key here" in refused(tmp_path, text)


def test_the_json_schema_takes_what_a_file_may_hold() -> None:
    models = json_schema()["$defs"]

    def words(model: str, key: str) -> list[object]:
        ways = models[model]["properties"][key]["anyOf"]
        return [word for way in ways for word in (*way.get("enum", []), *([way["const"]] if "const" in way else []))]

    assert words("DeltaOptions", "compact") == words("DeltaOptions", "vacuum") == ["off", False]
    assert words("TableSettings", "deletes") == ["disabled", "off", False]
    conf = models["SparkOptions"]["properties"]["conf"]["additionalProperties"]
    assert [way["type"] for way in conf["anyOf"]] == ["string", "number", "boolean"]


def test_the_json_schema_takes_a_reference_where_a_number_or_a_truth_value_is() -> None:
    models = json_schema()["$defs"]
    reference = {"type": "string", "pattern": r"\$\{"}
    seen = set()
    for name, model in models.items():
        for key, schema in model.get("properties", {}).items():
            ways = schema.get("anyOf", [schema])
            kinds = {way.get("type") for way in ways if "const" not in way}
            if kinds & {"integer", "number", "boolean"}:
                seen |= kinds
                assert reference in ways or {"type": "string"} in ways, (name, key)
    assert {"integer", "boolean"} <= seen


def test_the_json_schema_knows_every_key() -> None:
    schema = json_schema()
    keys = {"name", "source", "tables", "destination", "destinations", "state", "store", "batch", "spark", "alerts"}
    assert set(schema["properties"]) == keys
    assert schema["required"] == ["name", "source"]
    assert schema["oneOf"] == [{"required": ["destination"]}, {"required": ["destinations"]}]
    assert {"dsn", "publication", "copy"} <= set(schema["$defs"]["PostgresOptions"]["properties"])
    assert schema["$defs"]["PostgresOptions"]["additionalProperties"] is False


def test_settings_of_a_table_that_is_not_named_in_full_are_refused(tmp_path: Path) -> None:
    text = SHOP.replace('["public.*"]', '["public.*"], settings: {orders: {schema_changes: stop}}')
    assert "line 3, tables.settings takes names in full, as schema.table" in refused(tmp_path, text)


def test_a_table_takes_what_its_own_errors_leave_open_from_the_defaults(tmp_path: Path) -> None:
    errors = "defaults: {errors: {attempts: 9}}, settings: {public.orders: {errors: {retry: none}}}"
    tables = load(write(tmp_path, SHOP.replace('["public.*"]', f'["public.*"], {errors}'))).tables
    held = tables.settings_of("public.orders").errors
    assert (held.retry, held.attempts) == ("none", 9)


class Sink(Destination):
    type: Literal["sink"] = "sink"
    path: str

    def write_changes(self, batch: TableBatch) -> Written:
        return Written()


def test_an_object_may_stand_for_the_section_of_a_destination() -> None:
    sink = Sink(path="./somewhere")
    config = from_dict({**SMALL, "destination": sink})
    assert open_destination(config) is sink


def test_alerts_take_one_way_and_are_on_unless_they_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALERT_URL", f"https://alert.example:8443/{CANARY}")
    config = load(write(tmp_path, SHOP + 'alerts: {webhook: {url: "${ALERT_URL}"}, lag: {above: 1m}, slot: off}\n'))
    assert config.alerts is not None
    assert list(config.alerts.conditions) == ["lag", "errored", "unavailable", "stopped"]
    assert config.alerts.lag is not None
    assert (config.alerts.lag.above, config.alerts.lag.for_) == (60.0, 60.0)
    assert "https://alert.example:8443" in repr(config)
    assert CANARY not in repr(config)


@pytest.mark.parametrize(
    ("alerts", "said"),
    [
        ("{}", "needs one of `webhook` and `command`"),
        ("{command: [page], webhook: {url: 'http://a/'}}", "needs one of"),
        ("{command: [page], repeat: 5s}", "`repeat` must be 60s or longer"),
        ("{command: []}", "alerts.command"),
        ("{command: page}", "alerts.command"),
        ("{webhook: {url: 'ftp://a/b'}}", "must be an http:// or https:// URL"),
        (f"{{webhook: {{url: 'https://me:{CANARY}@a/b'}}}}", "must not hold a user or password"),
        (f"{{webhook: {{url: 'https://a/b', headers: {{'X:': {CANARY}}}}}}}", "is not the name of a header"),
        ("{command: [page], lag: {abve: 1m}}", "did you mean above"),
    ],
)
def test_alerts_that_could_not_work_are_refused(tmp_path: Path, alerts: str, said: str) -> None:
    assert said in refused(tmp_path, SHOP + f"alerts: {alerts}\n")


def test_a_command_that_connects_to_nothing_needs_no_variable_of_alerts(tmp_path: Path) -> None:
    text = SHOP + 'alerts: {webhook: {url: "${NO_SUCH_URL}"}, lag: {above: "${NO_SUCH_LIMIT}"}}\n'
    assert load(write(tmp_path, text), connects=False).alerts is None
    assert "NO_SUCH_URL" in refused(tmp_path, text)
