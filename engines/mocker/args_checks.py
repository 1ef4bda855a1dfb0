"""What makes engine arguments wrong, alone and together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from pipeline import InvalidArgument

from .speculative import accept_rates

if TYPE_CHECKING:
    from .args import MockEngineArgs, SglangArgs

OWN_BLOCK_SIZE = {"vllm": 64, "trtllm": 32, "sglang": 1}
"""Tokens a block where nothing is said."""

_AT_LEAST_1 = (
    *("num_gpu_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "dp_size", "kv_bytes_per_token"),
    *("aic_tp_size", "aic_moe_tp_size", "aic_moe_ep_size", "aic_attention_dp_size", "handoff_session_timeout_ms"),
)
_AT_LEAST_0 = (
    *("block_size", "speedup_ratio", "decode_speedup_ratio", "startup_time", "aic_mtp_seed"),
    *("kv_transfer_bandwidth", "watermark"),
)
_LEAST = dict.fromkeys(_AT_LEAST_1, 1) | dict.fromkeys(_AT_LEAST_0, 0)
_SGLANG_LEAST = {
    **dict.fromkeys(("page_size", "max_prefill_tokens", "chunked_prefill_size", "clip_max_new_tokens"), 1),
    "schedule_conservativeness": 0,
}
_PORTS = ("bootstrap_port", "zmq_kv_events_port", "zmq_replay_port")
_RANK_PORTS = ("zmq_kv_events_port", "zmq_replay_port")
_PORT_MAX = 65535
_TOKEN_MAX = 2**32 - 1
_BEYOND = 2**64
"""What no number may reach; so each can be reckoned with as a float."""


def check(args: MockEngineArgs) -> None:
    """Raises InvalidArgument, naming the argument, for the first thing that is wrong."""
    _check_choices(args)
    _check_least(args, _LEAST)
    _check_most(args.watermark, 1, "watermark")
    _check_ports(args)
    if args.max_model_len is not None and args.engine_type != "vllm":
        raise InvalidArgument(f"{args.engine_type} has no such limit, only vllm", field="max_model_len")
    if args.reasoning is not None:
        _check_range(args.reasoning.start_thinking_token_id, _TOKEN_MAX, "reasoning.start_thinking_token_id")
        _check_range(args.reasoning.end_thinking_token_id, _TOKEN_MAX, "reasoning.end_thinking_token_id")
        _check_range(args.reasoning.thinking_ratio, 1, "reasoning.thinking_ratio")
    _check_drafts(args)
    if args.sglang is not None:
        _check_sglang(args.sglang)
    _check_block_size(args)


def resolved_block_size(args: MockEngineArgs) -> int:
    """The block size given, else the engine's own."""
    page_size = args.sglang.page_size if args.sglang is not None and args.engine_type == "sglang" else None
    return args.block_size or page_size or OWN_BLOCK_SIZE[args.engine_type]


def _check_choices(args: MockEngineArgs) -> None:
    from .args import EngineType, PreemptionMode, QueuePolicy, SchedulePolicy, TransferTimingMode, WorkerType

    sglang, trtllm = args.sglang, args.trtllm
    for name, value, choices in (
        ("engine_type", args.engine_type, get_args(EngineType)),
        ("preemption_mode", args.preemption_mode, get_args(PreemptionMode)),
        ("worker_type", args.worker_type, get_args(WorkerType)),
        ("kv_transfer_timing_mode", args.kv_transfer_timing_mode, get_args(TransferTimingMode)),
        ("router_queue_policy", args.router_queue_policy, (None, *get_args(QueuePolicy))),
        ("sglang.schedule_policy", sglang and sglang.schedule_policy, (None, *get_args(SchedulePolicy))),
        (
            "trtllm.capacity_scheduler_policy",
            trtllm and trtllm.capacity_scheduler_policy,
            (None, "guaranteed_no_evict"),
        ),
    ):
        if value not in choices:
            known = ", ".join(choice for choice in choices if choice is not None)
            raise InvalidArgument(f"must be one of {known}, got {value!r}", field=name)


def _check_least(record: Any, least: dict[str, int], place: str = "") -> None:
    for name, low in least.items():
        value = getattr(record, name)
        if value is not None and not low <= value < _BEYOND:
            raise InvalidArgument(f"must be at least {low} and below 2^64, got {value}", field=place + name)


def _check_most(value: float, high: float, name: str) -> None:
    if value > high:
        raise InvalidArgument(f"must be at most {high}, got {value}", field=name)


def _check_range(value: float, high: int, name: str) -> None:
    if not 0 <= value <= high:
        raise InvalidArgument(f"must be from 0 to {high}, got {value}", field=name)


def _check_ports(args: MockEngineArgs) -> None:
    for name in _PORTS:
        port = getattr(args, name)
        last = args.dp_size - 1 if name in _RANK_PORTS else 0
        if port is not None and not 1 <= port <= _PORT_MAX - last:
            raise InvalidArgument(f"must be a port, also for the last rank, got {port}", field=name)
    events, replay = args.zmq_kv_events_port, args.zmq_replay_port
    if replay is None:
        return
    if events is None:
        raise InvalidArgument("needs zmq_kv_events_port: there is nothing to repeat without events", field=_PORTS[2])
    if abs(events - replay) < args.dp_size:
        raise InvalidArgument(f"meets the ports of the ranks' events, which begin at {events}", field=_PORTS[2])


def _check_drafts(args: MockEngineArgs) -> None:
    if args.aic_nextn is None:
        if args.aic_nextn_accept_rates is not None:
            raise InvalidArgument("needs aic_nextn", field="aic_nextn_accept_rates")
        return
    accept_rates(args.aic_nextn, args.aic_nextn_accept_rates)
    if args.decode_speedup_ratio != 1.0:
        raise InvalidArgument("must be 1.0 with aic_nextn, which speeds up decode itself", field="decode_speedup_ratio")


def _check_sglang(sglang: SglangArgs) -> None:
    _check_least(sglang, _SGLANG_LEAST, "sglang.")
    _check_most(sglang.schedule_conservativeness or 0, 1, "sglang.schedule_conservativeness")


def _check_block_size(args: MockEngineArgs) -> None:
    size, sglang = resolved_block_size(args), args.sglang
    if args.engine_type != "sglang":
        if size < 2:
            raise InvalidArgument(f"must be at least 2 for {args.engine_type}, got {size}", field="block_size")
        return
    if sglang is None:
        return
    if sglang.page_size is not None and sglang.page_size != size:
        raise InvalidArgument(f"must be sglang.page_size, {sglang.page_size}, got {size}", field="block_size")
    if sglang.chunked_prefill_size is not None and sglang.chunked_prefill_size % size:
        raise InvalidArgument(f"must be a multiple of the block size, {size}", field="sglang.chunked_prefill_size")
    if sglang.max_prefill_tokens is not None and sglang.max_prefill_tokens < size:
        raise InvalidArgument(f"must be at least the block size, {size}", field="sglang.max_prefill_tokens")
