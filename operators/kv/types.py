"""WorkerRank: the unit of caching, load and selection.

RequestSettings: the router's settings as they hold for one request.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from attrs import frozen

from pipeline.protocols.field_rules import U32, U64


class WorkerRank(NamedTuple):
    """A data-parallel rank of a worker; sorts by worker, then rank, and equals the plain pair."""

    worker_id: U64
    dp_rank: U32 = 0


DEFAULT_CLASS = "default"
"""Name of the class of requests that belong to no other."""

PlacementRule = Literal["cost", "expected_delay", "marginal_delay"]
"""By what a worker is chosen: `costs`, as in the original, `delays`, or `marginal_delays`."""


@frozen
class RequestSettings:
    """The rule and its weights, and what is tracked. Meanings and ranges are those of `KvRouterConfig`.

    From here on a zero `overlap_score_credit` only takes the weight from device blocks; that there is no index then is
    decided once, from the configuration.
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    shared_cache_multiplier: float = 0.0
    temperature: float = 0.0
    assume_kv_reuse: bool = True
    track_active_blocks: bool = True
    track_prefill_tokens: bool = True
    placement: PlacementRule = "cost"
