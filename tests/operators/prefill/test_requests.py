"""What is handed over, and the requests of both halves, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from operators.prefill import NoDisaggregatedParams, TopologyError
from operators.prefill.output import PrefillOutput, handed_over
from operators.prefill.plan import decode_request, merged, prefill_request, transfer_constraints
from operators.prefill.pool import PrefillWorker
from pipeline.protocols import (
    BootstrapInfo,
    LLMEngineOutput,
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingConstraints,
    RoutingHints,
    StopConditions,
)
from pipeline.protocols.card import ModelRuntimeConfig

W = PrefillWorker(7, 1)


# -- what it hands over


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (None, "no data field"),
        (LLMEngineOutput([1]), "missing disaggregated_params"),
        (LLMEngineOutput([1], disaggregated_params={"ctx_request_id": None}), "no usable ctx_request_id"),
        (LLMEngineOutput([1], disaggregated_params={"request_type": "context_only"}), "no usable ctx_request_id"),
    ],
)
def test_an_answer_that_hands_nothing_over_is_an_error(first: Any, text: str) -> None:
    with pytest.raises(NoDisaggregatedParams, match=text):
        handed_over(first)


@pytest.mark.parametrize("params", [{"ctx_request_id": 0, "request_type": "context_only"}, {"a": None}, 0, "", []])
def test_whatever_else_is_handed_over_as_it_is(params: Any) -> None:
    assert handed_over(LLMEngineOutput([1], disaggregated_params=params)).params == params


# -- the two requests

INFO = BootstrapInfo("h", 9000, 5)


@pytest.mark.parametrize("limit", [None, 40])
def test_only_the_prefill_is_limited_to_one_token(limit: int | None) -> None:
    request = PreprocessedRequest([1], stop_conditions=StopConditions(max_tokens=limit, ignore_eos=True))
    copy = prefill_request(request, W, INFO)
    assert copy.stop_conditions == StopConditions(max_tokens=1, ignore_eos=True)
    assert copy.bootstrap_info == INFO
    assert decode_request(request, 7, INFO, None).stop_conditions.max_tokens == limit
    assert request == PreprocessedRequest([1], stop_conditions=StopConditions(max_tokens=limit, ignore_eos=True))


def test_without_a_meeting_point_the_copy_differs_in_its_limit_and_worker_only() -> None:
    hints = RoutingHints(prefill_worker_id=7, prefill_dp_rank=1, dp_rank=1, priority=2)
    request = PreprocessedRequest([1], routing=hints, bootstrap_info=INFO)
    request.stop_conditions.max_tokens = 1
    assert prefill_request(request, W) == request


@pytest.mark.parametrize("rank", [None, 1])
def test_the_rank_of_a_prefill_is_not_that_of_decode(rank: int | None) -> None:
    request = PreprocessedRequest([1], routing=RoutingHints(dp_rank=3, priority=2))
    copy = prefill_request(request, PrefillWorker(7, rank))
    assert copy.routing == RoutingHints(prefill_worker_id=7, prefill_dp_rank=rank, dp_rank=rank, priority=2)
    hints = decode_request(request, 7, INFO, None).routing
    assert hints == RoutingHints(prefill_worker_id=7, dp_rank=3, priority=2)
    assert request.routing == RoutingHints(dp_rank=3, priority=2)


def test_decode_is_routed_without_prefixes_and_prompt_work() -> None:
    own = RouterConfigOverride(router_temperature=0.7, overlap_score_credit=1.0, assume_kv_reuse=True)
    request = PreprocessedRequest([1], router_config_override=own)
    override = RouterConfigOverride(
        router_temperature=0.7, overlap_score_credit=0.0, assume_kv_reuse=False, track_prefill_tokens=False
    )
    assert decode_request(request, 7, INFO, None).router_config_override == override
    kept = decode_request(request, 7, INFO, None, keeps_overlap=True).router_config_override
    assert kept is not None
    assert (kept.overlap_score_credit, kept.assume_kv_reuse) == (1.0, False)
    assert own.assume_kv_reuse is True
    none = decode_request(PreprocessedRequest([1]), 7, INFO, None).router_config_override
    assert none == RouterConfigOverride(overlap_score_credit=0.0, assume_kv_reuse=False, track_prefill_tokens=False)


def test_decode_gets_a_result_where_there_is_no_meeting() -> None:
    decode = decode_request(PreprocessedRequest([1]), 7, PrefillOutput({"a": 1}), RoutingConstraints())
    assert decode.prefill_result is not None
    assert (decode.prefill_result.disaggregated_params, decode.bootstrap_info) == ({"a": 1}, None)
    assert decode.routing == RoutingHints(prefill_worker_id=7)


# -- topology


def topology(**fields: Any) -> ModelRuntimeConfig:
    """Settings that the record itself might refuse, as another program may have them."""
    config = ModelRuntimeConfig(topology_domains={"zone": "us-east-1a"})
    for name, value in fields.items():
        setattr(config, name, value)
    return config


TAINT = "dynamo.topology/zone=us-east-1a"
REQUIRED = topology(kv_transfer_domain="zone", kv_transfer_enforcement="required")
PREFERRED = topology(kv_transfer_domain="zone", kv_transfer_enforcement="preferred", kv_transfer_preferred_weight=0.85)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (topology(), None),
        (REQUIRED, RoutingConstraints({TAINT})),
        (PREFERRED, RoutingConstraints(set(), {TAINT: 0.85})),
    ],
)
def test_the_workers_domain_is_the_constraint(config: ModelRuntimeConfig, expected: Any) -> None:
    assert transfer_constraints({1: config, 2: REQUIRED}, 1) == expected


@pytest.mark.parametrize(
    "config",
    [
        topology(kv_transfer_domain="zone"),
        topology(kv_transfer_domain="rack", kv_transfer_enforcement="required"),
        topology(kv_transfer_domain="zone", kv_transfer_enforcement="preferred"),
    ],
)
def test_incomplete_settings_are_an_error(config: ModelRuntimeConfig) -> None:
    with pytest.raises(TopologyError):
        transfer_constraints({1: config}, 1)


def test_of_a_worker_without_settings_only_preferences_can_be_left_out() -> None:
    assert transfer_constraints({}, 9) is None
    assert transfer_constraints({1: topology(), 2: PREFERRED}, 9) is None
    with pytest.raises(TopologyError):
        transfer_constraints({1: PREFERRED, 2: REQUIRED}, 9)


def test_constraints_of_user_and_topology_hold_together() -> None:
    theirs = RoutingConstraints({TAINT}, {"dynamo.topology/rack=rack-7": 0.85})
    own = RoutingConstraints({"user.required"}, {"user.preferred": 0.25, "dynamo.topology/rack=rack-7": 0.1})
    both = RoutingConstraints({TAINT, "user.required"}, {"user.preferred": 0.25, "dynamo.topology/rack=rack-7": 0.85})
    assert (merged(own, theirs), merged(None, theirs)) == (both, theirs)
    payload = decode_request(PreprocessedRequest([1], routing=RoutingHints(routing_constraints=own)), 7, INFO, theirs)
    assert payload.routing is not None
    assert payload.routing.routing_constraints == both
    assert own.required_taints == {"user.required"}
