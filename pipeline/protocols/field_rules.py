"""The wire form of a record's fields, declared on the fields.

A field without one of these marks follows from its default: no default means required, default None means left out
while None, any other default means optional when read and always written. Unknown keys are ignored unless the class
has `wire_closed: ClassVar[bool] = True`. A field without a default that is named in the class variable `wire_nullable`
is read as null where it is absent. The records of a union are distinguished by a tag: see `Tagged`. A class with a wire
form of its own has `to_wire()` and the class method `from_wire(value)` instead.

Where `wire_columns` of a record is a class of sequences, a `Sequence` of such records in which no optional field is set
may be read as one, which is made of a list for each required field.

`pipeline.wire.codec` reads these marks; nothing here translates anything.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from attrs import field, frozen

WIRE_KEY = "penstock.wire"
"""Key of a field's `WireRule` in its attrs metadata."""


SHOWN_MAX = 64
"""How many characters of a client's name or text an error repeats."""


def shortened(text: str, most: int = SHOWN_MAX) -> str:
    """Return the text as an error repeats it: its first characters, if it is longer than `most`."""
    return text if len(text) <= most else text[:most] + "..."


class InvalidRecord(ValueError):
    """A value no record of this kind may hold; `field` is the path of the offending place below the record.

    The codec turns it into `InvalidArgument` with the whole path.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field


@frozen
class IntRange:
    """The integers a field may hold, both ends included."""

    low: int
    high: int


U8: TypeAlias = typing.Annotated[int, IntRange(0, 2**8 - 1)]
U16: TypeAlias = typing.Annotated[int, IntRange(0, 2**16 - 1)]
U32: TypeAlias = typing.Annotated[int, IntRange(0, 2**32 - 1)]
U64: TypeAlias = typing.Annotated[int, IntRange(0, 2**64 - 1)]
I32: TypeAlias = typing.Annotated[int, IntRange(-(2**31), 2**31 - 1)]
I64: TypeAlias = typing.Annotated[int, IntRange(-(2**63), 2**63 - 1)]

U32_MAX = 2**32 - 1


@frozen
class WireRule:
    """One field: when it is written, under which key, and which older keys are read as well.

    `write` is `set` (left out while it equals its default), `always`, `never` (nor read), or `rest` (a dict that takes
    every key no other field claims, and is written back among them).
    """

    write: Literal["set", "always", "never", "rest"]
    name: str | None = None
    aliases: tuple[str, ...] = ()


@frozen(eq=False)
class Tagged:
    """How the records of a union are distinguished on the wire.

    With a `key` the tag is a value beside the record's own fields (internal tag):

        {"method": "mark_free", "request_id": "r1"}

    Without one the tag is the only key of an object that holds the record (external tag); a record without fields is
    its tag as a string:

        {"removed": {"block_hashes": [1, 2]}}        "cleared"

    It marks the union, `typing.Annotated[A | B, Tagged({"a": A, "b": B})]`, or is the class variable `wire_union` of
    the common base of the records. A record with that base reads and writes its tag by itself, too.
    """

    kinds: Mapping[str, type[Any]]
    """Tag -> the record it stands for."""
    key: str | None = None
    """The key of an internal tag; None: the tag is external."""


def needs(field: str, needed: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return keywords of JSON Schema for a record in which other fields depend on one: its value -> required fields.

    A record has them, or others that its fields alone do not show, as the class variable `wire_needs`.
    """
    return {
        "allOf": [
            {
                "if": {"properties": {field: {"const": value}}, "required": [field]},
                "then": {"required": list(names), "properties": {name: {"not": {"type": "null"}} for name in names}},
            }
            for value, names in needed.items()
        ]
    }


def null(*, name: str | None = None) -> Any:
    """Return an optional field that is written as null while it is None."""
    return field(default=None, metadata={WIRE_KEY: WireRule("always", name)})


def skip(
    default: Any = None,
    *,
    factory: Callable[[], Any] | None = None,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Return a field that is left out while it equals its default (None, unless given)."""
    metadata = {WIRE_KEY: WireRule("set", name, aliases)}
    if factory is not None:
        return field(factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def never(*, init: bool = True) -> Any:
    """Return a field of this process only; None wherever the record is read. Not part of equality.

    Without `init` it is None in every new record, a copy with changes included.
    """
    return field(default=None, init=init, eq=False, repr=False, metadata={WIRE_KEY: WireRule("never")})


def rest() -> Any:
    """Return the dict of all keys that no other field of the record claims."""
    return field(factory=dict, metadata={WIRE_KEY: WireRule("rest")})
