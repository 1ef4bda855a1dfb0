"""The description of an app as a page: plain HTML without a script, complete offline."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from .json_schema import Schema

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;width:100%}td,th{border:1px solid #ccc;padding:.2rem .5rem;text-align:left;"
    "vertical-align:top}code{background:#f3f3f3;padding:0 .2rem}h2{margin-top:2.5rem}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}code{background:#222}td,th{border-color:#444}}"
)
_RANGES = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "minItems": "entries at least",
    "maxItems": "entries at most",
}


def page(document: Schema, document_path: str) -> bytes:
    """Return the page of a description, with a link to its path."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1><p>{escape(document['info']['description'])} ",
        f"As OpenAPI: <a href='{escape(document_path)}'>{escape(document_path)}</a></p>",
        *_operations(document),
        *_limits(document),
    ]
    return "".join(parts).encode()


def _operations(document: Schema) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"
            if (body := operation.get("requestBody")) is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                yield from _fields(document["components"]["schemas"][name])
            headers = [[_code(each["name"]), escape(each.get("description", ""))] for each in operation["parameters"]]
            yield _table(["parameter", "meaning"], headers)
            statuses = [[_code(key), escape(each["description"])] for key, each in operation["responses"].items()]
            yield _table(["status", "meaning"], statuses)


def _fields(schema: Schema) -> Iterator[str]:
    required = set(schema.get("required", ()))
    rows = [
        [_code(name) + (" (required)" if name in required else ""), escape(_kind(each)), escape(_range(each))]
        for name, each in schema["properties"].items()
    ]
    yield _table(["field", "kind", "range"], rows)


def _limits(document: Schema) -> Iterator[str]:
    yield "<h2>Limits</h2>"
    rows = [
        [_code(name), escape(f"{each['value']:g}"), escape(each["description"])]
        for name, each in document["x-limits"].items()
    ]
    yield _table(["limit", "value", "what it bounds"], rows)


def _kind(schema: Schema) -> str:
    """Return the kind of a value in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each) for each in schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if schema.get("enum"):
        return ", ".join("null" if each is None else str(each) for each in schema["enum"])
    kinds = schema.get("type", "anything")
    text = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    return f"{text} of {_kind(schema['items'])}" if "items" in schema else text


def _range(schema: Schema) -> str:
    """Return the range of a value in words, without bounds that only its number type sets."""
    shown = ((words, schema[key]) for key, words in _RANGES.items() if key in schema)
    return ", ".join(f"{words} {value}" for words, value in shown if abs(value) < 2**31 - 1)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{each}" for each in heads)
    return f"<table><tr>{head}" + "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows) + "</table>"


def _code(text: Any) -> str:
    return f"<code>{escape(str(text))}</code>"
