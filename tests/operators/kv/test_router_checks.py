"""What a router is given must fit its settings, and what it does not offer is refused by name, all at once."""

from __future__ import annotations

from typing import Any

import pytest

from operators.kv import KvRouter, KvRouterConfig, kv_router
from operators.kv.queue import PolicyProfile
from pipeline import InvalidArgument
from pipeline.network import static_workers
from pipeline.testing import ScriptedEngine


def router(block_size_tokens: int = 4, *, config: dict[str, Any] | None = None, **given: Any) -> KvRouter:
    pool = static_workers({1: ScriptedEngine([])})
    return kv_router(pool, KvRouterConfig(**(config or {})), block_size_tokens=block_size_tokens, **given)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"router_prefill_load_model": "aic"}, "prefill_duration"),
        ({"router_policy_config": "policies.yaml"}, "profile"),
        ({"router_replica_sync": True}, "peers"),
        ({"use_remote_indexer": True}, "use_remote_indexer"),
        ({"serve_indexer": True}, "serve_indexer"),
        ({"shared_cache_type": "hicache"}, "shared_cache_type"),
        ({"shared_cache_multiplier": 0.5}, "shared_cache_multiplier"),
        ({"router_prefill_policy": "mine"}, "router_prefill_policy"),
        ({"router_decode_policy": "mine"}, "router_decode_policy"),
    ],
)
def test_what_is_missing_or_not_offered_is_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field) as refused:
        router(config=config)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"router_tracking_hash": "keyed-xxh3-v1"}, "router_tracking_hash"),
        ({"durable_kv_events": True}, "durable_kv_events"),
    ],
)
def test_what_no_configuration_may_hold_does_not_reach_a_router(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        router(config=config)
    assert refused.value.field == field


def test_all_problems_are_listed_and_the_first_is_the_field() -> None:
    with pytest.raises(InvalidArgument) as refused:
        router(0, config={"serve_indexer": True, "router_replica_sync": True, "router_decode_policy": "mine"})
    assert refused.value.field == "block_size_tokens"
    for name in ("block_size_tokens", "peers", "serve_indexer", "router_decode_policy"):
        assert name in str(refused.value)


def test_what_is_given_is_accepted() -> None:
    config = {"router_prefill_load_model": "aic", "router_policy_config": "policies.yaml"}
    profile = PolicyProfile.from_config(KvRouterConfig())
    with router(config=config, prefill_duration=lambda prompt, cached: 1.0, profile=profile) as given:
        assert given.config.router_prefill_load_model == "aic"


def test_conditional_disaggregation_is_another_stages_business() -> None:
    with router(config={"conditional_disagg_enabled": True}) as given:
        assert given.config.conditional_disagg_enabled
