"""The user's cache folder, for files that can be created again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """The path of the cache, which may not exist yet. Raises OSError for a user without a home or XDG_CACHE_HOME."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "tailrace"
    try:
        return Path.home() / ".cache" / "tailrace"
    except RuntimeError as error:
        raise OSError("this user has no home directory") from error


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of this name in the cache; `make` fills it if it does not exist yet.

    Safe to call from several processes at the same time; none sees it half filled. Raises OSError.
    """
    cache = cache_folder()
    folder = cache / name
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as unfinished:
        (Path(unfinished) / name).mkdir()
        make(Path(unfinished) / name)
        try:
            (Path(unfinished) / name).rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first; its folder is the same
                raise
    return folder
