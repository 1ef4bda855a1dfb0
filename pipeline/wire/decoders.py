"""Strict readers of plain values: numbers, texts, lists, dicts, unions, each an answer to one type.

Every reader takes a value (and, as cattrs calls it, its type), and raises InvalidRecord that names the first wrong
place below the value. `hook_for` gives the reader of a part's type.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any, Literal, TypeAlias, Union, cast, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec

from ..protocols.field_rules import IntRange, InvalidRecord, shortened

Decode: TypeAlias = Callable[[Any, Any], Any]
HookFor: TypeAlias = Callable[[Any], Decode]

_UNBOUNDED = IntRange(-(2**63), 2**64 - 1)
_DIGITS = re.compile("[0-9]{1,20}")
_JSON_KINDS: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def found(value: Any) -> str:
    """Return a short description of a wrong value, for the message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"{value:.6g}" if isinstance(value, float) else (str(value) if abs(value) < 2**64 else "a huge integer")
    if isinstance(value, str):
        return f'"{shortened(value, 40)}"'
    return _JSON_KINDS.get(type(value), "another kind of value")


def mismatch(expected: str, value: Any) -> InvalidRecord:
    """Return the error for a value of the wrong kind."""
    return InvalidRecord(f"expected {expected}, found {found(value)}")


def below(place: str, error: InvalidRecord) -> InvalidRecord:
    """Return the same error as seen from the record or list that holds it at `place`."""
    joint = "." if error.field and not error.field.startswith("[") else ""
    return InvalidRecord(error.message, f"{place}{joint}{error.field}")


def decode_at(place: str, decode: Decode, value: Any, kind: Any) -> Any:
    """Return the value at this place of a record or list, decoded."""
    try:
        return decode(value, kind)
    except InvalidRecord as error:
        raise below(place, error) from None


def strict(cls: type) -> Decode:
    """Exactly this JSON kind."""

    def decode(value: Any, _: Any) -> Any:
        if type(value) is cls:
            return value
        raise mismatch(_JSON_KINDS[cls], value)

    return decode


def decode_float(value: Any, _: Any) -> float:
    """Return a number; an integer counts as one."""
    if type(value) is float:
        return value
    if type(value) is int and abs(value) < 2**1023:
        return float(value)
    raise mismatch("a number", value)


def decode_bytes(value: Any, _: Any) -> bytes:
    """Return bytes, which MessagePack has and JSON does not."""
    if type(value) is bytes:
        return value
    raise mismatch("bytes", value)


def decode_uuid(value: Any, _: Any) -> UUID:
    try:
        return UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise mismatch("a UUID", value) from None


def int_range(kind: Any) -> IntRange | None:
    """Return the range of an integer type, None for any other type."""
    if kind is int:
        return _UNBOUNDED
    marks = getattr(kind, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, IntRange)), None)


def int_decoder(kind: Any) -> Decode:
    limits = int_range(kind) or _UNBOUNDED
    low, high = limits.low, limits.high

    def decode(value: Any, _: Any) -> int:
        if type(value) is int and low <= value <= high:
            return value
        raise mismatch(f"an integer between {low} and {high}" if type(value) is int else "an integer", value)

    return decode


def list_decoder(kind: Any, hook_for: HookFor) -> Decode:
    (item_kind,) = get_args(kind) or (Any,)
    decode_item: Decode = hook_for(item_kind)

    def locate(value: list[Any]) -> list[Any]:
        items = []
        for index, item in enumerate(value):
            try:
                items.append(decode_item(item, item_kind))
            except InvalidRecord as error:
                raise below(f"[{index}]", error) from None
        return items

    def decode(value: Any, _: Any) -> list[Any]:
        if type(value) is not list:
            raise mismatch("a list", value)
        return locate(value)

    return decode if (limits := int_range(item_kind)) is None else _int_list_decoder(limits, locate)


def _int_list_decoder(limits: IntRange, locate: Callable[[list[Any]], list[Any]]) -> Decode:
    """Token ids are the bulk of a request: one pass without a call per item, and the place only once it is wrong.

    A prompt of a million ids takes 15 ms by msgspec, which checks and copies at once, and 60 by the loop. It is taken
    in parts, between which other threads may run.
    """
    low, high = limits.low, limits.high
    kind = list[Annotated[int, msgspec.Meta(ge=low, le=high)]] if high < 2**63 else None

    def decode(value: Any, _: Any) -> list[Any]:
        if type(value) is not list:
            raise mismatch("a list", value)
        if kind is not None and len(value) >= _MANY:
            try:
                return _converted(value, kind)
            except msgspec.ValidationError:
                return locate(value)
        return value.copy() if _are_integers(value, limits) else locate(value)

    return decode


_MANY, _PART = 128, 65_536


def _converted(value: list[Any], kind: Any) -> list[Any]:
    if len(value) <= _PART:
        return cast(list[Any], msgspec.convert(value, kind))
    parts = (value[at : at + _PART] for at in range(0, len(value), _PART))
    return list(chain.from_iterable(msgspec.convert(part, kind) for part in parts))


def set_decoder(kind: Any, hook_for: HookFor) -> Decode:
    decode_list = list_decoder(kind, hook_for)

    def decode(value: Any, _: Any) -> set[Any]:
        return set(decode_list(value, None))

    return decode


def tuple_decoder(kind: Any, hook_for: HookFor) -> Decode:
    kinds = get_args(kind)
    hooks = [hook_for(item_kind) for item_kind in kinds]

    def decode(value: Any, _: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(kinds):
            raise mismatch(f"a list of {len(kinds)}", value)
        parts = enumerate(zip(hooks, value, kinds, strict=True))
        return tuple(decode_at(f"[{index}]", *part) for index, part in parts)

    return decode


def named_tuple_decoder(kind: Any, hook_for: HookFor) -> Decode:
    """Return a named tuple, which is an object on the wire."""
    kinds = get_type_hints(kind, include_extras=True)
    hooks = {name: hook_for(item_kind) for name, item_kind in kinds.items()}

    def decode(value: Any, _: Any) -> Any:
        if type(value) is not dict:
            raise mismatch("an object", value)
        items = {}
        for name, hook in hooks.items():
            if name in value:
                items[name] = decode_at(name, hook, value[name], kinds[name])
            elif name not in kind._field_defaults:
                raise InvalidRecord("is required", name)
        return kind(**items)

    return decode


def records_decoder(make: Callable[..., Any], ranges: Mapping[str, IntRange], decode_each: Decode) -> Decode:
    """Return the reader of a list of records that have nothing but their required integers, as KV blocks mostly do.

    `ranges` are those of the integers by key, in the order of the record's parameters. All are checked column by column
    (measured: a third of the time of one call for each record). A list that does not fit is left to `decode_each`,
    which also raises with the place.
    """
    names = tuple(ranges)

    def decode(value: Any, _: Any) -> Any:
        if type(value) is not list or not value:
            return decode_each(value, _)
        try:
            columns = [[record[name] for record in value] for name in names]
            fits = max(map(len, value)) == len(names) and all(map(_are_integers, columns, ranges.values()))
        except (KeyError, TypeError, IndexError):
            return decode_each(value, _)
        return list(map(make, *columns)) if fits else decode_each(value, _)

    return decode


def _are_integers(values: list[Any], limits: IntRange) -> bool:
    if not set(map(type, values)) <= {int}:
        return False
    return not values or (min(values) >= limits.low and max(values) <= limits.high)


def dict_decoder(kind: Any, hook_for: HookFor) -> Decode:
    key_kind, item_kind = get_args(kind) or (str, Any)
    decode_item: Decode = hook_for(item_kind)
    decode_key = hook_for(key_kind)
    by_number = int_range(key_kind) is not None

    def decode(value: Any, _: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise mismatch("an object", value)
        items = {}
        for key, item in value.items():
            # JSON has text keys only; MessagePack may carry the number itself.
            number = int(key) if by_number and type(key) is str and _DIGITS.fullmatch(key) else key
            try:
                items[decode_key(number, key_kind)] = decode_item(item, item_kind)
            except InvalidRecord as error:
                raise below(shortened(str(key)), error) from None
        return items

    return decode


def literal_decoder(kind: Any) -> Decode:
    allowed = {value: value for value in get_args(kind)}
    expected = "one of " + ", ".join(str(value) for value in allowed)

    def decode(value: Any, _: Any) -> Any:
        if type(value) is str and value in allowed:
            return value
        raise mismatch(expected, value)

    return decode


def decode_enum(value: Any, kind: type[StrEnum]) -> StrEnum:
    """Return a member by its value."""
    for member in kind:
        if member.value == value:
            return member
    raise mismatch("one of " + ", ".join(kind), value)


def is_union(kind: Any) -> bool:
    """Return whether the type is one of several."""
    return get_origin(kind) in (Union, types.UnionType)


def shape(kind: Any) -> Any:
    """Return the type without its parameters."""
    return get_origin(kind) or kind


def is_plain(kind: Any) -> bool:
    """Return whether values of this type are plain already, however deep."""
    if kind in (Any, str, bool, float, type(None)) or int_range(kind) is not None:
        return True
    origin = get_origin(kind)
    if origin is Literal:
        return True
    return (origin in (list, dict) or is_union(kind)) and all(is_plain(part) for part in get_args(kind))


def has_own_form(kind: Any) -> bool:
    """Return whether the type reads and writes its wire form by itself."""
    return isinstance(kind, type) and hasattr(kind, "from_wire")


def is_named_tuple(kind: Any) -> bool:
    """Return whether the type is a named tuple."""
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _json_types(kind: Any) -> tuple[type, ...]:
    """Return the types of plain values that may stand for a kind."""
    if int_range(kind) is not None:
        return (int,)
    if kind is float:
        return (float, int)
    if kind in (str, bool):
        return (kind,)
    origin = get_origin(kind) or kind
    if origin is Literal or (isinstance(origin, type) and issubclass(origin, StrEnum)):
        return (str,)
    if origin in (list, tuple, set, Sequence):
        return (list,)
    return (dict,)


def union_decoder(kind: Any, hook_for: HookFor) -> Decode:
    """Return the alternative is chosen by the kind of the value alone, and among lists by their first item."""
    kinds = [item for item in get_args(kind) if item is not type(None)]
    optional = len(kinds) < len(get_args(kind))
    if len(kinds) == 1:
        kind, inner = kinds[0], hook_for(kinds[0])
        return lambda value, _: None if value is None else inner(value, kind)
    choices: dict[type, list[tuple[Any, Decode]]] = {}
    for item in kinds:
        for json_type in _json_types(item):
            choices.setdefault(json_type, []).append((item, hook_for(item)))
    expected = " or ".join(dict.fromkeys(_JSON_KINDS[json_type] for json_type in choices))

    def decode(value: Any, _: Any) -> Any:
        if value is None and optional:
            return None
        candidates = choices.get(type(value))
        if candidates is None:
            raise mismatch(expected, value)
        item, hook = candidates[0]
        if len(candidates) > 1 and value:
            item, hook = _by_first_item(candidates, type(value[0]))
        return hook(value, item)

    return decode


def _by_first_item(candidates: list[tuple[Any, Decode]], first: type) -> tuple[Any, Decode]:
    """Return the list alternative whose items are of the first item's type; the first alternative if none is."""
    fitting = (choice for choice in candidates if first in _json_types(get_args(choice[0])[0]))
    return next(fitting, candidates[0])
