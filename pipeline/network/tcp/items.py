"""The types of what crosses: the payload that an engine takes, the items that a caller reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ForwardRef, TypeVar

from pipeline import AsyncEngine, InvalidArgument
from pipeline.wire import is_readable, ready_reader

from ...signatures import Signature, type_text


def payload_type(engine: AsyncEngine[Any, Any]) -> Any:
    """Return the type of an engine's payloads, Any where it declares none. Raise InvalidArgument as `item_reader`."""
    return _checked(Signature.of(engine, AsyncEngine).takes)


def item_reader(item_type: Any, join_max: int) -> Callable[[deque[bytes]], tuple[list[Any], int, int]]:
    """Return the function that takes the frames that wait and reads items of this type: see `pipeline.wire`.

    Raise InvalidArgument if bytes cannot be read as the type.
    """
    return ready_reader(_checked(item_type), join_max)


def _checked(kind: Any) -> Any:
    if kind in (object, None, type(None)) or isinstance(kind, (TypeVar, str, ForwardRef)):
        return Any
    if not is_readable(kind):
        raise InvalidArgument(f"{type_text(kind)} has no form in which it crosses processes")
    return kind
