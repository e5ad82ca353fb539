"""A YAML text as data that remembers its lines, with references to the environment put in after parsing.

Parsing comes first, so the value of a variable is always one string: it cannot add keys or break the file.
Nothing here ever puts a value of the file or of the environment into a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from tailrace.errors import ConfigError

KeyPath = tuple[str | int, ...]

_REFERENCE = re.compile(r"\$?\$\{([^}\n]*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# References may hold characters that mean something to YAML, `{` above all. While YAML reads the text they are moved,
# one for one so that columns stay true, to a private plane of Unicode that no one writes in.
_PLANE = 0xF0000
_HIDDEN = re.compile(f"[{chr(_PLANE)}-{chr(_PLANE + 0xFFFD)}]")
_SHOWN_PROBLEMS = 12


@dataclass(frozen=True)
class Document:
    """The data of a file called `name`, and the line of each key path."""

    name: str
    data: dict[str, Any]
    lines: Mapping[KeyPath, int]

    def where(self, path: KeyPath) -> str:
        """`line 3, source.dsn` for a path; of a key that is not there, the line of the section it belongs to."""
        key = ".".join(str(part) for part in path) or "the file"
        line = self.line(path)
        return f"line {line}, {key}" if line else key

    def line(self, path: KeyPath) -> int:
        """The line of a path or of what is nearest above it; 0 for data that came from no file."""
        return next((self.lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.lines), 0)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a document: where, what and what to do."""

    path: KeyPath
    message: str
    fix: str | None = None


def refuse(document: Document, problems: list[Problem]) -> NoReturn:
    """Raises one ConfigError for all the problems, short enough for a screen."""
    problems = sorted(problems, key=lambda problem: document.line(problem.path))
    lines = [f"{document.where(problem.path)} {problem.message}" for problem in problems]
    fixes = list(dict.fromkeys(problem.fix for problem in problems if problem.fix))
    if len(lines) == 1:
        message = f"{document.name}: {lines[0]}"
    else:
        shown = lines[:_SHOWN_PROBLEMS]
        more = [f"and {len(lines) - len(shown)} more"] if len(lines) > len(shown) else []
        message = "\n  - ".join([f"{document.name} has {len(lines)} problems", *shown, *more])
    fix = "; ".join(fixes[:_SHOWN_PROBLEMS]) or "correct the value; `tailrace schema` prints what every key may hold"
    raise ConfigError(message, fix=fix)


def parse(text: str, name: str) -> Document:
    """The document in a YAML text. Raises ConfigError with the line for text that is not one mapping of YAML."""
    if _HIDDEN.search(text):
        raise ConfigError(f"{name} holds characters of a private Unicode plane (U+F0000 on)", fix="remove them")
    try:
        loader = yaml.SafeLoader(_REFERENCE.sub(lambda found: _hide(found[0]), text))
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        duplicates = [Problem(path, "is there twice", "keep one of them") for path in _walk(node, (), lines)]
        data = _show(loader.construct_document(node) if node is not None else None)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(
            f"{name} is not YAML: {line}{_without_values(error.problem or 'cannot be read')}",
            fix="check the indentation, brackets and quotes there",
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{name} is not YAML that can be read", fix="check for control characters") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{name} does not hold keys and values", fix="begin with `name: …`; see `tailrace schema`")
    document = Document(name, data, lines)
    if duplicates:
        refuse(document, duplicates)
    return document


def substitute(data: Any, environment: Mapping[str, str]) -> tuple[Any, list[Problem]]:
    """The data with every `${NAME}` and `${NAME:-default}` replaced, and a problem for each that cannot be.

    Those stay as they are. `$${` stands for a plain `${`. Keys are left alone.
    """
    problems: list[Problem] = []

    def visit(value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: visit(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list):
            return [visit(item, (*path, index)) for index, item in enumerate(value)]
        return _REFERENCE.sub(lambda found: replace(found, path), value) if isinstance(value, str) else value

    def replace(found: re.Match[str], path: KeyPath) -> str:
        if found[0].startswith("$$"):
            return found[0][1:]
        name, separator, default = found[1].partition(":-")
        if not _VARIABLE.fullmatch(name):
            problems.append(Problem(path, "holds a ${…} that names no variable", "write ${NAME} or ${NAME:-default}"))
            return found[0]
        # As in a shell, `:-` also stands in for a variable that is set to nothing.
        if (value := environment.get(name, "")) or (name in environment and not separator):
            return value
        if not separator:
            problems.append(
                Problem(path, f"needs the environment variable {name}, which is not set", f"export {name}=…")
            )
            return found[0]
        return default

    return visit(data, ()), problems


def literal(text: str) -> str:
    """A text that `substitute` gives back as it is."""
    return _REFERENCE.sub(lambda found: "$" + found[0], text)


def references(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """The variables that a document refers to, with the place of each reference."""
    if isinstance(data, dict):
        for key, item in data.items():
            yield from references(item, (*path, str(key)))
    elif isinstance(data, list):
        for index, item in enumerate(data):
            yield from references(item, (*path, index))
    elif isinstance(data, str):
        for found in _REFERENCE.finditer(data):
            if not found[0].startswith("$$"):
                yield path, found[1].partition(":-")[0]


def _walk(node: Any, path: KeyPath, lines: dict[KeyPath, int], seen: tuple[Any, ...] = ()) -> Iterator[KeyPath]:
    """Notes the line of every key below a node and yields the paths that are there twice."""
    if node is None or node in seen:
        return
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            inner = (*path, _show(str(key.value)))
            if key.value in keys and key.value != "<<":
                yield inner
            keys.add(str(key.value))
            lines[inner] = key.start_mark.line + 1
            yield from _walk(value, inner, lines, (*seen, node))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _walk(value, (*path, index), lines, (*seen, node))


def _hide(text: str) -> str:
    return "".join(chr(_PLANE + ord(letter)) if ord(letter) < 0xFFFE else letter for letter in text)


def _show(value: Any) -> Any:
    if isinstance(value, dict):
        return {_show(key): _show(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_show(item) for item in value]
    return _HIDDEN.sub(lambda found: chr(ord(found[0]) - _PLANE), value) if isinstance(value, str) else value


def _without_values(problem: str) -> str:
    """The message of the YAML parser without the pieces of the file it quotes, which may be secret."""
    return re.sub(r"'(?!<)[^']{2,}'", "…", _show(problem))
