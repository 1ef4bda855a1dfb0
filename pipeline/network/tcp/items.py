"""The types of what crosses: the payload that an engine takes, the items that a caller reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ForwardRef, TypeVar

from attrs import frozen

from pipeline import AsyncEngine, InvalidArgument
from pipeline.wire import is_of_tokens, is_readable, plain_reader, ready_reader

from ...signatures import Signature, type_text


def payload_type(engine: AsyncEngine[Any, Any]) -> Any:
    """Return the type of an engine's payloads, Any where it declares none. Raise InvalidArgument as `item_reader`."""
    return _checked(Signature.of(engine, AsyncEngine).takes)


def gives_tokens(engine: AsyncEngine[Any, Any]) -> bool:
    """Return whether the engine declares items of tokens, so that its streams are fed with token ids."""
    return is_of_tokens(Signature.of(engine, AsyncEngine).gives)


@frozen
class ItemReader:
    """Reads items of one type: see `pipeline.wire`."""

    ready: Callable[[deque[bytes]], tuple[list[Any], int, int]]
    """Removes the first of the frames that wait, or several. Returns items, how many these had, and their bytes."""
    plain: Callable[[bytes], tuple[Any, ...] | None] | None
    """Returns the parts of a lone plain item; None for any other frame."""


def item_reader(item_type: Any, join_max: int) -> ItemReader:
    """Return the reader of items of this type. Raise InvalidArgument if bytes cannot be read as the type."""
    kind = _checked(item_type)
    return ItemReader(ready_reader(kind, join_max), plain_reader(kind))


def _checked(kind: Any) -> Any:
    if kind in (object, None, type(None)) or isinstance(kind, (TypeVar, str, ForwardRef)):
        return Any
    if not is_readable(kind):
        raise InvalidArgument(f"{type_text(kind)} has no form in which it crosses processes")
    return kind
