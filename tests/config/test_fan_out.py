"""The list `destinations` of a pipeline's file: what each entry becomes, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.config.pipeline import MemberConfig, all_from_dict, from_dict, json_schema, load, load_all
from tailrace.config.registry import open_source, require_apart
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import DeltaOptions
from tailrace.destination.webhook.option import WebhookOptions
from tailrace.errors import ConfigError, PipelinePlace, name_file

LAKE = {"name": "lake", "type": "delta", "path": "./lake"}
HOOK = {"name": "hook", "type": "webhook", "url": "stdout"}


def write(folder: Path, **sections: Any) -> Path:
    file = folder / "shop.yaml"
    rest = {"name": "shop", "source": {"type": "postgres", "dsn": "host=a"}, "state": "state"}
    file.write_text(yaml.safe_dump({**rest, **sections}))
    return file


def refused(folder: Path, **sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load_all(write(folder, **sections))
    return str(error.value)


def test_each_destination_is_a_pipeline_below_the_one_of_the_file(tmp_path: Path) -> None:
    lake, hook = load_all(write(tmp_path, destinations=[LAKE, HOOK]))
    assert isinstance(lake, MemberConfig)
    assert (lake.name, lake.member, lake.state) == ("shop.lake", "lake", tmp_path / "state/destinations/lake")
    assert isinstance(lake.destination, DeltaOptions)
    assert lake.destination.path == str(tmp_path / "lake")
    assert isinstance(hook.destination, WebhookOptions)
    assert hook.destination.queue.path == tmp_path / "state/destinations/hook/queue"
    assert (lake.store_address.name, lake.store_address.state_dir) == (lake.name, lake.state)
    assert pickle.loads(pickle.dumps(lake)) == lake


def test_all_read_one_journal_each_as_a_reader_of_its_own(tmp_path: Path) -> None:
    sources = [open_source(config) for config in load_all(write(tmp_path, destinations=[LAKE, HOOK]))]
    assert [source.folder for source in sources] == [tmp_path / "state/journal"] * 2
    assert [source.context.reader for source in sources] == ["pipeline lake", "pipeline hook"]
    assert all(source.context.is_pipeline for source in sources)
    assert {source.context.name for source in sources} == {"shop"}


def test_a_file_with_one_destination_is_as_it_was(tmp_path: Path) -> None:
    file = write(tmp_path, destination={"type": "delta", "path": "./lake"})
    [config] = load_all(file)
    assert config == load(file)
    assert type(config).__name__ == "PipelineConfig"
    assert (config.name, config.member, config.state) == ("shop", None, tmp_path / "state")
    assert open_source(config).context.reader == "pipeline"
    with pytest.raises(ConfigError, match="has one destination, without a name"):
        load(file, destination="lake")


def test_one_of_several_is_named_or_asked_for(tmp_path: Path) -> None:
    file = write(tmp_path, destinations=[LAKE, HOOK])
    assert load(file, destination="hook").member == "hook"
    with pytest.raises(ConfigError, match=r"has several destinations: lake, hook\n.*--destination lake"):
        load(file)
    with pytest.raises(ConfigError, match="has no destination hok; did you mean hook"):
        load(file, destination="hok")
    alone = write(tmp_path, destinations=[LAKE])
    with pytest.raises(ConfigError, match="--destination lake"):
        load(alone)
    with pytest.raises(ConfigError, match="use FanOut"):
        from_dict(yaml.safe_load(file.read_text()))


def test_a_fix_names_the_destination_where_the_command_is_about_one() -> None:
    place = PipelinePlace.of(Path("my shop.yaml"), "shop.lake")
    assert name_file("tailrace resync FILE public.a", place) == (
        "tailrace resync 'my shop.yaml' --destination lake public.a"
    )
    assert name_file("tailrace reset FILE, then tailrace run FILE", place) == (
        "tailrace reset 'my shop.yaml' --destination lake, then tailrace run 'my shop.yaml'"
    )
    assert name_file("tailrace errors list FILE", PipelinePlace.of(Path("a"), "shop")) == "tailrace errors list a"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"destination": {"type": "delta", "path": "a"}, "destinations": [LAKE]}, "cannot be next to `destination`"),
        ({"destinations": []}, "must be a list of destinations"),
        ({"destinations": {"lake": LAKE}}, "must be a list of destinations"),
        ({"destinations": ["lake"]}, "destinations.0 must be a section of keys"),
        ({"destinations": [{"type": "delta", "path": "a"}]}, "destinations.0.name is missing"),
        ({"destinations": [LAKE, {**HOOK, "name": "lake"}]}, "destinations.1.name is there twice"),
        ({"destinations": [{**LAKE, "name": "a.b"}]}, "destinations.0.name may hold only a-z, 0-9, _ and -"),
        ({"destinations": [{**LAKE, "name": 7}]}, "destinations.0.name may hold only"),
        ({"destinations": [LAKE, {"name": "b", "type": "delta"}]}, "destinations.1.path is missing"),
        ({"destinations": [LAKE, {"name": "b", "type": "dleta"}]}, "did you mean delta"),
        ({"destinations": [{**LAKE, "pth": 1}]}, "destinations.0.pth is not a key here; did you mean path"),
        ({}, "destination is missing"),
    ],
)
def test_a_list_that_is_wrong_is_refused_with_its_place(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    assert message in refused(tmp_path, **sections)


def test_what_is_wrong_with_the_rest_is_said_once(tmp_path: Path) -> None:
    assert refused(tmp_path, destinations=[LAKE, HOOK], batch={"max_rows": 0}).count("max_rows") == 1


def test_a_variable_of_one_destination_is_needed_only_to_connect(tmp_path: Path) -> None:
    file = write(tmp_path, destinations=[LAKE, {**HOOK, "url": "https://a/${TOKEN}"}])
    assert [each.member for each in load_all(file, connects=False, environment={})] == ["lake", "hook"]
    with pytest.raises(ConfigError, match=r"destinations\.1\.url needs the environment variable TOKEN"):
        load_all(file, environment={})


def test_two_replicas_in_one_place_are_refused_and_two_streams_of_events_are_not(tmp_path: Path) -> None:
    both = load_all(write(tmp_path, destinations=[LAKE, {**LAKE, "name": "again"}]))
    with pytest.raises(ConfigError, match="lake and again both write to delta"):
        require_apart(both)
    require_apart(load_all(write(tmp_path, destinations=[HOOK, {**HOOK, "name": "again"}])))


def test_a_program_gives_destinations_as_objects(tmp_path: Path) -> None:
    made = DeltaDestination(path=str(tmp_path / "lake"))
    [config] = all_from_dict(
        {"name": "shop", "source": {"type": "postgres", "dsn": "host=a"}, "destinations": [("lake", made)]}
    )
    assert config.destination is made


def test_the_json_schema_takes_either_and_not_both() -> None:
    schema = json_schema()
    assert schema["oneOf"] == [{"required": ["destination"]}, {"required": ["destinations"]}]
    listed = schema["properties"]["destinations"]["items"]["discriminator"]["mapping"]
    one = schema["properties"]["destination"]["discriminator"]["mapping"]
    assert listed.keys() == one.keys()
    for type_, reference in listed.items():
        named, plain = (schema["$defs"][each.rpartition("/")[2]] for each in (reference, one[type_]))
        assert named["properties"].keys() == {"name", *plain["properties"]}
        assert named["required"] == ["name", *plain.get("required", [])]
        assert named["additionalProperties"] is False
