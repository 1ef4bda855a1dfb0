"""The requests and answers of a router service: objects with their kind in the key `method`.

    requests   new │ potential_loads │ mark_prefill │ mark_free
    answers    new │ queue_rejected │ backpressure │ potential_loads │ prefill_marked │ free_marked

Source: dynamo lib/kv-router/src/protocols.rs, RouterRequest and RouterResponse; `backpressure` is of the releases
before policy classes.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from attrs import define, frozen

from pipeline.protocols import BlockExtraInfo, RoutingConstraints
from pipeline.protocols.field_rules import U32, U64, InvalidRecord, Tagged, skip

from ..errors import LimitKind
from ..load import PotentialLoad


class RouterRequest:
    """A request to a router service."""

    wire_union: ClassVar[Tagged]


class RouterResponse:
    """An answer of a router service; other failures are errors."""

    wire_union: ClassVar[Tagged]


@define(kw_only=True)
class NewRequest(RouterRequest):
    """Where should this prompt go? It is booked there, under the request's id.

    The longer `priority_jump` (seconds), the earlier its turn; a higher `strict_priority` goes before all of that.
    """

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

    tokens: list[U32]
    block_mm_infos: list[BlockExtraInfo | None] | None = None
    lora_name: str | None = None
    cache_namespace: str | None = None


@define
class MarkPrefill(RouterRequest):
    """The prompt of the request is computed. Without an id, or with a blank one, that of this request itself."""

    request_id: str | None = None


@define
class MarkFree(RouterRequest):
    """The request is over; the id as in `MarkPrefill`."""

    request_id: str | None = None


@define
class NewResponse(RouterResponse):
    """There; so many blocks of the prompt are on that rank's device."""

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

    rejection: QueueRejection


@define
class BackpressureResponse(RouterResponse):
    """Nowhere: too many prompt tokens wait already for one of which so little is cached."""

    queued_isl_tokens: U64
    max_queued_isl_tokens: U64 | None = None
    reason: Literal["max_queued_isl_tokens_exceeded"] = "max_queued_isl_tokens_exceeded"


@define
class PrefillMarked(RouterResponse):
    """False: no such request is booked here."""

    success: bool


@define
class FreeMarked(RouterResponse):
    """True also for a request that is not booked at all: it is as free as it can be."""

    success: bool


@define
class LoadsResponse(RouterResponse):
    """The load of every rank with the prompt added, and what waits in the router: requests, and their tokens."""

    loads: list[PotentialLoad]
    pending_count: U64 = 0
    pending_isl_tokens: U64 = 0


RouterRequest.wire_union = Tagged(
    {
        "new": NewRequest,
        "potential_loads": LoadsRequest,
        "mark_prefill": MarkPrefill,
        "mark_free": MarkFree,
    },
    key="method",
)
RouterResponse.wire_union = Tagged(
    {
        "new": NewResponse,
        "queue_rejected": QueueRejectedResponse,
        "backpressure": BackpressureResponse,
        "potential_loads": LoadsResponse,
        "prefill_marked": PrefillMarked,
        "free_marked": FreeMarked,
    },
    key="method",
)
