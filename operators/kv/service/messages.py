"""What a router service is asked and what it answers: objects told apart by the key `method`.

    asked      new │ potential_loads │ mark_prefill │ mark_free
    answered   new │ queue_rejected │ backpressure │ potential_loads │ prefill_marked │ free_marked

Source: dynamo lib/kv-router/src/protocols.rs, RouterRequest and RouterResponse; `backpressure` is of the releases
before policy classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Self

from attrs import NOTHING, Attribute, define, fields, frozen, resolve_types

from pipeline import InvalidArgument
from pipeline.protocols import BlockExtraInfo, InvalidRecord, RoutingConstraints
from pipeline.protocols.field_rules import U32, U64, WIRE_KEY, skip
from pipeline.wire import from_plain, to_plain

from ..errors import LimitKind
from ..load import PotentialLoad


class _Message:
    """One of several kinds of object. Fields that are as if left out are not written, unknown keys are ignored.

    `from_wire` of a base reads any of its kinds, that of a kind only this one. Raises InvalidRecord, naming the place.
    """

    method: ClassVar[str]
    kinds: ClassVar[Mapping[str, type[Self]]]
    """`method` -> the kind, for all kinds of a base."""

    def to_wire(self) -> dict[str, Any]:
        written = {field.name: getattr(self, field.name) for field in _fields(type(self)) if not _is_unset(self, field)}
        return {"method": self.method} | {name: to_plain(value) for name, value in written.items()}

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        if not isinstance(value, dict):
            raise InvalidRecord("expected an object")
        kinds = {method: kind for method, kind in cls.kinds.items() if issubclass(kind, cls)}
        method = value.get("method")
        if not isinstance(method, str) or method not in kinds:
            raise InvalidRecord(f"expected one of {', '.join(kinds)}", "method")
        kind = kinds[method]
        return kind(**{field.name: _read(field, value) for field in _fields(kind) if _is_given(field, value)})


def _fields(kind: type[Any]) -> Iterable[Attribute[Any]]:
    attributes: tuple[Attribute[Any], ...] = fields(resolve_types(kind))
    return attributes


def _is_unset(record: _Message, field: Attribute[Any]) -> bool:
    """Whether the field has its default, and that is one that is not written."""
    is_optional = field.default is None or WIRE_KEY in field.metadata
    return is_optional and getattr(record, field.name) == field.default


def _is_given(field: Attribute[Any], value: Mapping[str, Any]) -> bool:
    if field.name not in value and field.default is NOTHING:
        raise InvalidRecord("is required", field.name)
    return field.name in value


def _read(field: Attribute[Any], value: Mapping[str, Any]) -> Any:
    kind: Any = field.type
    try:
        return from_plain(value[field.name], kind)
    except InvalidArgument as error:
        inside = error.field
        place = field.name + (inside if inside.startswith("[") else f".{inside}" if inside else "")
        raise InvalidRecord(str(error).removeprefix(f"{inside}: "), place) from None


class RouterRequest(_Message):
    """What a router service may be asked."""


class RouterResponse(_Message):
    """What it may answer; other failures are errors."""


@define(kw_only=True)
class NewRequest(RouterRequest):
    """Where should this prompt go? It is booked there, under the request's id.

    The longer `priority_jump` (seconds), the earlier its turn; a higher `strict_priority` goes before all of that.
    """

    method = "new"
    tokens: list[U32]
    block_mm_infos: list[BlockExtraInfo | None] | None = None
    routing_constraints: RoutingConstraints | None = None
    priority_jump: float = 0.0
    strict_priority: U32 = skip(0)
    lora_name: str | None = None
    cache_namespace: str | None = None

    def __attrs_post_init__(self) -> None:
        if not math.isfinite(self.priority_jump):
            raise InvalidRecord("expected a finite number", "priority_jump")


@define(kw_only=True)
class LoadsRequest(RouterRequest):
    """What would each worker have to do with this prompt? Nothing is booked."""

    method = "potential_loads"
    tokens: list[U32]
    block_mm_infos: list[BlockExtraInfo | None] | None = None
    lora_name: str | None = None
    cache_namespace: str | None = None


@define
class MarkPrefill(RouterRequest):
    """The prompt of the request is computed. Without an id, or with a blank one, that of the asking request."""

    method = "mark_prefill"
    request_id: str | None = None


@define
class MarkFree(RouterRequest):
    """The request is over; the id as in `MarkPrefill`."""

    method = "mark_free"
    request_id: str | None = None


@define
class NewResponse(RouterResponse):
    """There; so many blocks of the prompt are on that rank's device."""

    method = "new"
    worker_id: U64
    dp_rank: U32 = 0
    overlap_blocks: U32 = 0


@frozen
class QueueRejection:
    """Which limit of which class is reached."""

    policy_class: str
    limit_kind: LimitKind
    current: U64
    limit: U64


@define
class QueueRejectedResponse(RouterResponse):
    """Nowhere: no more requests of its class may wait."""

    method = "queue_rejected"
    rejection: QueueRejection


@define
class BackpressureResponse(RouterResponse):
    """Nowhere: too many prompt tokens wait already for one of which so little is cached."""

    method = "backpressure"
    queued_isl_tokens: U64
    max_queued_isl_tokens: U64 | None = None
    reason: Literal["max_queued_isl_tokens_exceeded"] = "max_queued_isl_tokens_exceeded"


@define
class PrefillMarked(RouterResponse):
    """False: no such request is booked here."""

    method = "prefill_marked"
    success: bool


@define
class FreeMarked(RouterResponse):
    """True also for a request that is not booked at all: it is as free as it can be."""

    method = "free_marked"
    success: bool


@define
class LoadsResponse(RouterResponse):
    """The load of every rank with the prompt added, and what waits in the router: requests, and their tokens."""

    method = "potential_loads"
    loads: list[PotentialLoad]
    pending_count: U64 = 0
    pending_isl_tokens: U64 = 0


RouterRequest.kinds = {kind.method: kind for kind in (NewRequest, LoadsRequest, MarkPrefill, MarkFree)}
RouterResponse.kinds = {
    kind.method: kind
    for kind in (NewResponse, QueueRejectedResponse, BackpressureResponse, LoadsResponse, PrefillMarked, FreeMarked)
}
