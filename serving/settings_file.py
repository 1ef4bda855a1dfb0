"""Reading settings from files: TOML and YAML, as plain values.

The one door of PyYAML, imported when a file wants it. Whatever is wrong with a file is an InvalidArgument whose `field`
is the setting that names the file, and whose text begins with the path.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pipeline import InvalidArgument


def read_toml(path: Path, field: str) -> dict[str, Any]:
    """Return the tables of a TOML file. Raise InvalidArgument as described at the top."""
    text = _text(path, field)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
        raise wrong(path, f"is no TOML: {error}", field, error) from error


def read_yaml(path: Path, field: str) -> Any:
    """The one document of a YAML file, of plain values only; a key that comes twice is an error. Raises as above."""
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise wrong(path, "reading YAML needs PyYAML: install penstock[serve]", field, error) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            _check_keys(node)
            return node

    text = _text(path, field)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise wrong(path, f"is no YAML: {_what(error)}", field, error) from error
    except (ValueError, RecursionError) as error:  # a date that is none, or a file too deep
        raise wrong(path, f"is no YAML: {error}", field, error) from error


def wrong(path: Path, what: str, field: str, cause: BaseException | None = None) -> InvalidArgument:
    """The error for a file, to be raised."""
    return InvalidArgument(f"{path}: {what}", field=field, cause=cause)


def _text(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise wrong(path, f"cannot be read: {error.strerror or error}", field, error) from error
    except UnicodeDecodeError as error:
        raise wrong(path, f"is not UTF-8 (byte {error.start})", field, error) from error
    except ValueError as error:  # a path with a zero byte
        raise InvalidArgument(f"{str(path)!r} is no path: {error}", field=field, cause=error) from error


def _check_keys(node: Any) -> None:
    """Raise ValueError for an object with a key twice, of which YAML would keep the last."""
    keys = set()
    for key, _ in node.value:
        if isinstance(key.value, str):
            if (key.tag, key.value) in keys:
                raise ValueError(f"{key.value} comes twice, line {key.start_mark.line + 1}")
            keys.add((key.tag, key.value))


def _what(error: Any) -> str:
    """The parser's words in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"{error.problem or error.context}, line {mark.line + 1}, column {mark.column + 1}"
