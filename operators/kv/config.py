"""KvRouterConfig: every setting of the KV router, from code, a parsed file, or the environment.

Source: dynamo lib/kv-router/src/scheduling/config.rs, KvRouterConfig. Other than there all problems are reported at
once, unknown keys are refused, what is not offered here (keyed tracking hashes, durable events) is refused too, and
`router_placement` is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from attrs import asdict, fields, frozen

from pipeline import InvalidArgument
from pipeline.protocols import RouterConfigOverride
from pipeline.settings import (
    ANY,
    Check,
    Problem,
    Setting,
    decimal,
    expected,
    finite,
    kind_problems,
    kinds_of,
    range_problems,
    setting,
    settings_of,
    share,
    switch,
    whole,
)

from .types import PlacementRule, RequestSettings

T = TypeVar("T")

QueuePolicy = Literal["fcfs", "lcfs", "wspt"]
PrefillLoadModel = Literal["none", "aic"]
SharedCacheType = Literal["none", "hicache"]
TrackingHash = Literal["public-xxh3-v1", "keyed-xxh3-v1"]
ConditionalPolicy = Literal["isl_bounding", "prefill_load", "isl_or_load"]

_POSITIVE = finite(0)
_CONDITIONAL = "DYN_ROUTER_CONDITIONAL_DISAGG_"


def _field(default: T, help: str, check: Check | None = None, variable: str | None = None) -> T:
    """Return a field that files set, and a variable: by default `DYN_` and its name in capitals, none for "".

    Without a `check` a number is finite and at least 0 if the default is one.
    """
    if check is None:
        check = _POSITIVE if isinstance(default, int | float) and not isinstance(default, bool) else ANY
    return setting(default, help, check, variable=variable, option=())


def _file(default: T, help: str, check: Check | None = None) -> T:
    """Return a field that only files set."""
    return _field(default, help, check, variable="")


@frozen(kw_only=True)
class KvRouterConfig:
    """The settings, under the names they have in files.

    Raise InvalidArgument that lists every problem if there are any; its `field` names the first.
    """

    validates_itself: ClassVar[bool] = True
    variable_prefix: ClassVar[str] = "DYN_"

    overlap_score_credit: float = _field(
        1.0,
        "Credit for each prompt block that a worker holds on its device; 0: no index.",
        variable="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    )
    overlap_score_credit_decay: float = _field(
        0.0,
        "How much the credit falls with prompt work in flight beyond that of the calmest worker.",
        variable="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
    )
    prefill_load_scale: float = _field(
        1.0,
        "Weight of the prompt tokens that a worker still has to compute.",
        variable="DYN_ROUTER_PREFILL_LOAD_SCALE",
    )
    decode_active_request_weight: float = _field(
        0.0, "Weight of each active request of a worker.", variable="DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT"
    )
    host_cache_hit_weight: float = _file(0.75, "Credit for a block in host memory.", share())
    disk_cache_hit_weight: float = _file(0.25, "Credit for a block on disk.", share())
    router_placement: PlacementRule = _field(
        "cost", "Rule by which a worker is chosen; programs take marginal_delay where nothing is set for the cost."
    )
    router_temperature: float = _field(0.0, "Randomness of the choice; 0: always the lowest cost.")
    use_kv_events: bool = _field(
        True, "Whether the router follows the cache events of engines, or predicts caches from what it sent."
    )
    router_replica_sync: bool = _field(False, "Whether routers of the same workers share their bookings.")
    router_track_active_blocks: bool = _field(True, "Whether blocks of running requests count as load.")
    router_track_output_blocks: bool = _field(False, "Whether blocks of answers count too.")
    router_assume_kv_reuse: bool = _field(True, "Whether running requests with the same blocks share them.")
    router_track_prefill_tokens: bool = _field(True, "Whether prompt tokens that are still to compute count as load.")
    router_tracking_hash: TrackingHash = _field("public-xxh3-v1", "Hash of tracked blocks.")
    router_tracking_hash_key_file: str | None = _field(None, "Key of a keyed hash; not offered.")
    router_tracking_hash_key_id: str | None = _field(None, "Name of that key; not offered.")
    router_prefill_load_model: PrefillLoadModel = _file(
        "none", "Model of the duration of a prefill; its function is given in code."
    )
    router_ttl_secs: float = _file(120.0, "Without events, seconds that a routed block counts as cached.")
    router_max_tree_size: int = _file(1_048_576, "Blocks of the predicted index beyond which it is pruned.", finite(1))
    router_prune_target_ratio: float = _file(0.8, "Part of that size to which it is pruned.", share())
    router_queue_threshold: float | None = _field(
        4.0, "Batches of prompt tokens in flight on all workers beyond which requests wait; None: no queue."
    )
    router_queue_policy: QueuePolicy = _file("fcfs", "Order of the queue.")
    router_policy_config: str | None = _field(None, "File of policy classes, as TOML or YAML.")
    router_prefill_policy: str | None = _field(None, "Named selection for prefill workers; not offered.")
    router_decode_policy: str | None = _field(None, "Named selection for decode workers; not offered.")
    router_event_threads: int = _file(4, "Read for the sake of existing files; changes nothing.", finite(1))
    skip_initial_worker_wait: bool = _file(False, "Whether the start waits for no worker.")
    min_initial_workers: int = _field(1, "Workers that the start waits for.", variable="DYN_ROUTER_MIN_INITIAL_WORKERS")
    use_remote_indexer: bool = _file(False, "Whether the index of another router is used.")
    serve_indexer: bool = _file(False, "Whether other routers may use the index.")
    shared_cache_multiplier: float = _file(
        0.0, "Credit for a block in a shared cache beyond those on the device.", share()
    )
    shared_cache_type: SharedCacheType = _file("none", "Kind of the shared cache.")
    router_predicted_ttl_secs: float | None = _field(
        None, "With events, seconds that a routed block counts as cached as well; None: not at all.", _POSITIVE
    )
    conditional_disagg_enabled: bool = _field(
        False,
        "Whether a prompt may be computed where it is decoded if a prefill elsewhere is not worth it.",
        variable=f"{_CONDITIONAL}ENABLED",
    )
    conditional_disagg_policy: ConditionalPolicy = _field(
        "isl_bounding", "What makes a prefill elsewhere not worth it.", variable=f"{_CONDITIONAL}POLICY"
    )
    conditional_disagg_eff_isl_threshold: int = _field(
        2048,
        "A prompt is short with fewer tokens left to compute than this.",
        variable=f"{_CONDITIONAL}EFF_ISL_THRESHOLD",
    )
    conditional_disagg_eff_isl_ratio_threshold: float = _field(
        0.7,
        "A prompt is short with a smaller part left to compute than this.",
        share(),
        f"{_CONDITIONAL}EFF_ISL_RATIO_THRESHOLD",
    )
    conditional_disagg_prefill_busy_threshold: float | None = _field(
        None,
        "Batches of prompt tokens in flight beyond which a prefill worker is busy; None: the queue threshold.",
        _POSITIVE,
        f"{_CONDITIONAL}PREFILL_BUSY_THRESHOLD",
    )
    conditional_disagg_decode_busy_threshold: float | None = _field(
        None,
        "The same for a decode worker, which must not be busy then; None: it may be.",
        _POSITIVE,
        f"{_CONDITIONAL}DECODE_BUSY_THRESHOLD",
    )
    durable_kv_events: bool = _file(False, "Whether events survive a restart; not offered.")
    router_snapshot_threshold: int | None = _file(1_000_000, "Read for the sake of existing files; changes nothing.")
    router_reset_states: bool = _file(False, "Read for the sake of existing files; changes nothing.")

    def __attrs_post_init__(self) -> None:
        raise_problems(_problems(asdict(self)))

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

        `overlap_score_weight`, the older name of `prefill_load_scale`, wins over the newer one, and 0 also sets
        `overlap_score_credit` to 0. Raises InvalidArgument that names what was written.
        """
        if not isinstance(values, Mapping):
            raise InvalidArgument(f"the router's settings must be an object, got {values!r}")
        own, written = {name: value for name, value in values.items() if name != _OLDER_WEIGHT}, {}
        if (weight := values.get(_OLDER_WEIGHT)) is not None:
            own["prefill_load_scale"], written["prefill_load_scale"] = weight, _OLDER_WEIGHT
            if weight == 0:
                own["overlap_score_credit"] = 0.0
        known = {name: value for name, value in own.items() if name in settings_of(cls)}
        unknown = [(str(name), "is not a setting of the router") for name in own if name not in known]
        problems = _problems({a.name: a.default for a in fields(cls)} | known)
        raise_problems([*unknown, *((written.get(name, name), message) for name, message in problems)])
        return cls(**known)


_OLDER_WEIGHT = "overlap_score_weight"


def raise_problems(problems: list[Problem]) -> None:
    """Raise InvalidArgument with all of them, if there are any."""
    if problems:
        text = "; ".join(f"{name}: {message}" for name, message in problems)
        raise InvalidArgument(text, field=problems[0][0])


def _problems(values: Mapping[str, Any]) -> list[Problem]:
    """Everything that is wrong with these settings: kinds first, then ranges, then what does not go together."""
    wrong = kind_problems(KvRouterConfig, values)
    skipped = {name for name, _ in wrong}
    right = {name: value for name, value in values.items() if name not in skipped}
    return [*wrong, *range_problems(KvRouterConfig, right), *_combination_problems(right.get)]


def _combination_problems(get: Callable[[str], Any]) -> Iterator[Problem]:
    """Yield settings that contradict each other, or are not offered; `get` has None for a value that was refused."""
    if get("router_track_output_blocks") is True and get("router_track_active_blocks") is False:
        yield "router_track_output_blocks", "needs router_track_active_blocks"
    if get("router_prefill_load_model") == "aic" and get("router_track_prefill_tokens") is False:
        yield "router_prefill_load_model", "needs router_track_prefill_tokens"
    if get("serve_indexer") is True and get("use_remote_indexer") is True:
        yield "serve_indexer", "excludes use_remote_indexer"
    if get("serve_indexer") is True and get("overlap_score_credit") == 0:
        yield "serve_indexer", "needs overlap_score_credit above 0: there is no index without it"
    if get("router_predicted_ttl_secs") is not None and get("use_kv_events") is False:
        yield "router_predicted_ttl_secs", "needs use_kv_events"
    by_load = get("conditional_disagg_policy") in ("prefill_load", "isl_or_load")
    thresholds = (get("conditional_disagg_prefill_busy_threshold"), get("router_queue_threshold"))
    if get("conditional_disagg_enabled") is True and by_load and thresholds == (None, None):
        needed = "conditional_disagg_prefill_busy_threshold or router_queue_threshold"
        yield "conditional_disagg_policy", f"needs {needed}"
    if get("router_tracking_hash") == "keyed-xxh3-v1":
        yield "router_tracking_hash", "keyed hashes are not offered"
    if any(get(f"router_tracking_hash_key_{part}") is not None for part in ("file", "id")):
        yield "router_tracking_hash", "a key is for keyed hashes, which are not offered"
    if get("durable_kv_events") is True:
        yield "durable_kv_events", "durable events are not offered"


# -- the environment. Source: KvRouterConfig::from_env there; `DYN_ROUTER_PLACEMENT` is ours.

_MUST_BE_KNOWN = ("router_placement", "router_tracking_hash")
_OLDER_WEIGHTS = ("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "DYN_OVERLAP_SCORE_WEIGHT")
_READERS: Mapping[type, Callable[[str], Any]] = {float: decimal, int: whole(), bool: switch, str: str}


def config_from_environment(environment: Mapping[str, str], values: Mapping[str, Any] | None = None) -> KvRouterConfig:
    """The configuration with `values` (of a file, say) under what the environment sets.

    A text that cannot be read counts as not set, except the name of an unknown placement or tracking hash. What can be
    read and is out of range raises InvalidArgument, as do the values.
    """
    own = dict(values or {})
    for variable, known in reversed(_variables().items()):  # of two for one field the first wins
        text = environment.get(variable, "").strip()
        if text and (value := _read(known, text)) is not None:
            own[_OLDER_WEIGHT if variable in _OLDER_WEIGHTS else known.name] = value
    return KvRouterConfig.from_plain(own)


def kv_router_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return every variable of the router, with what is wrong with its text, or with an empty text."""
    found = {}
    for variable, known in _variables().items():
        text = environment.get(variable, "").strip()
        is_wrong = text and _read(known, text) is None
        found[variable] = f"must be {expected(kinds_of(known.kind)[:1])}, got {text!r}" if is_wrong else ""
    return found


def _variables() -> dict[str, Setting]:
    """The variables, and the settings of which they are."""
    settings = settings_of(KvRouterConfig)
    own = {known.variable: known for known in settings.values() if known.variable}
    return own | dict.fromkeys(_OLDER_WEIGHTS, settings["prefill_load_scale"])


def _read(known: Setting, text: str) -> Any:
    """Return the value of a text, or None for one that cannot be read."""
    if known.choices:
        return text if text in known.choices or known.name in _MUST_BE_KNOWN else None
    try:
        return _READERS[kinds_of(known.kind)[0]](text)
    except ValueError:
        return None


def check_router(
    config: KvRouterConfig, block_size_tokens: int, *, prefill_duration: object, profile: object, peers: object
) -> None:
    """Raise InvalidArgument that lists every problem; `field` names the first.

    The last three are what the router was given for `router_prefill_load_model`, `router_policy_config` and
    `router_replica_sync`, None for nothing. A setting that no router of this kind offers is refused, not ignored.
    """
    lacks_duration = config.router_prefill_load_model != "none" and prefill_duration is None
    lacks_profile = config.router_policy_config is not None and profile is None
    checks: list[tuple[bool, str, str]] = [
        (block_size_tokens < 1, "block_size_tokens", f"must be at least 1, got {block_size_tokens}"),
        (lacks_duration, "prefill_duration", "router_prefill_load_model needs it, and it can only be given in code"),
        (lacks_profile, "profile", "router_policy_config names a file whose profile is not given"),
        (config.router_replica_sync and peers is None, "peers", "router_replica_sync needs them"),
        (peers is not None and not config.router_replica_sync, "router_replica_sync", "is off, but peers are given"),
        (config.use_remote_indexer, "use_remote_indexer", "a remote index is not offered"),
        (config.serve_indexer, "serve_indexer", "serving the index is not offered"),
        (config.shared_cache_type != "none", "shared_cache_type", "a shared cache is not offered"),
        (config.shared_cache_multiplier > 0, "shared_cache_multiplier", "a shared cache is not offered"),
        (config.router_prefill_policy is not None, "router_prefill_policy", "named selections are not offered"),
        (config.router_decode_policy is not None, "router_decode_policy", "named selections are not offered"),
    ]
    raise_problems([(name, message) for is_wrong, name, message in checks if is_wrong])
