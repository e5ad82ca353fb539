"""A disk on which nothing can be removed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def removals_fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block no file can be removed, as if it belonged to another user."""

    def refuse(path: Any, **_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        yield
