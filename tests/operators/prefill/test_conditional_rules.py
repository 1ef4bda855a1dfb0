"""When a prompt is prefilled where it decodes, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from operators.kv import KvRouterConfig
from operators.prefill.conditional import is_busy, skips_remote_prefill, without_claim
from pipeline.protocols import (
    PreprocessedRequest,
)
from pipeline.protocols.card import ModelRuntimeConfig

# -- conditional disaggregation


def rules(**settings: Any) -> KvRouterConfig:
    """A configuration in which conditional disaggregation is enabled."""
    return KvRouterConfig(conditional_disagg_enabled=True, **settings)


def by_length(ratio: float = 0.7) -> KvRouterConfig:
    return rules(conditional_disagg_eff_isl_ratio_threshold=ratio)


@pytest.mark.parametrize(
    ("config", "isl", "cached", "expected"),
    [
        (by_length(), 1000, 896, True),
        (by_length(), 200, 0, False),
        (by_length(ratio=0.99), 2048, 0, False),
        (by_length(), 0, 0, True),
        (by_length(), 500, 640, True),
        (by_length(ratio=0.99), 2100, 48, False),
        (by_length(ratio=0.99), 100_000, 64_000, False),
        (by_length(ratio=0.99), 4095, 2048, True),
        (by_length(ratio=0.7), 1000, 300, False),
        (KvRouterConfig(), 0, 0, False),
    ],
)
def test_a_short_and_mostly_cached_prompt_is_not_worth_a_transfer(
    config: KvRouterConfig, isl: int, cached: int, expected: bool
) -> None:
    assert skips_remote_prefill(config, isl_tokens=isl, cached_tokens=cached) is expected


@pytest.mark.parametrize(
    ("policy", "short", "busy", "expected"),
    [
        ("isl_bounding", False, True, False),
        ("isl_bounding", True, False, True),
        ("prefill_load", True, False, False),
        ("prefill_load", True, None, False),
        ("prefill_load", False, True, True),
        ("isl_or_load", True, None, True),
        ("isl_or_load", False, True, True),
        ("isl_or_load", False, None, False),
    ],
)
def test_the_policy_decides_which_rules_count(policy: Any, short: bool, busy: bool | None, expected: bool) -> None:
    isl, cached = (1000, 900) if short else (1000, 0)
    config = rules(conditional_disagg_policy=policy)
    got = skips_remote_prefill(config, isl_tokens=isl, cached_tokens=cached, prefill_busy=busy)
    assert got is expected


@pytest.mark.parametrize(
    ("gate", "busy", "expected"),
    [(True, False, True), (True, True, False), (True, None, False), (False, True, True), (False, None, True)],
)
def test_the_gate_lets_only_a_calm_decode_worker_pass(gate: bool, busy: bool | None, expected: bool) -> None:
    config = rules(conditional_disagg_decode_busy_threshold=1.0 if gate else None)
    assert skips_remote_prefill(config, isl_tokens=0, cached_tokens=0, decode_busy=busy) is expected


def test_the_limits_are_those_of_the_configuration() -> None:
    config = rules(conditional_disagg_eff_isl_threshold=10, conditional_disagg_eff_isl_ratio_threshold=0.5)
    assert [skips_remote_prefill(config, isl_tokens=18, cached_tokens=cached) for cached in (8, 9, 10)] == [
        False,
        False,
        True,
    ]
    assert not skips_remote_prefill(config, isl_tokens=40, cached_tokens=30)


@pytest.mark.parametrize(
    ("tokens", "threshold", "limit", "expected"),
    [(101, 1.0, 100, True), (100, 1.0, 100, False), (100, 1.0, None, None), (100, None, 100, None)],
)
def test_a_worker_is_busy_above_its_share(tokens: int, threshold: Any, limit: Any, expected: Any) -> None:
    assert is_busy(tokens, threshold, ModelRuntimeConfig(max_num_batched_tokens=limit)) is expected


@pytest.mark.parametrize("text", ["x-bypass-remote-prefill", "x-bypass-remote-prefill:true"])
def test_a_clients_own_claim_is_taken_off(text: str) -> None:
    assert without_claim(PreprocessedRequest([1], annotations=["a", text, "b"])).annotations == ["a", "b"]
    plain = PreprocessedRequest([1], annotations=["a"])
    assert without_claim(plain) is plain
