"""Mark: a value that a stage leaves on a request for a stage further down, taken once."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pipeline import Context, Control

T = TypeVar("T")


class Mark(Generic[T]):
    """One kind of mark. It is kept in the request's registry, for one dispatch.

    It holds for the request it was put on and for what `with_payload` makes of that, not for a child: a request's
    prefill, its decode and its attempts share one registry, but each has a control of its own.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def put(self, request: Context[Any], value: T) -> None:
        """Leave the value for the stage below that takes it; it replaces one that was not taken."""
        registry = request.registry
        if (marks := registry.get_optional(self._name, _Marks)) is None:
            registry.insert_shared(self._name, marks := _Marks())
        marks[request.control] = value

    def take(self, request: Context[Any]) -> T | None:
        """Return the value and remove the mark; None if there is none."""
        marks = request.registry.get_optional(self._name, _Marks)
        if not marks:
            return None
        value: T | None = marks.pop(request.control, None)
        if not marks:  # most have one only, and stay open for long
            request.registry.remove_shared(self._name)
        return value


class _Marks(dict[Control, Any]):
    """The values by the control of the request they were put on."""
