"""Settings of a router that contradict each other, or that it does not offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.settings import Problem

Get = Callable[[str], Any]
"""The value of a setting."""


def combination_problems(values: Mapping[str, Any]) -> list[Problem]:
    """Settings that contradict each other, and those that this router does not offer."""
    return [(name, message) for broken, name, message in _COMBINATIONS if broken(values.get)]


def _lacks_busy_threshold(get: Get) -> bool:
    """Whether conditional disaggregation goes by load, without a threshold for a busy worker."""
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
