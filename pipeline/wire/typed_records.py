"""Records of MessagePack, read by structs of msgspec that are made from their wire rules.

They are the same as those of the general codec, in half of its time.

    bytes ──► structs, checked and filled in one call ──► records
       └─ of any other form than the usual one ──► the general codec, which also raises with the place

The usual form has no unknown key, and no value in an optional field of a kind that is not read here: kinds are texts,
booleans, integers, bytes, literals, any plain value, lists, named tuples, records and external tags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, Final, Literal, cast, get_args, get_type_hints

import attrs
import msgspec
from msgspec import UNSET, UnsetType

from ..protocols.field_rules import WIRE_KEY, Tagged
from .codec import from_msgpack
from .decoders import has_own_form, int_range, is_named_tuple, is_union, shape
from .unions import tagged

Make = Callable[[Any], Any]
Reader = Callable[[bytes], Any]


class _Form:
    """A type as msgspec reads it, and the function that makes the value of it; None: it is the value."""

    __slots__ = ("kind", "make")

    def __init__(self, kind: Any, make: Make | None = None) -> None:
        self.kind, self.make = kind, make


_AS_THEY_ARE: Final = (str, bool, bytes, Any)
_EMPTY_LIST: Final[Any] = attrs.Factory(list)
_readers: dict[Any, Reader] = {}
"""By their types, of which there are few."""


def record_reader(kind: Any) -> Reader:
    """Return the function that reads a MessagePack message as this type. It raises as `from_msgpack`."""
    if (known := _readers.get(kind)) is not None:
        return known

    def read_any(data: bytes) -> Any:
        return from_msgpack(data, kind)

    reader = _readers[kind] = typed_reader(kind, read_any)
    return reader


def typed_reader(kind: Any, otherwise: Reader) -> Reader:
    """Return the function that reads messages as this type, and leaves those of no usual form to another function."""
    try:
        form = _form(kind)
    except RecursionError:  # a record that holds records of its own type
        form = None
    if form is None:
        return otherwise
    decode, make = msgspec.msgpack.Decoder(form.kind).decode, form.make or _same

    def read(data: bytes) -> Any:
        try:
            return make(decode(data))
        except (ValueError, RecursionError):
            return otherwise(data)

    return read


def _same(value: Any) -> Any:
    return value


def _form(kind: Any) -> _Form | None:
    """Return the form of a type; None for one that is left to the general codec."""
    if kind in _AS_THEY_ARE:
        return _Form(kind)
    if shape(kind) is Literal:  # the general codec knows texts only
        return _Form(kind) if all(type(value) is str for value in get_args(kind)) else None
    if (limits := int_range(kind)) is not None:
        high = limits.high if limits.high < 2**63 else None  # no integer of MessagePack exceeds 64 bits
        return _Form(Annotated[int, msgspec.Meta(ge=limits.low, le=high)])
    if (rule := tagged(kind)) is not None:
        return _tagged_form(rule) if rule.key is None else None
    if is_union(kind):
        return _optional_form(kind)
    if shape(kind) is Sequence and (columns := getattr(get_args(kind)[0], "wire_columns", None)) is not None:
        return _columns_form(get_args(kind)[0], columns)
    if shape(kind) in (list, Sequence):
        return _list_form(*get_args(kind))
    if is_named_tuple(kind):
        return _named_tuple_form(kind)
    if isinstance(kind, type) and attrs.has(kind) and not has_own_form(kind):
        return _record_form(kind)
    return None


def _optional_form(kind: Any) -> _Form | None:
    """Return the form of a type or None."""
    kinds = [each for each in get_args(kind) if each is not NoneType]
    if len(kinds) > 1 or (form := _form(kinds[0])) is None:
        return None
    if (make := form.make) is None:
        return _Form(form.kind | None if form.kind is not Any else Any)
    return _Form(form.kind | None, lambda value: None if value is None else make(value))


def _list_form(item_kind: Any = Any) -> _Form | None:
    if (form := _form(item_kind)) is None:
        return None
    if (make := form.make) is None:
        return _Form(list[form.kind])  # type: ignore[name-defined]
    return _Form(list[form.kind], lambda value: list(map(make, value)))  # type: ignore[name-defined]


def _columns_form(item_kind: Any, columns: Callable[..., Any]) -> _Form | None:
    """Return the form of a sequence that is made of the columns of its records' fields."""
    if (form := _form(item_kind)) is None:
        return None
    names = [field.name for field in msgspec.structs.fields(form.kind)]

    def make(value: Any) -> Any:
        return columns(*([getattr(each, name) for each in value] for name in names))

    return _Form(list[form.kind], make)  # type: ignore[name-defined]


def _named_tuple_form(kind: Any) -> _Form | None:
    forms = {name: _form(each) for name, each in get_type_hints(kind, include_extras=True).items()}
    return _object_form(kind, [(name, name, form, UNSET) for name, form in forms.items() if form], len(forms))


def _record_form(cls: Any) -> _Form | None:
    """Return the form of a record whose parameters are its fields, in their order."""
    attrs.resolve_types(cls)
    fields: list[tuple[str, str, _Form, Any]] = []
    is_complete = True
    for field in attrs.fields(cls):
        rule = field.metadata.get(WIRE_KEY)
        form = None if rule is not None and rule.write in ("never", "rest") else _form(field.type)
        if form is None and field.default is not attrs.NOTHING:
            is_complete = False  # where it is set, the key is unknown to the struct
            continue
        if form is None or not is_complete or not field.init or field.kw_only:
            return None  # it is not the next parameter
        if form.make is not None and not (field.default in (attrs.NOTHING, None) or field.default == _EMPTY_LIST):
            return None  # the default is no struct
        key = field.name if rule is None or rule.name is None else rule.name
        fields.append((field.name, key, form, UNSET if field.default is attrs.NOTHING else field.default))
    return _object_form(cls, fields, len(fields))


def _object_form(cls: Any, fields: Sequence[tuple[str, str, _Form, Any]], count: int) -> _Form | None:
    """Return the form of an object with these fields: name, key, form, and default if it has one."""
    if len(fields) < count:
        return None
    definitions: list[Any] = []
    for name, _, form, default in fields:
        if default is UNSET:
            definitions.append((name, form.kind))
        elif isinstance(default, type(_EMPTY_LIST)):
            definitions.append((name, form.kind, msgspec.field(default_factory=cast(Any, default).factory)))
        else:
            definitions.append((name, form.kind, default))
    keys = {name: key for name, key, _, _ in fields}
    struct = msgspec.defstruct(
        cls.__name__, definitions, rename=keys, forbid_unknown_fields=True, frozen=True, gc=False, kw_only=True
    )
    return _Form(struct, _maker(cls, [(name, form.make) for name, _, form, _ in fields]))


def _maker(cls: Any, fields: Sequence[tuple[str, Make | None]]) -> Make:
    """Return the function that makes an object of a struct's fields."""
    names = [name for name, _ in fields]
    makes = [(at, make) for at, (_, make) in enumerate(fields) if make is not None]
    if not names:
        return lambda _: cls()
    if len(names) == 1:
        get, only = attrgetter(*names), fields[0][1]
        return (lambda struct: cls(get(struct))) if only is None else (lambda struct: cls(only(get(struct))))
    values_of = attrgetter(*names)
    if not makes:
        return lambda struct: cls(*values_of(struct))

    def make_all(struct: Any) -> Any:
        values = list(values_of(struct))
        for at, make in makes:
            values[at] = make(values[at])
        return cls(*values)

    return make_all


def _tagged_form(rule: Tagged) -> _Form | None:
    """Return the form of a union with external tags: an object with one key, or the text of a record without fields."""
    with_fields = {tag: record for tag, record in rule.kinds.items() if attrs.fields(record)}
    texts: Mapping[Any, Any] = {tag: record for tag, record in rule.kinds.items() if tag not in with_fields}
    forms = {tag: _record_form(record) for tag, record in with_fields.items()}
    if not all(tag.isidentifier() for tag in with_fields) or None in forms.values():
        return None
    makes = [(tag, form.make) for tag, form in forms.items() if form is not None and form.make is not None]
    definitions: list[Any] = [(tag, form.kind | UnsetType, UNSET) for tag, form in forms.items() if form is not None]
    kind: Any = msgspec.defstruct("Tags", definitions, forbid_unknown_fields=True, frozen=True, gc=False)

    def make(value: Any) -> Any:
        if type(value) is str:
            return texts[value]()
        made = [make(content) for tag, make in makes if (content := getattr(value, tag)) is not UNSET]
        if len(made) != 1:
            raise ValueError("expected one tag")
        return made[0]

    return _Form(kind | Literal[tuple(texts)] if texts else kind, make)
