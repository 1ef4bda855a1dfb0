"""KvRouterConfig: every setting of the KV router.

Source: dynamo lib/kv-router/src/scheduling/config.rs, KvRouterConfig. Other than there all problems are reported at
once, unknown keys are refused, what is not offered here (keyed tracking hashes, durable events) is refused too, and
`router_placement` is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from attrs import fields, frozen

from pipeline import InvalidArgument
from pipeline.protocols import RouterConfigOverride
from pipeline.settings import ANY, Check, Problem, finite, kind_problems, range_problems, setting, settings_of, share

from ..types import PlacementRule, RequestSettings
from .validation import combination_problems

T = TypeVar("T")

QueuePolicy = Literal["fcfs", "lcfs", "wspt"]
PrefillLoadModel = Literal["none", "aic"]
SharedCacheType = Literal["none", "hicache"]
TrackingHash = Literal["public-xxh3-v1", "keyed-xxh3-v1"]
ConditionalPolicy = Literal["isl_bounding", "prefill_load", "isl_or_load"]


_AT_LEAST_1 = finite(1)


def _field(default: T, help: str, check: Check = ANY, variable: str = "") -> T:
    """Return a field that files set, and a variable of the environment if it has one."""
    return setting(default, help, check, variable=variable, option=())


@frozen(kw_only=True)
class KvRouterConfig:
    """The settings, under the names they have in files and on command lines.

    Raise InvalidArgument that lists every problem if there are any; its `field` names the first.
    """

    validates_itself: ClassVar[bool] = True

    overlap_score_credit: float = _field(
        1.0,
        "Credit for each prompt block that a worker holds on its device; 0: no index.",
        finite(0),
        variable="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    )
    overlap_score_credit_decay: float = _field(
        0.0,
        "How much the credit falls with prompt work in flight beyond that of the calmest worker.",
        finite(0),
        variable="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
    )
    prefill_load_scale: float = _field(
        1.0,
        "Weight of the prompt tokens that a worker still has to compute.",
        finite(0),
        variable="DYN_ROUTER_PREFILL_LOAD_SCALE",
    )
    decode_active_request_weight: float = _field(
        0.0, "Weight of each active request of a worker.", finite(0), variable="DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT"
    )
    host_cache_hit_weight: float = _field(0.75, "Credit for a block in host memory.", share())
    disk_cache_hit_weight: float = _field(0.25, "Credit for a block on disk.", share())
    router_placement: PlacementRule = _field(
        "cost", "Rule by which a worker is chosen.", variable="DYN_ROUTER_PLACEMENT"
    )
    router_temperature: float = _field(
        0.0, "Randomness of the choice; 0: always the lowest cost.", finite(0), variable="DYN_ROUTER_TEMPERATURE"
    )
    use_kv_events: bool = _field(
        True,
        "Whether the router follows the cache events of engines, or predicts caches from what it sent.",
        variable="DYN_USE_KV_EVENTS",
    )
    router_replica_sync: bool = _field(
        False, "Whether routers of the same workers share their bookings.", variable="DYN_ROUTER_REPLICA_SYNC"
    )
    router_track_active_blocks: bool = _field(
        True, "Whether blocks of running requests count as load.", variable="DYN_ROUTER_TRACK_ACTIVE_BLOCKS"
    )
    router_track_output_blocks: bool = _field(
        False, "Whether blocks of answers count too.", variable="DYN_ROUTER_TRACK_OUTPUT_BLOCKS"
    )
    router_assume_kv_reuse: bool = _field(
        True, "Whether running requests with the same blocks share them.", variable="DYN_ROUTER_ASSUME_KV_REUSE"
    )
    router_track_prefill_tokens: bool = _field(
        True,
        "Whether prompt tokens that are still to compute count as load.",
        variable="DYN_ROUTER_TRACK_PREFILL_TOKENS",
    )
    router_tracking_hash: TrackingHash = _field(
        "public-xxh3-v1", "Hash of tracked blocks.", variable="DYN_ROUTER_TRACKING_HASH"
    )
    router_tracking_hash_key_file: str | None = _field(
        None, "Key of a keyed hash; not offered.", variable="DYN_ROUTER_TRACKING_HASH_KEY_FILE"
    )
    router_tracking_hash_key_id: str | None = _field(
        None, "Name of that key; not offered.", variable="DYN_ROUTER_TRACKING_HASH_KEY_ID"
    )
    router_prefill_load_model: PrefillLoadModel = _field(
        "none", "Model of the duration of a prefill; its function is given in code."
    )
    router_ttl_secs: float = _field(120.0, "Without events, seconds that a routed block counts as cached.", finite(0))
    router_max_tree_size: int = _field(
        1_048_576, "Blocks of the predicted index beyond which it is pruned.", _AT_LEAST_1
    )
    router_prune_target_ratio: float = _field(0.8, "Part of that size to which it is pruned.", share())
    router_queue_threshold: float | None = _field(
        4.0,
        "Batches of prompt tokens in flight on all workers beyond which requests wait; None: no queue.",
        finite(0),
        variable="DYN_ROUTER_QUEUE_THRESHOLD",
    )
    router_queue_policy: QueuePolicy = _field("fcfs", "Order of the queue.")
    router_policy_config: str | None = _field(
        None, "File of policy classes, as TOML or YAML.", variable="DYN_ROUTER_POLICY_CONFIG"
    )
    router_prefill_policy: str | None = _field(
        None, "Named selection for prefill workers; not offered.", variable="DYN_ROUTER_PREFILL_POLICY"
    )
    router_decode_policy: str | None = _field(
        None, "Named selection for decode workers; not offered.", variable="DYN_ROUTER_DECODE_POLICY"
    )
    router_event_threads: int = _field(4, "Read for the sake of existing files; changes nothing.", _AT_LEAST_1)
    skip_initial_worker_wait: bool = _field(False, "Whether the start waits for no worker.")
    min_initial_workers: int = _field(
        1, "Workers that the start waits for.", finite(0), variable="DYN_ROUTER_MIN_INITIAL_WORKERS"
    )
    use_remote_indexer: bool = _field(False, "Whether the index of another router is used.")
    serve_indexer: bool = _field(False, "Whether other routers may use the index.")
    shared_cache_multiplier: float = _field(
        0.0, "Credit for a block in a shared cache beyond those on the device.", share()
    )
    shared_cache_type: SharedCacheType = _field("none", "Kind of the shared cache.")
    router_predicted_ttl_secs: float | None = _field(
        None,
        "With events, seconds that a routed block counts as cached as well; None: not at all.",
        finite(0),
        variable="DYN_ROUTER_PREDICTED_TTL_SECS",
    )
    conditional_disagg_enabled: bool = _field(
        False,
        "Whether a prompt may be computed where it is decoded if a prefill elsewhere is not worth it.",
        variable="DYN_ROUTER_CONDITIONAL_DISAGG_ENABLED",
    )
    conditional_disagg_policy: ConditionalPolicy = _field(
        "isl_bounding", "What makes a prefill elsewhere not worth it.", variable="DYN_ROUTER_CONDITIONAL_DISAGG_POLICY"
    )
    conditional_disagg_eff_isl_threshold: int = _field(
        2048,
        "A prompt is short with fewer tokens left to compute than this.",
        finite(0),
        variable="DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD",
    )
    conditional_disagg_eff_isl_ratio_threshold: float = _field(
        0.7,
        "A prompt is short with a smaller part left to compute than this.",
        share(),
        variable="DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_RATIO_THRESHOLD",
    )
    conditional_disagg_prefill_busy_threshold: float | None = _field(
        None,
        "Batches of prompt tokens in flight beyond which a prefill worker is busy; None: the queue threshold.",
        finite(0),
        variable="DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD",
    )
    conditional_disagg_decode_busy_threshold: float | None = _field(
        None,
        "The same for a decode worker, which must not be busy then; None: it may be.",
        finite(0),
        variable="DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD",
    )
    durable_kv_events: bool = _field(False, "Whether events survive a restart; not offered.")
    router_snapshot_threshold: int | None = _field(
        1_000_000, "Read for the sake of existing files; changes nothing.", finite(0)
    )
    router_reset_states: bool = _field(False, "Read for the sake of existing files; changes nothing.")

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
            self.overlap_score_credit if o.overlap_score_credit is None else o.overlap_score_credit,
            self.overlap_score_credit_decay,
            self.prefill_load_scale if o.prefill_load_scale is None else o.prefill_load_scale,
            self.decode_active_request_weight,
            self.host_cache_hit_weight,
            self.disk_cache_hit_weight,
            self.shared_cache_multiplier if o.shared_cache_multiplier is None else o.shared_cache_multiplier,
            self.router_temperature if o.router_temperature is None else o.router_temperature,
            self.router_assume_kv_reuse if o.assume_kv_reuse is None else o.assume_kv_reuse,
            self.router_track_active_blocks,
            self.router_track_prefill_tokens if o.track_prefill_tokens is None else o.track_prefill_tokens,
            self.router_placement,
        )

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> KvRouterConfig:
        """The configuration in a parsed file; None stands for a field's default only where None is a value of it.

        `overlap_score_weight`, the older name, is converted as in `with_older_weight`. Raises InvalidArgument that
        names what was written.
        """
        if not isinstance(values, Mapping):
            raise InvalidArgument(f"the router's settings must be an object, got {values!r}")
        own = with_older_weight(values)
        unknown: list[Problem] = [
            (str(name), "is not a setting of the router") for name in own if name not in settings_of(cls)
        ]
        known = {name: value for name, value in own.items() if name in settings_of(cls)}
        defaults = {a.name: a.default for a in fields(cls)}
        written = {} if values.get("overlap_score_weight") is None else {"prefill_load_scale": "overlap_score_weight"}
        problems = config_problems({**defaults, **known})
        raise_problems([*unknown, *((written.get(name, name), message) for name, message in problems)])
        return cls(**known)


def config_problems(values: Mapping[str, Any]) -> list[Problem]:
    """Everything that is wrong with these settings: kinds first, then ranges, then what does not go together."""
    wrong = kind_problems(KvRouterConfig, values)
    skipped = {name for name, _ in wrong}
    right = {name: value for name, value in values.items() if name not in skipped}
    return [*wrong, *range_problems(KvRouterConfig, right), *combination_problems(right)]


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
