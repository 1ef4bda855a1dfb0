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
from .timing import TraceLink


@define(slots=True)
class RoutingConstraints:
    """Taints that restrict or rank the workers of a request."""

    required_taints: set[str] = skip(factory=set)
    """A worker must have all of these."""
    preferred_taints: dict[str, float] = skip(factory=dict)
    """Taint -> weight: above zero a worker with it costs less, below zero more."""

    @property
    def is_empty(self) -> bool:
        return not self.required_taints and not self.preferred_taints


@define(slots=True)
class RoutingHints:
    """Where a request should go, and its urgency. A field that is None leaves the decision to the router."""

    backend_instance_id: U64 | None = None
    """The instance for every phase."""
    prefill_worker_id: U64 | None = None
    """The worker for prefill only."""
    decode_worker_id: U64 | None = None
    """The worker for decode only."""
    dp_rank: U32 | None = None
    """Data parallel rank of the decode worker."""
    prefill_dp_rank: U32 | None = None
    """Data parallel rank of the prefill worker."""
    expected_output_tokens: U32 | None = None
    """The client's estimate of the output length."""
    lora_name: str | None = None
    """The LoRA adapter, which is part of the blocks' hashes."""
    cache_namespace: str | None = skip(name="cache_salt")
    """Separates the blocks of one tenant from those of others."""
    priority_jump: float | None = None
    """Seconds subtracted from the arrival time in the admission queue."""
    strict_priority: U32 | None = None
    """Queue tier; a higher one is admitted first."""
    priority: I32 | None = None
    """Priority in the engine's own scheduler."""
    allowed_worker_ids: set[U64] | None = None
    """Only these workers are eligible."""
    routing_constraints: RoutingConstraints | None = None


@define(slots=True)
class RouterParams:
    """Latency targets for routers that choose among pools. Unknown keys are refused."""

    wire_closed: ClassVar[bool] = True

    ttft_target: float | None = None
    """Time to first token, in milliseconds."""
    itl_target: float | None = None
    """Time between tokens, in milliseconds."""


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
    """The workers that failed this request.

    The stage that sends the request to workers writes it, before the error is visible to other stages, and sends the
    request to none of these workers again. It is shared by reference and stays in this process.
    """

    excluded_worker_ids: list[int] = field(factory=list)
    """In order of failure, each once."""
    last_error: Exception | None = None
    """The error of the last of them."""
    held_text: str = ""
    """The end of the delivered text that was not shown, because a stop string may begin there.

    The decoder of the next stream continues with it; without another stream it is shown.
    """
    failed_link: TraceLink | None = None
    """The span of the last of them, where the request is traced: that of its router, for its own may not be known."""

    def exclude(self, worker_id: int, error: Exception, link: TraceLink | None = None) -> None:
        """Note that the worker failed the request with this error, below the span of `link`."""
        self.last_error, self.failed_link = error, link
        if worker_id not in self.excluded_worker_ids:
            self.excluded_worker_ids.append(worker_id)
