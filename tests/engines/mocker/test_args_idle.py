"""MockEngineArgs distinguishes arguments without effect from those with one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engines.mocker import MockEngine, MockEngineArgs, PredictedTiming, SglangArgs, TrtllmArgs
from engines.mocker.build import idle_arguments, make_timing
from pipeline import InvalidArgument


def idle(**given: Any) -> list[str]:
    return [name for name, _ in idle_arguments(MockEngineArgs(**given))]


def test_no_default_of_any_engine_or_worker_is_idle() -> None:
    for engine_type in ("vllm", "sglang", "trtllm"):
        for worker_type in ("aggregated", "prefill", "decode"):
            assert idle(engine_type=engine_type, worker_type=worker_type) == []


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"watermark": 0.05}, "watermark"),
        ({"router_queue_policy": "wspt"}, "router_queue_policy"),
        ({"enable_local_indexer": True}, "enable_local_indexer"),
        ({"aic_mtp_seed": 7}, "aic_mtp_seed"),
        ({"sglang": SglangArgs()}, "sglang"),
        ({"trtllm": TrtllmArgs()}, "trtllm"),
        ({"engine_type": "sglang", "preemption_mode": "fifo"}, "preemption_mode"),
        ({"engine_type": "trtllm", "preemption_mode": "fifo"}, "preemption_mode"),
        ({"engine_type": "sglang", "enable_chunked_prefill": False}, "enable_chunked_prefill"),
        ({"engine_type": "sglang", "max_num_batched_tokens": 99}, "max_num_batched_tokens"),
        ({"worker_type": "decode", "zmq_kv_events_port": 5000}, "zmq_kv_events_port"),
        ({"enable_prefix_caching": False, "zmq_kv_events_port": 5000}, "zmq_kv_events_port"),
        ({"kv_bytes_per_token": 9}, "kv_bytes_per_token"),
        ({"kv_transfer_bandwidth": 1.0}, "kv_transfer_bandwidth"),
        ({"kv_transfer_timing_mode": "destination_missing"}, "kv_transfer_timing_mode"),
        ({"bootstrap_port": 5000}, "bootstrap_port"),
        ({"worker_type": "prefill", "kv_transfer_bandwidth": 1.0}, "kv_transfer_bandwidth"),
    ],
)
def test_an_argument_that_changes_nothing_is_named(given: dict[str, Any], name: str) -> None:
    assert idle(**given) == [name]


@pytest.mark.parametrize(
    "given",
    [
        {"preemption_mode": "fifo", "enable_chunked_prefill": False, "max_num_batched_tokens": 99},
        {"engine_type": "sglang", "sglang": SglangArgs(page_size=4), "max_num_batched_tokens": None},
        {"engine_type": "trtllm", "trtllm": TrtllmArgs()},
        {"aic_nextn": 2, "aic_mtp_seed": 7},
        {"zmq_kv_events_port": 5000, "zmq_replay_port": 6000},
        {"worker_type": "prefill", "kv_bytes_per_token": 9, "kv_transfer_bandwidth": 1.0, "bootstrap_port": 5000},
        {"planner_profile_data": "measured"},
    ],
)
def test_an_argument_that_changes_something_is_not(given: dict[str, Any]) -> None:
    assert idle(**given) == []


class Predictor:
    def predict_prefill(self, batch: int, new_tokens: int, prefix_tokens: int) -> float:
        return 1.0

    def predict_decode(self, batch: int, context_tokens: int, output_tokens: int) -> float:
        return 1.0


TIMING = PredictedTiming(Predictor())


def test_a_model_of_time_that_was_given_replaces_a_profile() -> None:
    args = MockEngineArgs(planner_profile_data="measured")
    assert [name for name, _ in idle_arguments(args, has_timing=True)] == ["planner_profile_data"]


async def test_a_starting_engine_warns_of_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await MockEngine(MockEngineArgs(watermark=0.5, aic_mtp_seed=7)).start(0)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "watermark=0.5 has no effect" in caplog.text
    assert "aic_mtp_seed=7 has no effect" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("aic_backend", "vllm"), ("aic_system", "h200_sxm"), ("aic_backend_version", "1"), ("aic_model_path", "m")],
        *[("aic_tp_size", 2), ("aic_moe_tp_size", 2), ("aic_moe_ep_size", 2), ("aic_attention_dp_size", 2)],
        *[(f"aic_{part}_dtype", "fp8") for part in ("gemm", "moe", "fmha", "kv_cache", "comm")],
    ],
)
def test_a_predictor_that_is_only_described_is_refused_and_one_that_is_given_is_not(name: str, value: Any) -> None:
    args = MockEngineArgs(**{name: value})
    with pytest.raises(InvalidArgument, match="timing=") as refused:
        MockEngine(args)
    assert refused.value.field == name
    with pytest.raises(InvalidArgument):
        make_timing(args)
    assert MockEngine(args, timing=TIMING).args is args


def test_speculative_decoding_needs_no_predictor() -> None:
    MockEngine(MockEngineArgs(aic_nextn=2, aic_nextn_accept_rates="0.5", aic_mtp_seed=3))
