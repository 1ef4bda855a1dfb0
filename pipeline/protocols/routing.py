"""Routing hints of a request: pins, ranks, priorities, taints, overrides.

Source: dynamo lib/llm/src/protocols/common/preprocessor.rs, RoutingHints and RouterParams;
lib/kv-router/src/config.rs, RouterConfigOverride; lib/kv-router/src/protocols.rs, RoutingConstraints.

MigrationState: what the attempts of one request share.

Source: dynamo lib/llm/src/migration.rs and lib/kv-router, the shared list of excluded workers. Other than there every
router keeps it, not only the KV-aware one in the same process.
"""

from __future__ import annotations

import math
from typing import ClassVar

from attrs import define, field

from .field_rules import I32, U32, U64, InvalidRecord, null, skip
from .trace_link import TraceLink


@define(slots=True)
class RoutingConstraints:
    """Taints a worker must carry, and taints that make it dearer or cheaper (weight below or above zero)."""

    required_taints: set[str] = skip(factory=set)
    preferred_taints: dict[str, float] = skip(factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.required_taints and not self.preferred_taints


@define(slots=True)
class RoutingHints:
    """Where a request should go and how urgent it is; nothing set means the router decides.

    `backend_instance_id` pins every phase, the two worker ids one phase each; `dp_rank` is the decode rank.
    `priority_jump` is in seconds, taken off the arrival time; a higher `strict_priority` is an earlier queue tier.
    """

    backend_instance_id: U64 | None = None
    prefill_worker_id: U64 | None = None
    decode_worker_id: U64 | None = None
    dp_rank: U32 | None = None
    prefill_dp_rank: U32 | None = None
    expected_output_tokens: U32 | None = None
    lora_name: str | None = None
    cache_namespace: str | None = skip(name="cache_salt")
    priority_jump: float | None = None
    strict_priority: U32 | None = None
    priority: I32 | None = None
    allowed_worker_ids: set[U64] | None = None
    routing_constraints: RoutingConstraints | None = None


@define(slots=True)
class RouterParams:
    """Latency targets in milliseconds for routers that choose among pools. Reads no other key."""

    wire_closed: ClassVar[bool] = True

    ttft_target: float | None = None
    itl_target: float | None = None


@define(slots=True)
class RouterConfigOverride:
    """Router settings for this request only; an absent one keeps the router's own.

    `overlap_score_weight` is the older name: it overrides `prefill_load_scale`, and zero also sets the
    credit to zero; it is gone once the record exists. Raises InvalidRecord for a number out of its range.
    """

    overlap_score_credit: float | None = null()
    prefill_load_scale: float | None = null()
    router_temperature: float | None = null()
    assume_kv_reuse: bool | None = null()
    track_prefill_tokens: bool | None = null()
    shared_cache_multiplier: float | None = null()
    overlap_score_weight: float | None = None

    def __attrs_post_init__(self) -> None:
        _check_range("overlap_score_weight", self.overlap_score_weight, math.inf)
        if self.overlap_score_weight is not None:
            self.prefill_load_scale = self.overlap_score_weight
            if self.overlap_score_weight == 0:
                self.overlap_score_credit = 0.0
            self.overlap_score_weight = None
        for name in ("overlap_score_credit", "prefill_load_scale", "router_temperature"):
            _check_range(name, getattr(self, name), math.inf)
        _check_range("shared_cache_multiplier", self.shared_cache_multiplier, 1.0)


def _check_range(name: str, value: float | None, high: float) -> None:
    """Raise InvalidRecord unless the value is unset, or finite and between 0 and `high`."""
    if value is None or (math.isfinite(value) and 0 <= value <= high):
        return
    limits = "a finite number not below 0" if math.isinf(high) else f"a number between 0 and {high:g}"
    raise InvalidRecord(f"expected {limits}, found {value}", name)


@define(slots=True, eq=False)
class MigrationState:
    """The workers that failed this request, in order and each once, and the last of their errors.

    The stage that sends the request to workers writes it, before the error is visible to other stages, and sends the
    request to none of these workers again.
    `held_text` is the end of the text of the delivered tokens that was not shown when the stream broke, because a stop
    string may begin there: for the decoder of the next stream, or to be shown if there is none. Shared by reference,
    stays in this process.
    """

    excluded_worker_ids: list[int] = field(factory=list)
    last_error: Exception | None = None
    held_text: str = ""
    failed_link: TraceLink | None = None
    """The span of the last of them, where the request is traced: that of its router, for its own may not be known."""

    def exclude(self, worker_id: int, error: Exception, link: TraceLink | None = None) -> None:
        """Note that the worker failed the request with this error, below the span of `link`."""
        self.last_error, self.failed_link = error, link
        if worker_id not in self.excluded_worker_ids:
            self.excluded_worker_ids.append(worker_id)
