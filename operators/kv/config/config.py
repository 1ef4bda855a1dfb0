"""KvRouterConfig: every setting of the KV router.

Source: dynamo lib/kv-router/src/scheduling/config.rs, KvRouterConfig. Other than there all problems are reported at
once, unknown keys are refused, what is not offered here (keyed tracking hashes, durable events) is refused too, and
`router_placement` is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import fields, frozen

from pipeline import InvalidArgument
from pipeline.protocols import RouterConfigOverride

from ..types import PlacementRule, RequestSettings
from .validation import Problem, combination_problems, range_problems, type_problems

QueuePolicy = Literal["fcfs", "lcfs", "wspt"]
PrefillLoadModel = Literal["none", "aic"]
SharedCacheType = Literal["none", "hicache"]
TrackingHash = Literal["public-xxh3-v1", "keyed-xxh3-v1"]
ConditionalPolicy = Literal["isl_bounding", "prefill_load", "isl_or_load"]


@frozen(kw_only=True)
class KvRouterConfig:
    """The settings, under the names they have in files and on command lines.

    Raises InvalidArgument that lists every problem; `field` names the first. Numbers are finite; weights are not below
    0. `router_placement` is the rule a worker is chosen by. `overlap_score_credit` 0 means that there is no index.
    `router_queue_threshold` None switches the queue off.
    `router_event_threads`, `router_snapshot_threshold` and `router_reset_states` are read for the sake of existing
    files and change nothing.
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    router_placement: PlacementRule = "cost"
    router_temperature: float = 0.0
    use_kv_events: bool = True
    router_replica_sync: bool = False
    router_track_active_blocks: bool = True
    router_track_output_blocks: bool = False
    router_assume_kv_reuse: bool = True
    router_track_prefill_tokens: bool = True
    router_tracking_hash: TrackingHash = "public-xxh3-v1"
    router_tracking_hash_key_file: str | None = None
    router_tracking_hash_key_id: str | None = None
    router_prefill_load_model: PrefillLoadModel = "none"
    router_ttl_secs: float = 120.0
    router_max_tree_size: int = 1_048_576
    router_prune_target_ratio: float = 0.8
    router_queue_threshold: float | None = 4.0
    router_queue_policy: QueuePolicy = "fcfs"
    router_policy_config: str | None = None
    router_prefill_policy: str | None = None
    router_decode_policy: str | None = None
    router_event_threads: int = 4
    skip_initial_worker_wait: bool = False
    min_initial_workers: int = 1
    use_remote_indexer: bool = False
    serve_indexer: bool = False
    shared_cache_multiplier: float = 0.0
    shared_cache_type: SharedCacheType = "none"
    router_predicted_ttl_secs: float | None = None
    conditional_disagg_enabled: bool = False
    conditional_disagg_policy: ConditionalPolicy = "isl_bounding"
    conditional_disagg_eff_isl_threshold: int = 2048
    conditional_disagg_eff_isl_ratio_threshold: float = 0.7
    conditional_disagg_prefill_busy_threshold: float | None = None
    conditional_disagg_decode_busy_threshold: float | None = None
    durable_kv_events: bool = False
    router_snapshot_threshold: int | None = 1_000_000
    router_reset_states: bool = False

    def __attrs_post_init__(self) -> None:
        raise_problems(config_problems({a.name: getattr(self, a.name) for a in fields(KvRouterConfig)}))

    @property
    def has_index(self) -> bool:
        """Whether there is an index at all."""
        return self.overlap_score_credit > 0

    @property
    def initial_workers(self) -> int:
        """How many workers to wait for at the start."""
        return 0 if self.skip_initial_worker_wait else self.min_initial_workers

    @property
    def conditional_prefill_busy_threshold(self) -> float | None:
        """What makes a prefill worker busy for conditional disaggregation."""
        own = self.conditional_disagg_prefill_busy_threshold
        return self.router_queue_threshold if own is None else own

    def settings(self, override: RouterConfigOverride | None = None) -> RequestSettings:
        """The settings for one request; an override's absent fields keep the router's own.

        Without an override the result is always the same: keep it. The override has checked its own ranges.
        """
        o = override or RouterConfigOverride()
        return RequestSettings(
            _first(o.overlap_score_credit, self.overlap_score_credit),
            self.overlap_score_credit_decay,
            _first(o.prefill_load_scale, self.prefill_load_scale),
            self.decode_active_request_weight,
            self.host_cache_hit_weight,
            self.disk_cache_hit_weight,
            _first(o.shared_cache_multiplier, self.shared_cache_multiplier),
            _first(o.router_temperature, self.router_temperature),
            self.router_assume_kv_reuse if o.assume_kv_reuse is None else o.assume_kv_reuse,
            self.router_track_active_blocks,
            self.router_track_prefill_tokens if o.track_prefill_tokens is None else o.track_prefill_tokens,
            self.router_placement,
        )

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> KvRouterConfig:
        """The configuration in a parsed file; None stands for a field's default only where None is a value of it.

        `overlap_score_weight`, the older name, is understood as `with_older_weight` says. Raises InvalidArgument that
        names what was written.
        """
        if not isinstance(values, Mapping):
            raise InvalidArgument(f"the router's settings must be an object, got {values!r}")
        own = with_older_weight(values)
        unknown: list[Problem] = [
            (str(name), "is not a setting of the router") for name in own if name not in FIELD_TYPES
        ]
        known = {name: value for name, value in own.items() if name in FIELD_TYPES}
        defaults = {a.name: a.default for a in fields(cls)}
        written = {} if values.get("overlap_score_weight") is None else {"prefill_load_scale": "overlap_score_weight"}
        problems = config_problems({**defaults, **known})
        raise_problems([*unknown, *((written.get(name, name), message) for name, message in problems)])
        return cls(**known)


FIELD_TYPES: Mapping[str, str] = {a.name: str(a.type) for a in fields(KvRouterConfig)}
"""Field -> its declared type, as written."""

CHOICES: Mapping[str, Any] = {
    "PlacementRule": PlacementRule,
    "QueuePolicy": QueuePolicy,
    "PrefillLoadModel": PrefillLoadModel,
    "SharedCacheType": SharedCacheType,
    "TrackingHash": TrackingHash,
    "ConditionalPolicy": ConditionalPolicy,
}


def config_problems(values: Mapping[str, Any]) -> list[Problem]:
    """Everything that is wrong with these settings: kinds first, then ranges, then what does not go together."""
    wrong = type_problems(values, FIELD_TYPES, CHOICES)
    skipped = {name for name, _ in wrong}
    right = {name: value for name, value in values.items() if name not in skipped}
    return [*wrong, *range_problems(right), *combination_problems(right)]


def raise_problems(problems: list[Problem]) -> None:
    """Raise InvalidArgument with all of them, if there are any."""
    if problems:
        text = "; ".join(f"{name}: {message}" for name, message in problems)
        raise InvalidArgument(text, field=problems[0][0])


def with_older_weight(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without `overlap_score_weight`, which was the name of `prefill_load_scale`.

    It wins over the newer name, and 0 also sets `overlap_score_credit` to 0.
    """
    current = {name: value for name, value in values.items() if name != "overlap_score_weight"}
    weight = values.get("overlap_score_weight")
    if weight is not None:
        current["prefill_load_scale"] = weight
        if weight == 0:
            current["overlap_score_credit"] = 0.0
    return current


def _first(own: float | None, default: float) -> float:
    return default if own is None else own
