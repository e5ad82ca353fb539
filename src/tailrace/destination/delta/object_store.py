"""Conditional writes to object stores, which neither delta-rs nor Arrow offer: put a file if there is none yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, UnknownConfigurationKeyError
from obstore.store import from_url

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
_OF_DELTA_RS = ("s3_allow_unsafe_rename", "copy_if_not_exists", "conditional_put")
"""How names of options begin whose values mean something else to delta-rs."""


def put_new(uri: str, options: Mapping[str, str], name: str, body: bytes) -> None:
    """Put a file into the folder `uri`. Raises FileExistsError when it is there already, OSError if that is unknown."""
    try:
        # A multipart upload knows no condition: one request, whatever its size.
        obstore.put(_open(uri, tuple(sorted(options.items()))), name, body, mode="create", use_multipart=False)
    except AlreadyExistsError as error:
        raise FileExistsError(name) from error
    except BaseError as error:
        raise OSError(str(error)) from error


@lru_cache(maxsize=64)
def _open(uri: str, options: tuple[tuple[str, str], ...]) -> Any:
    opened: Callable[..., Any] = from_url  # its types want the names of one kind of store
    store, client = _split(options)
    known = {name: value for name, value in store.items() if _is_known(opened, uri, name, value)}
    return opened(uri, config=known, client_options=client)


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
