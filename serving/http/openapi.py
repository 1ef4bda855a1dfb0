"""The description of an app in OpenAPI 3.1, made from what validates: records, the table of rules, limits, paths.

Nothing here repeats a field or a range: a new field, rule or limit is in the description by itself. `page` shows it as
plain HTML without a script, complete offline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from attrs import asdict

from operators.text import keywords_of
from pipeline.protocols.openai import (
    HEADERS,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    ModelInfo,
    ModelList,
)
from pipeline.settings import settings_of

from ..problems import LIMIT_HEADER, REQUEST_ID
from .generation import NOT_IMPLEMENTED
from .json_schema import Schema, Schemas
from .options import HttpOptions
from .request import METADATA_PREFIX, SESSION_ID

_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"

_EVENT_STREAM = "Events; `x-event-data` is the schema of the JSON in the data of each but the last, `[DONE]`."

_STRING: Schema = {"type": "string"}

ERROR: Schema = {
    "type": "object",
    "description": "Why a request was refused or failed.",
    "properties": {
        "message": _STRING,
        "type": {"type": "string", "description": "The status in words."},
        "code": {"type": "integer", "description": "The status."},
        "details": {"type": "object"},
        "limit": {
            "type": "object",
            "description": "The limit that refused the request.",
            "properties": {"name": _STRING, "value": {"type": "number"}, "threshold": {"type": "number"}},
            "required": ["name", "value", "threshold"],
        },
    },
    "required": ["message", "type", "code"],
}
"""The body of every answer that is an error."""

REFUSALS: Mapping[int, str] = {
    400: "The request is wrong; the message names the field.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    431: "The headers are too large.",
    499: "The request was cancelled.",
    500: "The request failed.",
    501: "The request asks for something that is not supported.",
    503: "The service is not ready, or no worker is there.",
}
"""Error answers of the two generation APIs, except the status of overload."""

_STATUS = {"type": "object", "properties": {"status": _STRING}, "required": ["status"]}


def describe(options: HttpOptions) -> Schema:
    """Return the whole description of an app with these options, as plain values."""
    kinds = (ChatCompletionRequest, CompletionRequest)
    read = Schemas("read", {kind: _keywords(kind, options) for kind in kinds})
    chat, completion = map(read.of, kinds)
    write = Schemas("write", taken=read.components)
    paths = {
        options.chat_path: _generation("Answer a chat", chat, ChatCompletion, ChatCompletionChunk, options, write),
        options.completions_path: _generation("Continue a text", completion, Completion, Completion, options, write),
        **{path: {"get": operation} for path, operation in _pages(options, write).items()},
    }
    limits = {  # each with its value and meaning
        name: {"value": asdict(record)[name], "description": known.help}
        for record in (options.limits, options.request_limits)
        for name, known in settings_of(type(record)).items()
    }
    try:
        number = version("penstock")
    except PackageNotFoundError:  # run from its source
        number = "0"
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": number, "description": "An OpenAI-compatible API over a graph."},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR, **write.components, **read.components}},
        "x-limits": limits,
    }


def _keywords(kind: type[Any], options: HttpOptions) -> dict[str, dict[str, object]]:
    """Return what the rules and limits of a request add to the schemas of its fields."""
    found = keywords_of(kind)
    if kind is ChatCompletionRequest:
        found |= {name: {"enum": [None]} for name in NOT_IMPLEMENTED}
        if options.request_limits.max_tools:
            found.setdefault("tools", {})["maxItems"] = options.request_limits.max_tools
    return found


def _generation(
    summary: str, request: Schema, answer: type[Any], chunk: type[Any], options: HttpOptions, write: Schemas
) -> Schema:
    """Return the path of a generation API."""
    text = "The answer, whole or, with `stream`, as server-sent events that end with `data: [DONE]`."
    good = _good(text, write.of(answer))
    # Without a type: by 3.1 this is a text, and tools that know events use it as the schema of each event.
    good["content"][_EVENTS] = {"schema": {"description": _EVENT_STREAM}, "x-event-data": write.of(chunk)}
    refusals = {**REFUSALS, options.overload_status: "The service is overloaded."}
    operation = {
        "summary": summary,
        "parameters": [
            *_ID_HEADER,
            _header(SESSION_ID, "The session of the request."),
            _header(f"{METADATA_PREFIX}*", "Metadata that travels with the request; `*` is the name of an entry."),
            *(_header(name, about) for name, about in HEADERS.items()),
        ],
        "requestBody": {"required": True, "content": {_JSON: {"schema": request}}},
        "responses": {"200": good, **{str(status): error(text) for status, text in sorted(refusals.items())}},
    }
    return {"post": operation}


def _pages(options: HttpOptions, write: Schemas) -> Schema:
    """Return the operations of the pages around the two generation APIs, by path."""
    ready = {"type": "object", "properties": {"model": _STRING, "namespaces": {"type": "object"}}}
    model = {"anyOf": [write.of(ModelInfo), ready]}
    shown = _page("Show a model", "The model; with `/ready` behind its name, where it can be used.", model)
    shown["parameters"] = [
        {"name": "id", "in": "path", "required": True, "schema": _STRING | {"minLength": 1}},
        *_ID_HEADER,
    ]
    shown["responses"] = {"200": _good("The model.", model), "404": error(REFUSALS[404])}
    return {
        options.models_path: _page("List the models", "The models.", write.of(ModelList)),
        options.models_path + "/{id}": shown,
        options.health_path: _page("Whether requests are taken", "They are.", _STATUS, also=503),
        options.live_path: _page("Whether the program runs", "It does.", _STATUS, also=503),
        options.metrics_path: _page("All metrics", "Prometheus text.", _STRING, _TEXT),
        options.openapi_path: _page("Describe the API", "This description.", {"type": "object"}),
        options.docs_path: _page("Describe the API to read", "A page.", _STRING, "text/html"),
    }


def _page(summary: str, text: str, schema: Schema, media_type: str = _JSON, *, also: int | None = None) -> Schema:
    responses = {"200": _good(text, schema, media_type)}
    if also is not None:
        responses[str(also)] = _good("Not now.", schema, media_type)
    return {"summary": summary, "parameters": _ID_HEADER, "responses": responses}


def _good(text: str, schema: Schema, media_type: str = _JSON) -> Schema:
    return {"description": text, "headers": _ANSWER_HEADERS, "content": {media_type: {"schema": schema}}}


def error(text: str) -> Schema:
    """Return the schema of an error answer."""
    limit = {"description": "`name; value=N; threshold=M` of the limit that refused it.", "schema": _STRING}
    later = {"description": "Seconds after which to ask again.", "schema": {"type": "integer"}}
    return _good(text, {"$ref": "#/components/schemas/Error"}) | {
        "headers": _ANSWER_HEADERS | {LIMIT_HEADER.decode(): limit, "retry-after": later}
    }


def _header(name: str, about: str) -> Schema:
    return {"name": name, "in": "header", "description": about, "schema": _STRING}


_ANSWER_HEADERS: Schema = {REQUEST_ID: {"description": "The id of the request.", "schema": _STRING}}
_ID_HEADER = [_header(REQUEST_ID, "An id of the client's; the answer repeats it.")]


# -- the page

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
        *_limit_table(document),
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


def _limit_table(document: Schema) -> Iterator[str]:
    yield "<h2>Limits</h2>"
    rows = [
        [_code(name), escape(f"{each['value']:.15g}"), escape(each["description"])]
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
