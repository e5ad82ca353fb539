"""Keys of a profile of AWS's configuration files: delta-rs reads them, and the library for conditional writes does not.

A profile that has keys is used, the one that `AWS_PROFILE` names or `default`. One that stands for a role, a single
sign-on or a program needs AWS's own software: it is refused with the command that turns it into variables.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tailrace.errors import ConfigError

_LASTS = timedelta(minutes=5)
"""How long keys are used before the files are read again: programs that log in write new ones there."""
_OTHER_WAYS = ("role_arn", "sso_session", "sso_start_url", "credential_process", "credential_source", "login_session")


@dataclass(frozen=True)
class AwsProfile:
    """A profile that has keys. Calling it gives them as they are in the files now."""

    name: str

    @property
    def region(self) -> str | None:
        return _read(self.name).get("region")

    def __call__(self) -> dict[str, Any]:
        found = _read(self.name)
        if not _has_keys(found):
            raise ConfigError(f"the AWS profile {self.name} has no keys any more", fix="log in again")
        return {
            "access_key_id": found["aws_access_key_id"],
            "secret_access_key": found["aws_secret_access_key"],
            "token": found.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + _LASTS,
        }


def find_profile() -> AwsProfile | None:
    """The profile whose keys count; None where the environment has keys, or no profile says anything about them.

    Raises ConfigError for a profile that does not exist, and for one that has no keys of its own.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return None
    chosen = os.environ.get("AWS_PROFILE")
    name = chosen or "default"
    found = _read(name)
    if _has_keys(found):
        return AwsProfile(name)
    if way := next((way for way in _OTHER_WAYS if way in found), None):
        raise ConfigError(
            f"the AWS profile {name} has {way} and no keys, which tailrace cannot use",
            fix=f'eval "$(aws configure export-credentials --profile {name} --format env)" before tailrace, or let the'
            " machine or pod have the role",
        )
    if chosen and not found:
        raise ConfigError(
            f"AWS_PROFILE names {name}, which is in no configuration file of AWS", fix="correct or unset it"
        )
    return None


def _has_keys(found: Mapping[str, str]) -> bool:
    return "aws_access_key_id" in found and "aws_secret_access_key" in found


def _read(name: str) -> dict[str, str]:
    """What the two files say about a profile. The one for credentials wins, as in AWS's own software."""
    sections = {"AWS_CONFIG_FILE": "default" if name == "default" else f"profile {name}"}
    sections["AWS_SHARED_CREDENTIALS_FILE"] = name
    files = {"AWS_CONFIG_FILE": "config", "AWS_SHARED_CREDENTIALS_FILE": "credentials"}
    found: dict[str, str] = {}
    for variable, section in sections.items():
        parser = configparser.ConfigParser(
            default_section="", delimiters=("=",), interpolation=None, strict=False, allow_no_value=True
        )
        path = Path(os.environ.get(variable) or f"~/.aws/{files[variable]}")
        try:
            # A user without a home has no such files.
            with suppress(RuntimeError):
                parser.read(path.expanduser())
        except (configparser.Error, UnicodeDecodeError):
            # Leave out the cause: its text quotes the file.
            raise ConfigError(f"{path} cannot be read as a configuration file of AWS", fix="correct it") from None
        if parser.has_section(section):
            found |= {key: value for key, value in parser.items(section) if value}
    return found
