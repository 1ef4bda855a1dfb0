"""MockEngineArgs: defaults, refused values, and the round trip through JSON."""

from __future__ import annotations

import logging
import typing
from typing import Any

import pytest

from engines.mocker import MockEngine, MockEngineArgs, PredictedTiming, ReasoningArgs, SglangArgs, TrtllmArgs
from engines.mocker.build import (
    idle_arguments,
    kv_bytes_per_token,
    make_policy,
    make_scheduler,
    make_timing,
    stagger_delay_s,
)
from engines.mocker.scheduling import NoEvictPolicy, SglangPolicy, VllmPolicy
from pipeline import InvalidArgument


def refused(field: str, **arguments: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        MockEngineArgs(**arguments)
    assert caught.value.field == field
    return str(caught.value)


def test_the_defaults_are_those_of_the_original() -> None:
    args = MockEngineArgs()
    assert (args.engine_type, args.num_gpu_blocks, args.block_size) == ("vllm", 16384, 64)
    assert (args.max_num_seqs, args.max_num_batched_tokens, args.max_model_len) == (256, 8192, None)
    assert (args.enable_prefix_caching, args.enable_chunked_prefill, args.preemption_mode) == (True, True, "lifo")
    assert (args.speedup_ratio, args.decode_speedup_ratio, args.dp_size, args.worker_type) == (1, 1, 1, "aggregated")
    assert (args.aic_mtp_seed, args.handoff_session_timeout_ms, args.kv_transfer_timing_mode) == (
        42,
        300_000,
        "full_prompt",
    )
    assert args.watermark == 0.01


@pytest.mark.parametrize(
    ("given", "block_size"),
    [
        ({}, 64),
        ({"engine_type": "trtllm"}, 32),
        ({"engine_type": "sglang"}, 1),
        ({"engine_type": "sglang", "sglang": SglangArgs(page_size=16)}, 16),
        ({"engine_type": "sglang", "block_size": 8}, 8),
        ({"engine_type": "sglang", "block_size": 4, "sglang": SglangArgs(page_size=4)}, 4),
        ({"block_size": 2}, 2),
        ({"sglang": SglangArgs(page_size=16)}, 64),
    ],
)
def test_each_engine_has_its_own_block_size(given: dict[str, Any], block_size: int) -> None:
    assert MockEngineArgs(**given).block_size == block_size


def test_a_block_size_that_is_not_the_page_size_is_refused() -> None:
    refused("block_size", engine_type="sglang", block_size=8, sglang=SglangArgs(page_size=4))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_model_len", 0), ("num_gpu_blocks", 0), ("max_num_seqs", 0), ("max_num_batched_tokens", 0)],
        *[("dp_size", 0), ("speedup_ratio", -0.1), ("decode_speedup_ratio", -1.0), ("speedup_ratio", float("nan"))],
        *[("block_size", 1), ("block_size", -4), ("engine_type", "tgi"), ("worker_type", "encode")],
        *[("preemption_mode", "random"), ("kv_transfer_timing_mode", "none"), ("startup_time", -1.0)],
        *[("kv_transfer_bandwidth", -1.0), ("watermark", 1.5), ("bootstrap_port", 0), ("bootstrap_port", 65536)],
        *[("aic_nextn", 0), ("aic_nextn", 6), ("aic_nextn_accept_rates", "0.5"), ("router_queue_policy", "best")],
        *[("zmq_replay_port", 5000), ("handoff_session_timeout_ms", 0), ("speedup_ratio", float("inf"))],
        *[("num_gpu_blocks", 10**400), ("decode_speedup_ratio", 10**400), ("aic_mtp_seed", 2**64)],
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(field: str, value: object) -> None:
    refused(field, **{field: value})


def test_all_arguments_out_of_their_ranges_are_named_at_once() -> None:
    text = refused("num_gpu_blocks", num_gpu_blocks=0, watermark=1.5, sglang=SglangArgs(page_size=0))
    assert [part.partition(":")[0] for part in text.split("; ")] == ["num_gpu_blocks", "sglang.page_size", "watermark"]


def test_all_arguments_that_do_not_go_together_are_named_at_once() -> None:
    text = refused("zmq_replay_port", engine_type="trtllm", zmq_replay_port=5000, aic_nextn=2, block_size=1)
    assert [part.partition(":")[0] for part in text.split("; ")] == ["zmq_replay_port", "block_size"]


@pytest.mark.parametrize("engine_type", ["sglang", "trtllm"])
def test_only_vllm_has_a_model_length(engine_type: str) -> None:
    refused("max_model_len", engine_type=engine_type, max_model_len=100)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_part_of_thinking_is_from_none_to_all(ratio: float) -> None:
    reasoning = ReasoningArgs(start_thinking_token_id=1, end_thinking_token_id=2, thinking_ratio=ratio)
    refused("reasoning.thinking_ratio", reasoning=reasoning)


@pytest.mark.parametrize("token", [-1, 2**32])
@pytest.mark.parametrize("name", ["start_thinking_token_id", "end_thinking_token_id"])
def test_tokens_around_thinking_are_tokens(name: str, token: int) -> None:
    tokens = {"start_thinking_token_id": 1, "end_thinking_token_id": 2, name: token}
    refused(f"reasoning.{name}", reasoning=ReasoningArgs(thinking_ratio=0.5, **tokens))


@pytest.mark.parametrize(
    ("field", "sglang"),
    [
        ("sglang.page_size", {"page_size": 0}),
        ("sglang.clip_max_new_tokens", {"clip_max_new_tokens": 0}),
        ("sglang.schedule_conservativeness", {"schedule_conservativeness": 1.5}),
        ("sglang.schedule_policy", {"schedule_policy": "best"}),
        ("sglang.chunked_prefill_size", {"page_size": 16, "chunked_prefill_size": 40}),
        ("sglang.max_prefill_tokens", {"page_size": 16, "max_prefill_tokens": 15}),
    ],
)
def test_what_only_sglang_has_is_checked_too(field: str, sglang: dict[str, Any]) -> None:
    refused(field, engine_type="sglang", sglang=SglangArgs(**sglang))


def test_another_capacity_policy_is_refused() -> None:
    policy: Any = "max_utilization"
    refused("trtllm.capacity_scheduler_policy", trtllm=TrtllmArgs(capacity_scheduler_policy=policy))


def test_the_last_rank_needs_a_port_too() -> None:
    MockEngineArgs(dp_size=2, zmq_kv_events_port=65534)
    refused("zmq_kv_events_port", dp_size=2, zmq_kv_events_port=65535)


@pytest.mark.parametrize("replay_port", [4999, 5000, 5001])
def test_no_rank_repeats_events_on_a_port_where_another_sends_them(replay_port: int) -> None:
    MockEngineArgs(dp_size=2, zmq_kv_events_port=5000, zmq_replay_port=5002)
    refused("zmq_replay_port", dp_size=2, zmq_kv_events_port=5000, zmq_replay_port=replay_port)


@pytest.mark.parametrize("rates", ["nan", "inf", "-0.1", "1.1", "half", "0.5,,0.5"])
def test_a_rate_is_a_number_from_0_to_1(rates: str) -> None:
    refused("aic_nextn_accept_rates", aic_nextn=2, aic_nextn_accept_rates=rates)


def test_drafts_do_not_go_with_a_decode_speed_up() -> None:
    assert MockEngineArgs(aic_nextn=3).aic_nextn == 3
    refused("decode_speedup_ratio", aic_nextn=3, decode_speedup_ratio=2.0)


def test_choices_may_be_in_any_case_and_are_written_in_lower_case() -> None:
    args = MockEngineArgs.from_json('{"engine_type":"VLLM","worker_type":"Aggregated","preemption_mode":"Lifo"}')
    assert args == MockEngineArgs()
    plain = args.to_plain()
    assert (plain["engine_type"], plain["worker_type"], plain["preemption_mode"]) == ("vllm", "aggregated", "lifo")
    sglang = MockEngineArgs.from_plain({"engine_type": "SGLang", "sglang": {"schedule_policy": "LPM"}}).sglang
    assert sglang is not None
    assert sglang.schedule_policy == "lpm"
    shouted: Any = "TRTLLM"
    assert MockEngineArgs(engine_type=shouted).engine_type == "trtllm"


def test_nulls_stay_null_there_and_back() -> None:
    args = MockEngineArgs.from_json(b'{"max_num_seqs": null, "max_num_batched_tokens": null}')
    plain = args.to_plain()
    assert (plain["max_num_seqs"], plain["max_num_batched_tokens"]) == (None, None)
    assert MockEngineArgs.from_plain(plain) == args


def test_all_arguments_are_written_and_read_back() -> None:
    args = MockEngineArgs(
        engine_type="sglang",
        sglang=SglangArgs(page_size=4, schedule_policy="lpm"),
        trtllm=TrtllmArgs(capacity_scheduler_policy="guaranteed_no_evict"),
        reasoning=ReasoningArgs(start_thinking_token_id=1, end_thinking_token_id=2, thinking_ratio=0.5),
        planner_profile_data="/profiles",
        speedup_ratio=0.0,
        router_queue_policy="fcfs",
    )
    plain = args.to_plain()
    assert plain["aic_system"] is None
    assert plain["sglang"]["clip_max_new_tokens"] is None
    assert MockEngineArgs.from_plain(plain) == args


@pytest.mark.parametrize(
    ("plain", "field"),
    [
        *[({"num_blocks": 4}, "num_blocks"), ({"sglang": {"pages": 1}}, "sglang.pages")],
        *[({"num_gpu_blocks": "4"}, "num_gpu_blocks"), ({"num_gpu_blocks": 4.0}, "num_gpu_blocks")],
        *[({"enable_prefix_caching": 1}, "enable_prefix_caching"), ({"engine_type": 3}, "engine_type")],
        *[({"num_gpu_blocks": None}, "num_gpu_blocks"), ({"sglang": []}, "sglang")],
        *[({"is_prefill": "yes"}, "is_prefill"), ({"engine_type": "tgi"}, "engine_type")],
        ({"reasoning": {"start_thinking_token_id": 1, "end_thinking_token_id": 2}}, "reasoning.thinking_ratio"),
    ],
)
def test_unknown_names_and_wrong_types_are_refused(plain: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        MockEngineArgs.from_plain(plain)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["{} {}", "{}x", "", "[]", "null", "{", '{"speedup_ratio": NaN}'])
def test_text_that_is_not_one_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        MockEngineArgs.from_json(text)


def test_white_space_around_the_document_is_nothing() -> None:
    assert MockEngineArgs.from_json(" {}\n") == MockEngineArgs()


def test_flags_of_older_files_name_the_worker_type() -> None:
    read = MockEngineArgs.from_plain
    assert read({"is_prefill": True, "is_decode": False}).worker_type == "prefill"
    assert read({"is_decode": True}).worker_type == "decode"
    assert read({"is_prefill": False, "is_decode": None}).worker_type == "aggregated"
    assert read({"is_prefill": True, "worker_type": "Prefill"}).worker_type == "prefill"
    assert read({"has_perf_model": True}) == MockEngineArgs()


@pytest.mark.parametrize("more", [{"is_decode": True}, {"worker_type": "decode"}])
def test_a_worker_of_two_types_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        MockEngineArgs.from_plain({"is_prefill": True} | more)


@pytest.mark.parametrize(
    ("given", "published"),
    [
        ({}, True),
        ({"worker_type": "prefill"}, True),
        ({"worker_type": "decode"}, False),
        ({"enable_prefix_caching": False}, False),
    ],
)
def test_a_decode_worker_and_one_without_a_cache_publish_nothing(given: dict[str, Any], published: bool) -> None:
    assert MockEngineArgs(**given).publishes_kv_events == published


def test_a_decode_worker_has_no_local_indexer() -> None:
    assert MockEngineArgs(enable_local_indexer=True).enable_local_indexer
    assert not MockEngineArgs(enable_local_indexer=True, worker_type="decode").enable_local_indexer


def test_handoffs_are_limited_as_sequences_are() -> None:
    assert MockEngineArgs().transfer_capacity == 256
    assert MockEngineArgs(max_num_seqs=None, num_gpu_blocks=7).transfer_capacity == 7


def test_annotations_are_types_a_command_line_can_read() -> None:
    hints = typing.get_type_hints(MockEngineArgs.__init__)
    assert hints["max_num_seqs"] == int | None
    assert hints["speedup_ratio"] is float
    assert hints["enable_prefix_caching"] is bool
    assert (hints["engine_type"], hints["router_queue_policy"]) == (str, str | None)


@pytest.mark.parametrize(
    ("engine_type", "policy"), [("vllm", VllmPolicy), ("trtllm", NoEvictPolicy), ("sglang", SglangPolicy)]
)
def test_each_engine_has_its_own_policy(engine_type: Any, policy: type) -> None:
    assert isinstance(make_policy(MockEngineArgs(engine_type=engine_type)), policy)


def test_a_scheduler_has_its_configured_size() -> None:
    scheduler = make_scheduler(MockEngineArgs(num_gpu_blocks=7, block_size=4))
    assert (scheduler.pool.capacity, scheduler.block_size) == (7, 4)


@pytest.mark.parametrize(
    ("dtype", "size"), [("bfloat16", 131072), ("auto", 131072), ("int8", 65536), ("FP8", 65536), ("float32", 262144)]
)
def test_the_cache_of_a_token_is_two_numbers_for_each_layer_head_and_dimension(dtype: str, size: int) -> None:
    assert kv_bytes_per_token(32, 8, 128, dtype) == size


def test_an_unknown_type_of_number_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        kv_bytes_per_token(32, 8, 128, "int3")


@pytest.mark.parametrize(("workers", "delay_s"), [(1, 0), (31, 0), (32, 0.1), (128, 0.1), (129, 0.2)])
def test_many_workers_start_one_after_the_other(workers: int, delay_s: float) -> None:
    assert stagger_delay_s(workers) == delay_s
    assert stagger_delay_s(workers, 1.5) == 1.5
    assert stagger_delay_s(workers, 0.0) == 0


# -- arguments without effect


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
