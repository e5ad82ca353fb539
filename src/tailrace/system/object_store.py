"""Object stores by URL, opened with the storage options that delta-rs knows, and put-if-absent.

Neither delta-rs nor Arrow offer conditional writes. Both the Delta lake and the journal open their stores here.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    NotSupportedError,
    UnknownConfigurationKeyError,
)
from obstore.store import from_url

from tailrace.errors import ConfigError, Finding, UnavailableError
from tailrace.system.aws_profile import AwsProfile, find_profile
from tailrace.system.store_problem import explain

_PROBES = "_tailrace_probe"

_CLIENT = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "http1_only",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "proxy_ca_certificate",
        "timeout",
        "user_agent",
    }
)
"""Options of the connection, which obstore takes apart from those of the store."""
_PREFIXES = ("aws_", "azure_", "google_")
_SAY_CREDENTIALS = ("access_key_id", "skip_signature", "web_identity_token_file", "container_credentials")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_OF_DELTA_RS = ("s3_allow_unsafe_rename", "copy_if_not_exists", "conditional_put")
"""How names of options begin whose values mean something else to delta-rs."""


def put_new(uri: str, options: Mapping[str, str], name: str, body: bytes) -> str | None:
    """Put a file into the folder `uri`. Raises FileExistsError when it is there already, OSError if that is unknown.

    Returns its tag, where the store gives it one.
    """
    with plain_errors():
        # A multipart upload knows no condition: one request, whatever its size.
        done = obstore.put(open_store(uri, options), name, body, mode="create", use_multipart=False)
    return done["e_tag"]


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn the errors of a store into those that a file system raises."""
    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(str(error)) from error
    except NotFoundError as error:
        raise FileNotFoundError(str(error)) from error
    except BaseError as error:
        raise OSError(str(error)) from error


def open_store(uri: str, options: Mapping[str, str], *, retry_seconds: float | None = None) -> Any:
    """The store at a URL, with its connections: one per process. Credentials not given come from the environment.

    `retry_seconds` bounds how long one request is repeated by itself. Raises ConfigError, without values, when the URL
    or the options cannot be used.
    """
    try:
        return _open(uri, tuple(sorted(options.items())), retry_seconds)
    except (BaseError, ValueError):
        # Leave out the cause: its text quotes values.
        raise ConfigError(f"no object store can be opened for {uri}", fix="correct path and storage_options") from None


@lru_cache(maxsize=64)
def _open(uri: str, options: tuple[tuple[str, str], ...], retry_seconds: float | None) -> Any:
    opened: Callable[..., Any] = from_url  # its types want the names of one kind of store
    store, client = _split(options)
    known = {name: value for name, value in store.items() if _is_known(opened, uri, name, value)}
    profile = _profile(uri, known)
    more: dict[str, Any] = {} if profile is None else {"credential_provider": profile}
    if profile is not None and profile.region and not _names_region(known):
        known["region"] = profile.region
    if "max_retries" in store:
        more["retry_config"] = {"max_retries": int(store["max_retries"])}
    if retry_seconds is not None:
        client = {"timeout": "30s"} | client
        more["retry_config"] = {"max_retries": 3, "retry_timeout": timedelta(seconds=retry_seconds)}
    return opened(uri, config=known, client_options=client, **more)


def _profile(uri: str, store: Mapping[str, str]) -> AwsProfile | None:
    """The profile of AWS's configuration files that has the keys; None where the options say where they are."""
    is_told = any(known in name for name in store for known in _SAY_CREDENTIALS)
    return None if is_told or not uri.startswith(("s3://", "s3a://")) else find_profile()


def _names_region(store: Mapping[str, str]) -> bool:
    return any(name.endswith("region") for name in store) or not os.environ.keys().isdisjoint(_REGIONS)


@contextmanager
def reached(uri: str, *, may_lack: bool = False) -> Iterator[None]:
    """Turn the errors of a store that cannot be used into UnavailableError, with the reason in words of people.

    An object that is there already becomes FileExistsError. One that is not there, where it `may_lack`, becomes
    FileNotFoundError; elsewhere it is the bucket that is missing.
    """
    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(uri) from error
    except (BaseError, OSError) as error:
        if may_lack and isinstance(error, FileNotFoundError | NotFoundError):
            raise FileNotFoundError(uri) from error
        problem = explain(str(error))
        reason = problem.reason if problem else type(error).__name__
        fix = problem.fix if problem else "check the store and storage_options; tailrace retries by itself"
        raise UnavailableError(f"cannot use {uri}: {reason}", fix=fix) from error


def probe_conditional_put(uri: str, options: Mapping[str, str]) -> Finding:
    """Whether the store refuses to put an object that is there already. Leaves nothing there.

    Without this two writers overwrite each other, and neither is told. Raises UnavailableError as `reached` does.
    """
    store, name = open_store(uri, options, retry_seconds=10), f"{_PROBES}/{secrets.token_hex(8)}"
    with reached(uri):
        try:
            obstore.put(store, name, b"one", mode="create", use_multipart=False)
            with suppress(AlreadyExistsError):
                obstore.put(store, name, b"two", mode="create", use_multipart=False)
                return Finding(
                    "error",
                    uri,
                    "the store ignores If-None-Match: it overwrites an object that is there already, so two writers"
                    " would lose each other's changes",
                    "use a store with conditional writes (Amazon S3, Google Cloud Storage, Azure, MinIO, and others)",
                )
        except NotSupportedError:
            return Finding(
                "error", uri, "the store has no conditional writes", "use a store that knows If-None-Match on PUT"
            )
        finally:
            with suppress(BaseError, FileNotFoundError):
                obstore.delete(store, name)
    return Finding("ok", uri, "the store puts an object only if there is none")


def _is_known(opened: Callable[..., Any], uri: str, name: str, value: str) -> bool:
    """Whether a store of this kind has such an option: delta-rs has some of its own, such as those of its locks."""
    try:
        opened(uri, config={name: value})
    except UnknownConfigurationKeyError:
        return False
    except BaseError:
        return True  # on its own it may be wrong
    return True


def _split(options: tuple[tuple[str, str], ...]) -> tuple[dict[str, str], dict[str, Any]]:
    """delta-rs's storage options as those of the store and those of the connection."""
    store: dict[str, str] = {}
    client: dict[str, Any] = {}
    for given, value in options:
        name = given.lower()
        plain = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
        if plain.startswith(_OF_DELTA_RS):
            continue
        if plain in _CLIENT:
            client[plain] = value.lower() == "true" if value.lower() in ("true", "false") else value
        else:
            store[name] = value
    return store, client
