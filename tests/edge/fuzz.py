"""Requests made of the fields of the request records: right, nearly right, of the wrong kind, huge and nested.

Every strategy follows the type of its field, so that a new field is fuzzed as soon as there is one.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from attrs import frozen
from hypothesis import strategies as st

from pipeline.protocols.field_rules import WIRE_KEY, IntRange
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from tests.serving.http.test_request_fields import SAMPLES

_ODD_TEXTS = ("", " ", "\x00", "a" * 5000, "\u202e", "\U0001f9d1\u200d\U0001f680", "${jndi:x}", "{{ 1/0 }}", "../..")
_ODD_INTEGERS = (0, -1, 20, 21, 128, 129, 2**20, 2**20 + 1, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**30)
_ODD_FLOATS = (0.0, -0.0, 1e-320, 1e308, 0.1, 1.0000001, 2.0, -2.0000001)
TEXTS = st.text(max_size=20) | st.sampled_from(_ODD_TEXTS)
NUMBERS = st.one_of(
    st.sampled_from(_ODD_INTEGERS),
    st.integers(-5, 200),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(_ODD_FLOATS),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NESTED = st.integers(1, 80).flatmap(lambda depth: st.sampled_from([_lists(depth), _objects(depth)]))
HUGE = st.sampled_from([["x"] * 3000, [[]] * 3000, {str(i): 1 for i in range(3000)}, "x" * 100_000, list(range(3000))])


def _lists(depth: int) -> Any:
    return [_lists(depth - 1)] if depth else []


def _objects(depth: int) -> Any:
    return {"a": _objects(depth - 1)} if depth else {}


_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    Any: JSON,
    str: TEXTS,
    bool: st.booleans(),
    float: NUMBERS,
    int: st.integers(-(2**63), 2**64 - 1),
}


def values_of(kind: Any, depth: int = 2) -> st.SearchStrategy[Any]:
    """Plain values of a field's type, at the ends of its range too; below `depth` records only what they need."""
    if (simple := _SIMPLE.get(kind)) is not None:
        return simple
    if (
        mark := next((mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, IntRange)), None)
    ) is not None:
        ends = st.sampled_from([mark.low, mark.high, mark.low - 1, mark.high + 1, 0, 1])
        return ends | st.integers(max(mark.low, -100), min(mark.high, 300))
    if attrs.has(kind):
        return records_of(kind, depth - 1)
    return _composed(get_origin(kind) or kind, get_args(kind), depth)


def _composed(origin: Any, parts: tuple[Any, ...], depth: int) -> st.SearchStrategy[Any]:
    if origin is Literal:
        return st.sampled_from(parts)
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(part, depth) for part in parts if part is not type(None)])
    inner = values_of(parts[-1] if parts else Any, depth)
    if origin in (list, set):
        return st.lists(inner, max_size=4)
    return st.dictionaries(TEXTS, inner, max_size=4) if origin is dict else JSON


def records_of(cls: type[Any], depth: int = 1) -> st.SearchStrategy[Any]:
    """Objects with the fields of a record: those that it needs, some of the others, now and then an unknown one."""
    attrs.resolve_types(cls)
    read = [each for each in attrs.fields(cls) if _rule(each) not in ("never", "rest")]
    needed = {each.name: values_of(each.type, depth) for each in read if each.default is attrs.NOTHING}
    others = {each.name: values_of(each.type, depth) for each in read if each.name not in needed}
    if depth <= 0 or not others:
        return st.fixed_dictionaries(needed)
    some = st.lists(st.sampled_from(sorted(others)), max_size=3, unique=True)
    return some.flatmap(lambda names: st.fixed_dictionaries({**needed, **{name: others[name] for name in names}}))


def _rule(attribute: attrs.Attribute[Any]) -> str:
    rule = attribute.metadata.get(WIRE_KEY)
    return "always" if rule is None else str(rule.write)


BASES: Mapping[type[Any], tuple[str, dict[str, Any]]] = {
    ChatCompletionRequest: ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
    CompletionRequest: ("/v1/completions", {"model": "m", "prompt": "hi"}),
}


def _fields(kind: type[Any], *, wild: bool) -> dict[str, st.SearchStrategy[Any]]:
    attrs.resolve_types(kind)
    found: dict[str, st.SearchStrategy[Any]] = {}
    for each in attrs.fields(kind):
        if _rule(each) in ("never", "rest"):
            continue
        right = values_of(each.type)
        found[each.name] = st.one_of(right, JSON, NESTED, HUGE) if wild else _ordinary(each, right)
    return found


def _ordinary(attribute: attrs.Attribute[Any], right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What is probably accepted: a value that is known to be right, or a small one of the right kind."""
    if attribute.name in SAMPLES:
        return st.just(SAMPLES[attribute.name]) | right
    small = {"bool": st.booleans(), "float": st.floats(0.5, 1), "str": st.just("x")}
    return small.get(str(attribute.type).partition(" | ")[0], st.integers(1, 5)) | st.none()


TAME = {kind: _fields(kind, wild=False) for kind in BASES}
"""A strategy for each field of each record: what is likely to be right."""
WILD = {kind: _fields(kind, wild=True) for kind in BASES}
"""The same for what is likely to be wrong."""

HEADERS = (
    *("x-dynamo-worker-instance-id", "x-worker-instance-id", "x-dynamo-prefill-instance-id", "x-dynamo-dp-rank"),
    *("x-dp-rank", "x-data-parallel-rank", "x-dynamo-prefill-dp-rank", "x-dynamo-request-priority", "x-tenant-id"),
    *("x-dynamo-request-strict-priority", "x-dynamo-session-id", "x-session-id", "x-request-id", "traceparent"),
    *("x-dynamo-request-id", "x-dynamo-meta-a", "x-dynamo-meta-authorization", "x-dynamo-meta-", "tracestate"),
    *("x-dynamo-parent-session-id", "x-dynamo-session-final", "accept", "baggage", "origin", "x-forwarded-for"),
    *("authorization", "expect", "content-encoding", "cookie", "user-agent", "b3"),
)
_HEADER_VALUES = st.one_of(
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=30),
    st.sampled_from(["", "0", "-1", "4294967295", "4294967296", "18446744073709551616", "1e9", "true", "9" * 5000]),
    st.uuids().map(str),
    st.just("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
)


@frozen
class Case:
    """One request; `changed` are the fields that are not those of an ordinary one."""

    kind: type[Any]
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    changed: tuple[str, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """An ordinary request with some fields replaced, left out or added, and some headers; one in four is wild."""
    kind = draw(st.sampled_from(list(BASES)))
    path, base = BASES[kind]
    is_wild = draw(st.integers(0, 3)) == 0
    body, fields = dict(base), (WILD if is_wild else TAME)[kind]
    changed = draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=4, unique=True))
    for name in changed:
        if name in base and is_wild and draw(st.integers(0, 4)) == 0:
            del body[name]
        else:
            body[name] = draw(fields[name])
    if is_wild and draw(st.booleans()):
        name = draw(st.text(min_size=1, max_size=10))
        body[name] = draw(JSON)
        changed.append(name)
    if not is_wild:
        body["model"] = draw(st.sampled_from(["m", "m", "m", "m", "other"]))
        body["stream"] = draw(st.booleans())
    headers = draw(st.dictionaries(st.sampled_from(HEADERS), _HEADER_VALUES, max_size=4))
    return Case(kind, path, body, headers, tuple(changed))
