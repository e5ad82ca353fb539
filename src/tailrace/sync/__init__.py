"""Sync of SQLite files over Turso's protocol: a server that real Turso clients can use, and a client for plain files.

`tailrace.sync(local, remote)` brings one replica up to date; the module itself can be called for that, because it has
the name of the function. `tailrace serve-sync` runs the server. See docs/sync.md.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from tailrace.sync.session import sync

        return sync(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
