"""Write docs/api.md: the public names of each package, one line each, from the faces and their docstrings.

    python -m tests.api_docs          write the page
    python -m tests.api_docs --list   print the number of names at each door

The line of a class or function is the first sentence of its docstring; that of a constant or type alias stands as a
string below its assignment in the module that makes it, else what it is assigned.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from attrs import frozen

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
DOORS = (
    "pipeline",
    "pipeline.protocols",
    "pipeline.protocols.openai",
    "pipeline.protocols.card",
    "pipeline.protocols.kv",
    "pipeline.network",
    "pipeline.testing",
    "pipeline.rx",
    "pipeline.telemetry",
    "pipeline.wire",
    "operators",
    "operators.pool",
    "operators.prefill",
    "operators.kv",
    "engines",
    "engines.mocker",
    "engines.upstream",
    "engines.torch",
    "serving.deployment",
    "serving.http",
    "serving.replay",
    "serving.live",
)
"""The modules a user imports from, in the order of the page."""
HEAD = """\
# Public names

What each package offers to its users, by the module to import it from; all else may change without notice. Made by
`python -m tests.api_docs` from the docstrings, and kept true by a test.
"""


@frozen
class Name:
    """A public name and its line."""

    name: str
    kind: str
    """class, error, function or value."""
    line: str
    """What it is, in one sentence."""


def doors() -> dict[str, list[Name]]:
    """The names of each door, in alphabetical order, classes and functions alike."""
    return {door: sorted(_names(import_module(door)), key=lambda name: name.name.casefold()) for door in DOORS}


def _names(module: ModuleType) -> Iterator[Name]:
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        yield Name(name, _kind(value), _sentence(_doc(module, name, value)))


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "error" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isroutine(value) else "value"


def _doc(module: ModuleType, name: str, value: Any) -> str:
    if inspect.ismodule(value):
        return f"The module `{value.__name__}`"
    if inspect.isclass(value) or inspect.isroutine(value):
        is_foreign = value.__module__.partition(".")[0] != module.__name__.partition(".")[0]
        return inspect.cleandoc(value.__doc__ or "") or (f"That of `{value.__module__}`" if is_foreign else "")
    return _assignments(module.__name__).get(name) or _assignments(_origin(module, name)).get(name, "")


@cache
def _assignments(module: str) -> dict[str, str]:
    """What stands below each assignment of a module, or what is assigned, by name."""
    body = ast.parse(inspect.getsource(import_module(module))).body
    docs: dict[str, str] = {}
    for statement, below in pairwise([*body, ast.Pass()]):
        match statement:
            case ast.Assign(targets=[ast.Name(name)], value=value) | ast.AnnAssign(target=ast.Name(name), value=value):
                docs[name] = f"`{ast.unparse(value)}`" if value is not None else ""
                match below:
                    case ast.Expr(ast.Constant(str(text))):
                        docs[name] = inspect.cleandoc(text)
    return docs


def _origin(module: ModuleType, name: str) -> str:
    """The module that makes a name which this one imports, through all faces between them."""
    for statement in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(statement, ast.ImportFrom):
            continue
        for alias in statement.names:
            if (alias.asname or alias.name) == name:
                dots, package = "." * statement.level, module.__package__ or ""
                found = import_module(dots + (statement.module or ""), package)
                return found.__name__ if name in _assignments(found.__name__) else _origin(found, alias.name)
    return module.__name__


def _sentence(doc: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    found = re.match(r"(.+?[.!?;:])(?=\s+[A-Z`]|$)", paragraph)
    return (found[1] if found else paragraph).rstrip(":;.")


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    for door, names in doors().items():
        about = _sentence(inspect.cleandoc(import_module(door).__doc__ or ""))
        parts.append(f"\n## `{door}`\n\n{about}.\n\n| name | | |\n|---|---|---|\n")
        parts += [f"| `{name.name}` | {name.kind} | {name.line.replace('|', chr(92) + '|')} |\n" for name in names]
    return "".join(parts)


def main() -> None:
    if "--list" in sys.argv:
        found = doors()
        for door, names in found.items():
            missing = [name.name for name in names if not name.line]
            sys.stdout.write(f"{door:30} {len(names):4}  without a line: {' '.join(missing)}\n")
        sys.stdout.write(f"{sum(map(len, found.values()))} names at {len(found)} doors\n")
        return
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
