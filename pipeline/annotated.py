"""Annotated[T]: one item of a stream: data, an event, comments or an error.

An item is an error exactly if its event is `error`; its error field is then set too. It is the last item of its stream.

Source: dynamo lib/runtime/src/protocols/annotated.rs. Other than there, error items always carry the typed error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from attrs import define

from .errors import PenstockError, Unknown, to_error

T = TypeVar("T")
U = TypeVar("U")

ERROR_EVENT = "error"


@define(slots=True)
class Annotated(Generic[T]):
    """One item. A part that is None is omitted on the wire."""

    data: T | None = None
    id: str | None = None
    event: str | None = None
    comment: list[str] | None = None
    error: PenstockError | None = None

    @classmethod
    def from_data(cls, data: T) -> Annotated[T]:
        """Return an item of data only."""
        return cls(data)

    @classmethod
    def from_error(cls, error: BaseException | str) -> Annotated[T]:
        """Return an error item. A text becomes an `Unknown`; a foreign exception is converted with its causes."""
        typed = Unknown(error) if isinstance(error, str) else to_error(error)
        return cls(None, None, ERROR_EVENT, None, typed)

    @classmethod
    def from_annotation(cls, name: str, value: object) -> Annotated[T]:
        """Return an event with the JSON text of `value` as its one comment.

        Raise TypeError, or ValueError for a number that is not finite, if it has no JSON form.
        """
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return cls(None, None, name, [text], None)

    @property
    def is_error(self) -> bool:
        return self.event == ERROR_EVENT

    @property
    def is_ok(self) -> bool:
        return self.event != ERROR_EVENT

    @property
    def is_event(self) -> bool:
        """Whether there is an event at all, an error included."""
        return self.event is not None

    def extract_error(self) -> PenstockError | None:
        """Return the error of an error item: its error field, else its comments as text; None for any other item."""
        if not self.is_error:
            return None
        return self.error or Unknown(", ".join(self.comment or ()) or "unknown error")

    def ok(self) -> Annotated[T]:
        """Return this item. Raise the error of an error item."""
        if (error := self.extract_error()) is not None:
            raise error
        return self

    def into_data(self) -> T | None:
        """Return the data or None. Raise the error of an error item."""
        return self.ok().data

    def into_result(self) -> T | None:
        """Same as `into_data`."""
        return self.into_data()

    def transfer(self, data: U | None) -> Annotated[U]:
        """Return the same item around other data: id, event, comments and error are kept."""
        return Annotated(data, self.id, self.event, self.comment, self.error)

    def map_data(self, change: Callable[[T], U]) -> Annotated[U]:
        """Return the same item around `change(data)`; if that fails, an error item with the failure."""
        if self.data is None:
            return self.transfer(None)
        try:
            return self.transfer(change(self.data))
        except Exception as failure:
            return Annotated[Any].from_error(failure)
