"""Compiles the reader of copied rows while tailrace is built or installed. Without a compiler it is left out.

TAILRACE_COMPILE=0 leaves it out, TAILRACE_COMPILE=1 fails where it cannot be made, CC names the compiler (such as
`python -m ziglang cc`), TAILRACE_WHEEL_PLATFORM the platform that the wheel is for (such as manylinux_2_17_x86_64).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/tailrace/source/postgres/row_reader.c")
LIBRARY = SOURCE.with_name("librow_reader.so")
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")


class CompileHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        (root / LIBRARY).unlink(missing_ok=True)
        if not compiled(root / SOURCE, root / LIBRARY):
            return
        platform = os.environ.get("TAILRACE_WHEEL_PLATFORM") or sysconfig.get_platform()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform.replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(LIBRARY.as_posix())


def compiled(source: Path, library: Path) -> bool:
    """Whether the library could be made."""
    wanted = os.environ.get("TAILRACE_COMPILE", "")
    if wanted == "0":
        return False
    compiler = shlex.split(os.environ.get("CC", "")) or [found for found in [_system_compiler()] if found]
    if not compiler:
        if wanted == "1":
            raise RuntimeError("there is no C compiler: install one, or name it in CC")
        return False
    # A new file under the name at once: a running pipeline has the old one open.
    made = library.with_suffix(".new")
    done = subprocess.run(
        [*compiler, *FLAGS, "-o", str(made), str(source)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        if wanted == "1":
            raise RuntimeError(f"the C compiler failed:\n{done.stderr}")
        print(f"tailrace is installed without its compiled reader, the C compiler failed: {done.stderr[-500:]}")
        return False
    made.replace(library)
    return True


def _system_compiler() -> str | None:
    return next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
