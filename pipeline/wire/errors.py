"""Errors <-> plain records: an error crosses a process and comes back as the same class with its chain.

A record is `{"error_type", "message"}`, plus `details` for classes with facts of their own and `caused_by` for the
next link. Types are plain names, backend errors `{"Backend": kind}`.

Source: dynamo lib/runtime/src/error.rs, DynamoError serde form. `details` is ours; other readers ignore it.
"""

from __future__ import annotations

import re
from inspect import signature
from itertools import islice
from typing import Any, TypeGuard

from attrs import asdict

from ..errors import (
    BackendError,
    BackendUnknown,
    ContractViolation,
    ExceededLimit,
    InvalidArgument,
    MessageTooLarge,
    PenstockError,
    Refused,
    StatusError,
    Unknown,
    chain,
    error_type,
    to_error,
)
from ..protocols.field_rules import InvalidRecord

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")
_NUMBER_MAX = 1e300
LINKS_MAX = 64
"""Links of a chain on the wire: hours of retries with `from` make a chain deeper than a reader can nest."""

_DETAILS: dict[type[PenstockError], dict[str, type]] = {
    InvalidArgument: {"field": str, "exceeded": ExceededLimit},
    StatusError: {"status": int},
    MessageTooLarge: {"size_bytes": int, "limit_bytes": int},
    ContractViolation: {"rule": str},
    Refused: {"retry_after_s": float, "status": int, "exceeded": ExceededLimit},
}
"""The facts of a class and of those below it; each class has of them what its constructor takes."""


def error_to_plain(error: BaseException) -> dict[str, Any]:
    """Return the record of an error and its outermost causes; a foreign exception is converted first, a cycle ends."""
    record: dict[str, Any] | None = None
    for link in reversed(list(islice(chain(to_error(error)), LINKS_MAX))):
        outer = _link_to_plain(link)
        if record is not None:
            outer["caused_by"] = record
        record = outer
    assert record is not None, "a chain has at least the error itself"
    return record


def _link_to_plain(link: BaseException) -> dict[str, Any]:
    """Return one link of the chain without its cause."""
    if not isinstance(link, PenstockError):
        return {"error_type": Unknown.type_name, "message": str(link) or type(link).__name__}
    kind = {"Backend": link.kind} if isinstance(link, BackendError) else link.type_name
    record: dict[str, Any] = {"error_type": kind, "message": link.message}
    details = {name: getattr(link, name, None) for name in _details_of(type(link))}
    if isinstance(exceeded := details.get("exceeded"), ExceededLimit):
        details["exceeded"] = asdict(exceeded)
    if details := {name: value for name, value in details.items() if value is not None}:
        record["details"] = details
    return record


def error_from_plain(record: Any) -> PenstockError:
    """Return the error in a record, with its causes. An unknown type becomes `Unknown`, an unknown kind of backend
    error `BackendUnknown`. Raise InvalidRecord for anything that is not such a record."""
    links: list[dict[str, Any]] = []
    while record is not None:
        if not isinstance(record, dict):
            raise InvalidRecord("expected an error record", ".".join(["caused_by"] * len(links)))
        links.append(record)
        record = record.get("caused_by")
    if not links:
        raise InvalidRecord("expected an error record, found null")
    error: PenstockError | None = None
    for depth in reversed(range(len(links))):
        try:
            error = _link_from_plain(links[depth], error)
        except InvalidRecord as wrong:
            raise InvalidRecord(wrong.message, "caused_by." * depth + wrong.field) from None
    assert error is not None
    return error


def _link_from_plain(record: dict[str, Any], cause: PenstockError | None) -> PenstockError:
    """Return one link of the chain over its cause."""
    message = record.get("message", "")
    if not isinstance(message, str):
        raise InvalidRecord("expected a string", "message")
    cls = _class_of(record.get("error_type"))
    try:
        return cls(message, cause=cause, **_read_details(cls, record.get("details")))
    except TypeError:  # a class whose constructor needs more than a record holds
        return Unknown(message, cause=cause)


def _class_of(kind: Any) -> type[PenstockError]:
    if isinstance(kind, str):
        return error_type(kind) or Unknown
    if isinstance(kind, dict) and kind.keys() == {"Backend"} and isinstance(kind["Backend"], str):
        return error_type(f"Backend{kind['Backend']}") or BackendUnknown
    raise InvalidRecord("expected the name of an error type", "error_type")


def _details_of(cls: type[PenstockError]) -> dict[str, type]:
    """Return the facts a class carries beside its message, with the type of each."""
    facts = next((_DETAILS[base] for base in cls.__mro__ if base in _DETAILS), {})
    known = signature(cls).parameters if facts else {}
    return {name: kind for name, kind in facts.items() if name in known}


def _read_details(cls: type[PenstockError], details: Any) -> dict[str, Any]:
    """Return those facts of the class that the record holds in the right type; others are left at their defaults."""
    if not isinstance(details, dict):
        return {}
    read = {name: _read(kind, details.get(name)) for name, kind in _details_of(cls).items()}
    return {name: value for name, value in read.items() if value is not None}


def _read(kind: type, value: Any) -> Any:
    """Return the value if it has exactly this type, else None. A whole number may be a float that was shortened."""
    if kind is ExceededLimit:
        return _exceeded(value)
    return value if type(value) is kind or (kind is float and type(value) is int) else None


def _exceeded(value: Any) -> ExceededLimit | None:
    """Return the limit in a record; None for one that could not be shown in a header."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not _NAME.fullmatch(name):
        return None
    found, threshold = value.get("value"), value.get("threshold")
    return ExceededLimit(name, found, threshold) if _is_number(found) and _is_number(threshold) else None


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) <= _NUMBER_MAX
