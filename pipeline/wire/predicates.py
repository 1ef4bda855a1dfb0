"""What a type is: the predicates by which the codec chooses the translators of a field."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from ..errors import PenstockError
from .decoders import int_range, is_union
from .unions import tagged


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


def is_tagged(kind: Any) -> bool:
    """Return whether the type is a member of a tagged union, or the union."""
    return tagged(kind) is not None


def is_error(kind: Any) -> bool:
    """Return whether the type is an error of penstock."""
    return isinstance(kind, type) and issubclass(kind, PenstockError)
