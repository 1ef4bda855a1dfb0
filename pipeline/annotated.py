"""Annotated[T]: one item of a stream: data, an event, comments or an error.

An item is an error exactly if its event is `error`; then its error field is set too. It is the last item its consumer
may rely on.

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
    """One item; each part is None where it has none, and is then left out on the wire."""

    data: T | None = None
    id: str | None = None
    event: str | None = None
    comment: list[str] | None = None
    error: PenstockError | None = None

    @classmethod
    def from_data(cls, data: T) -> Annotated[T]:
        """An item of data only."""
        return cls(data)

    @classmethod
    def from_error(cls, error: BaseException | str) -> Annotated[T]:
        """An error item; a text becomes an `Unknown`, a foreign exception is converted with its causes."""
        typed = Unknown(error) if isinstance(error, str) else to_error(error)
        return cls(None, None, ERROR_EVENT, None, typed)

    @classmethod
    def from_annotation(cls, name: str, value: object) -> Annotated[T]:
        """An event with the JSON text of `value` as its one comment.

        Raises TypeError, or ValueError for a number that is not finite, if it has no JSON form.
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
        """The error of an error item: its error field, else its comments as text; None for any other item."""
        if not self.is_error:
            return None
        return self.error or Unknown(", ".join(self.comment or ()) or "unknown error")

    def ok(self) -> Annotated[T]:
        """This item; raises the error of an error item."""
        if (error := self.extract_error()) is not None:
            raise error
        return self

    def into_data(self) -> T | None:
        """The data, None where there is none; raises the error of an error item."""
        return self.ok().data

    def into_result(self) -> T | None:
        """The same as `into_data`."""
        return self.into_data()

    def transfer(self, data: U | None) -> Annotated[U]:
        """The same item around other data: id, event, comments and error are kept."""
        return Annotated(data, self.id, self.event, self.comment, self.error)

    def map_data(self, change: Callable[[T], U]) -> Annotated[U]:
        """The same item around `change(data)`; if that fails, a fresh error item that says why."""
        if self.data is None:
            return self.transfer(None)
        try:
            return self.transfer(change(self.data))
        except Exception as failure:
            return Annotated[Any].from_error(failure)
