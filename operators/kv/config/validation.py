"""What may be wrong with a router's settings, found all at once: kinds, ranges, combinations.

Each check is a function of the values to a list of problems. Values that another check found wrong are left out of
what the next one sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

Problem = tuple[str, str]
"""A setting, and what is wrong with it."""
Get = Callable[[str], Any]
"""The value of a setting."""

_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "float": ("a number", lambda value: type(value) in (int, float)),
    "int": ("an integer", lambda value: type(value) is int),
    "bool": ("true or false", lambda value: type(value) is bool),
    "str": ("a text", lambda value: type(value) is str),
}

_AT_LEAST_0 = (
    *("overlap_score_credit", "overlap_score_credit_decay", "prefill_load_scale", "decode_active_request_weight"),
    *("router_temperature", "router_ttl_secs", "router_queue_threshold", "router_predicted_ttl_secs"),
    *("conditional_disagg_prefill_busy_threshold", "conditional_disagg_decode_busy_threshold"),
    *("conditional_disagg_eff_isl_threshold", "min_initial_workers", "router_snapshot_threshold"),
)
_SHARES = (
    *("host_cache_hit_weight", "disk_cache_hit_weight", "shared_cache_multiplier"),
    *("conditional_disagg_eff_isl_ratio_threshold", "router_prune_target_ratio"),
)
_AT_LEAST_1 = ("router_event_threads", "router_max_tree_size")


def type_problems(values: Mapping[str, Any], types: Mapping[str, str], choices: Mapping[str, Any]) -> list[Problem]:
    """Values that are not of the declared kind; `choices` are the kinds that are one of some texts."""
    found = []
    for name, value in values.items():
        kind, _, rest = types[name].partition(" | ")
        if value is None and rest == "None":
            continue
        if kind in choices:
            allowed = get_args(choices[kind])
            if value not in allowed:
                found.append((name, f"must be one of {', '.join(allowed)}, got {value!r}"))
        elif not _KINDS[kind][1](value):
            found.append((name, f"must be {_KINDS[kind][0]}, got {value!r}"))
    return found


def range_problems(values: Mapping[str, Any]) -> list[Problem]:
    """Numbers outside their range, NaN and infinity included; None is no number."""
    ranges = [(_AT_LEAST_0, 0, math.inf), (_SHARES, 0, 1), (_AT_LEAST_1, 1, math.inf)]
    return [
        (name, f"must be {_range_text(low, high)}, got {values[name]}")
        for names, low, high in ranges
        for name in names
        if values.get(name) is not None and not (is_finite(values[name]) and low <= values[name] <= high)
    ]


def is_finite(value: float) -> bool:
    """Whether a number is finite, and an integer not larger than any float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _range_text(low: float, high: float) -> str:
    return f"a finite number not below {low}" if math.isinf(high) else f"between {low} and {high}"


def combination_problems(values: Mapping[str, Any]) -> list[Problem]:
    """Settings that contradict each other, and those that this router does not offer."""
    return [(name, message) for broken, name, message in _COMBINATIONS if broken(values.get)]


def _lacks_busy_threshold(get: Get) -> bool:
    """Whether conditional disaggregation goes by load, and nothing says what a busy worker is."""
    by_load = get("conditional_disagg_policy") in ("prefill_load", "isl_or_load")
    thresholds = (get("conditional_disagg_prefill_busy_threshold"), get("router_queue_threshold"))
    return get("conditional_disagg_enabled") is True and by_load and thresholds == (None, None)


_COMBINATIONS: tuple[tuple[Callable[[Get], bool], str, str], ...] = (
    (
        lambda get: get("router_track_output_blocks") is True and get("router_track_active_blocks") is False,
        "router_track_output_blocks",
        "needs router_track_active_blocks",
    ),
    (
        lambda get: get("router_prefill_load_model") == "aic" and get("router_track_prefill_tokens") is False,
        "router_prefill_load_model",
        "needs router_track_prefill_tokens",
    ),
    (
        lambda get: get("use_remote_indexer") is True and get("serve_indexer") is True,
        "serve_indexer",
        "excludes use_remote_indexer",
    ),
    (
        lambda get: get("serve_indexer") is True and get("overlap_score_credit") == 0,
        "serve_indexer",
        "needs overlap_score_credit above 0: there is no index without it",
    ),
    (
        lambda get: get("router_predicted_ttl_secs") is not None and get("use_kv_events") is False,
        "router_predicted_ttl_secs",
        "needs use_kv_events",
    ),
    (
        _lacks_busy_threshold,
        "conditional_disagg_policy",
        "needs conditional_disagg_prefill_busy_threshold or router_queue_threshold",
    ),
    (
        lambda get: get("router_tracking_hash") == "keyed-xxh3-v1",
        "router_tracking_hash",
        "keyed hashes are not offered",
    ),
    (
        lambda get: any(get(f"router_tracking_hash_{part}") is not None for part in ("key_file", "key_id")),
        "router_tracking_hash",
        "a key is for keyed hashes, which are not offered",
    ),
    (lambda get: get("durable_kv_events") is True, "durable_kv_events", "durable events are not offered"),
)
"""When it is wrong, which setting is blamed, and why; a value another check refused is None here."""
