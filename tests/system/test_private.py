"""What only the user of a pipeline may read: its folders, and the secrets in its environment."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml

from tailrace.config.pipeline import load
from tailrace.system import environment
from tailrace.system.atomic_file import make_private_folder, replace_durably


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_and_what_is_written_in_it_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "parent" / "state"
    make_private_folder(folder)
    replace_durably(folder / "mark", b"1")
    assert (mode(folder), mode(folder / "mark")) == (0o700, 0o600)


@pytest.mark.parametrize(("found", "left"), [(0o755, 0o700), (0o777, 0o700), (0o750, 0o750), (0o700, 0o700)])
def test_a_folder_that_everyone_may_enter_is_closed_and_one_for_a_group_stays(
    tmp_path: Path, found: int, left: int
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(found)
    make_private_folder(folder)
    assert mode(folder) == left


def test_children_do_not_get_variables_that_hold_secrets_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_hidden", set())
    names = {"SHOP_DSN": "postgresql://a:secret@localhost/a", "LAKE": str(tmp_path / "lake"), "HOOK_KEY": "k" * 40}
    for name, value in {**names, "AWS_SECRET_ACCESS_KEY": "kept"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "shop.yaml"
    sections = {
        "name": "shop",
        "source": {"type": "postgres", "dsn": "${SHOP_DSN}"},
        "destination": {"type": "delta", "path": "${LAKE}"},
        "state": "${HOME}/state",
    }
    file.write_text(yaml.safe_dump(sections))
    load(file)
    given = environment.for_children()
    assert "SHOP_DSN" not in given
    assert given["LAKE"] == names["LAKE"]
    assert given["AWS_SECRET_ACCESS_KEY"] == "kept"
    assert "HOME" in given
    sections["destination"] = {"type": "webhook", "url": "https://localhost/", "headers": {"X-Key": "${HOOK_KEY}"}}
    file.write_text(yaml.safe_dump(sections))
    load(file)
    assert "HOOK_KEY" not in environment.for_children()
