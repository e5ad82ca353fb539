"""One public name has one meaning, and the glossary names what exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = next(each for each in Path(__file__).resolve().parents if (each / "pyproject.toml").exists())
SHARED: frozenset[str] = frozenset(
    {"Cursor"}  # of a reader of the journal; and in `tailrace.slatedb`, whose users know it by this name
)
"""Names that may mean several things, each with its reason in a comment."""


def meanings(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Public classes, and type aliases with what they stand for; type variables are placeholders without a meaning."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, None
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, value = statement.targets[0].id, ast.unparse(statement.value)
            if name[0].isupper() and not name.isupper() and not value.startswith("TypeVar("):
                yield name, value


def public_names() -> dict[str, list[tuple[Path, str | None]]]:
    found: dict[str, list[tuple[Path, str | None]]] = defaultdict(list)
    for file in sorted((ROOT / "src").rglob("*.py")):
        for name, meaning in meanings(ast.parse(file.read_text("utf-8"))):
            found[name].append((file.relative_to(ROOT), meaning))
    return found


def test_a_public_name_of_a_class_or_a_type_has_one_meaning() -> None:
    several = {
        name: [str(file) for file, _ in places]
        for name, places in public_names().items()
        # The same alias may stand in several modules; a class may not.
        if len({file for file, _ in places}) > 1 and (len({text for _, text in places}) > 1 or places[0][1] is None)
    }
    assert {name: files for name, files in several.items() if name not in SHARED} == {}
    assert several.keys() >= SHARED


def test_every_class_of_the_glossary_exists() -> None:
    rows = [line for line in (ROOT / "docs/glossary.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    named = [name for row in rows for name in re.findall(r"`([A-Z]\w*[a-z]\w*)`", row.split("|")[1])]
    assert named
    known = public_names()
    assert [name for name in named if name not in known] == []
    firsts = [row.split("|")[1].strip().strip("`").lower() for row in rows[1:]]
    assert firsts == sorted(firsts)


def test_the_glossary_says_in_which_module_a_word_is() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \| `(.+)` \|$", (ROOT / "docs/glossary.md").read_text("utf-8"), re.MULTILINE)
    assert rows
    known = public_names()
    for word, module in rows:
        file = Path("src/tailrace") / module
        assert (ROOT / file).is_file(), f"{word}: {module} is not there"
        if word.startswith("`"):
            assert file in [place for place, _ in known[word.strip("`")]], f"{word} is not in {module}"
