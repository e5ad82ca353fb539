"""Keys of AWS's configuration files: found as AWS's own software finds them, or refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.errors import ConfigError
from tailrace.system.aws_profile import AwsProfile, find_profile


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and nothing about AWS in the environment."""
    names = ("ACCESS_KEY_ID", "PROFILE", "CONFIG_FILE", "SHARED_CREDENTIALS_FILE")
    for name in names:
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    return tmp_path / ".aws"


KEYS = "aws_access_key_id = one\naws_secret_access_key = CANARY=\n"


def test_without_files_there_is_no_profile() -> None:
    assert find_profile() is None


def test_the_keys_of_the_default_profile_are_read_again_in_time(home: Path) -> None:
    (home / "credentials").write_text(f"[default]\n{KEYS}")
    (home / "config").write_text("[default]\nregion = eu-west-3\ns3 =\n  max_queue_size = 1000\n")
    found = find_profile()
    assert found == AwsProfile("default")
    assert found.region == "eu-west-3"
    given = found()
    assert given.pop("expires_at") is not None
    assert given == {"access_key_id": "one", "secret_access_key": "CANARY=", "token": None}
    (home / "credentials").write_text("[default]\n" + KEYS.replace("one", "two") + "aws_session_token = t\n")
    assert (found()["access_key_id"], found()["token"]) == ("two", "t")
    assert "CANARY" not in repr(found)


def test_a_profile_is_chosen_by_name_in_either_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "work")
    (home / "config").write_text(f"[default]\nregion = eu-west-3\n[profile work]\n{KEYS}region = eu-west-1\n")
    found = find_profile()
    assert found is not None
    assert (found.name, found.region, found()["access_key_id"]) == ("work", "eu-west-1", "one")
    elsewhere = home / "mine"
    elsewhere.write_text("[work]\n" + KEYS.replace("one", "two"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(elsewhere))
    assert found()["access_key_id"] == "two"


def test_keys_of_the_environment_come_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "credentials").write_text(f"[default]\n{KEYS}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "three")
    assert find_profile() is None


def test_a_profile_without_credentials_leaves_them_to_the_machine(home: Path) -> None:
    (home / "config").write_text("[default]\nregion = eu-west-3\noutput = json\n")
    assert find_profile() is None


@pytest.mark.parametrize("way", ["role_arn", "sso_session", "credential_process"])
def test_a_profile_that_needs_the_software_of_aws_is_refused_with_the_command_that_helps(home: Path, way: str) -> None:
    (home / "config").write_text(f"[default]\n{way} = something\n")
    with pytest.raises(ConfigError, match=f"default has {way}") as refused:
        find_profile()
    assert "aws configure export-credentials --profile default --format env" in str(refused.value.fix)


def test_a_profile_that_is_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "wrok")
    with pytest.raises(ConfigError, match="wrok"):
        find_profile()


def test_a_damaged_file_is_named_and_not_quoted(home: Path) -> None:
    (home / "credentials").write_text("aws_secret_access_key = CANARY\n")
    with pytest.raises(ConfigError, match="credentials cannot be read") as refused:
        find_profile()
    assert "CANARY" not in str(refused.value)


def test_a_profile_whose_keys_are_gone_says_so(home: Path) -> None:
    (home / "credentials").write_text(f"[default]\n{KEYS}")
    found = find_profile()
    (home / "credentials").write_text("")
    assert found is not None
    with pytest.raises(ConfigError, match="no keys any more"):
        found()
