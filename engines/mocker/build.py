"""Building a mock engine from its arguments: its scheduler, its policy and its model of time.

`idle_arguments` names the arguments that are set and have no effect, with the reason, for a warning at the start.
Arguments of a deployment that another of its workers needs are not among them.

No program reaches `kv_bytes_per_token` and `stagger_delay_s`: launchers of real engines use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from attrs import asdict, fields

from pipeline import InvalidArgument

from .args import MockEngineArgs, SglangArgs
from .scheduling import (
    ROLES,
    BlockPool,
    Burst,
    NoEvictPolicy,
    OnEvent,
    Policy,
    Scheduler,
    SglangPolicy,
    VllmPolicy,
    accept_rates,
)
from .timing import InterpolatedTiming, PolynomialTiming, StepTime, TimingModel

_DRAFTS = ("aic_nextn", "aic_nextn_accept_rates", "aic_mtp_seed")
_PREDICTOR = [each.name for each in fields(MockEngineArgs) if each.name.startswith("aic_") and each.name not in _DRAFTS]
"""The arguments that describe an external predictor of times."""
_TRANSFER = ("kv_bytes_per_token", "kv_transfer_bandwidth", "kv_transfer_timing_mode", "bootstrap_port")


def idle_arguments(args: MockEngineArgs, *, has_timing: bool = False) -> list[tuple[str, str]]:
    """Return the name of each argument that differs from its default without an effect, and the reason.

    `has_timing`: the engine has a model of time beside its arguments.
    """
    defaults = {attribute.name: attribute.default for attribute in fields(MockEngineArgs)}
    in_vain = dict(_in_vain(args))
    if has_timing:
        in_vain["planner_profile_data"] = "the engine was given another model of time"
    return [(name, why) for name, why in in_vain.items() if getattr(args, name) != defaults[name]]


def _in_vain(args: MockEngineArgs) -> Iterator[tuple[str, str]]:
    yield "watermark", "no block is kept free by the schedulers of today"
    yield "router_queue_policy", "it is for a router, and an engine has no queue of one"
    yield "enable_local_indexer", "a worker's own configuration decides whether it has one"
    if args.aic_nextn is None:
        yield "aic_mtp_seed", "nothing is drafted without aic_nextn"
    yield from _of_other_engines(args)
    yield from _of_other_workers(args)


def _of_other_engines(args: MockEngineArgs) -> Iterator[tuple[str, str]]:
    engine = args.engine_type
    if engine != "vllm":
        yield "preemption_mode", f"{engine} has its own choice of whom to pre-empt"
    if engine != "trtllm":
        yield "trtllm", f"it is for trtllm, not for {engine}"
    if engine != "sglang":
        yield "sglang", f"it is for sglang, not for {engine}"
        return
    yield "enable_chunked_prefill", "sglang always splits long prompts"
    if args.max_num_batched_tokens is not None:
        yield "max_num_batched_tokens", "the limits of sglang are those under `sglang`"


def _of_other_workers(args: MockEngineArgs) -> Iterator[tuple[str, str]]:
    if not args.publishes_kv_events:
        for name in ("zmq_kv_events_port", "zmq_replay_port"):
            yield name, "this worker has no KV events"
    if args.worker_type == "aggregated":
        for name in _TRANSFER:
            yield name, "an aggregated worker hands nothing over"
    elif args.kv_bytes_per_token is None:
        yield "kv_transfer_bandwidth", "how long a transfer takes needs kv_bytes_per_token"


def make_scheduler(
    args: MockEngineArgs, *, on_event: OnEvent | None = None, timing: TimingModel | None = None, seed_offset: int = 0
) -> Scheduler:
    """Return one rank's scheduler with its pool. Workers with other offsets draw other numbers.

    `on_event` is not called unless `args.publishes_kv_events`. `timing` replaces the model the arguments name,
    which ranks may share (`make_timing`).
    """
    burst = None
    if args.aic_nextn is not None:
        rates = accept_rates(args.aic_nextn, args.aic_nextn_accept_rates)
        burst = Burst(rates, Random(args.aic_mtp_seed + seed_offset))
    return Scheduler(
        BlockPool(args.num_gpu_blocks, on_event if args.publishes_kv_events else None),
        block_size=args.block_size,
        policy=make_policy(args),
        time=StepTime(make_timing(args) if timing is None else timing, args.speedup_ratio, args.decode_speedup_ratio),
        role=ROLES[args.worker_type],
        max_seqs=args.max_num_seqs,
        # SGLang has limits of its own, which are the policy's.
        max_batched_tokens=None if args.engine_type == "sglang" else args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        prefix_caching=args.enable_prefix_caching,
        chunked_prefill=args.enable_chunked_prefill or args.engine_type == "sglang",
        burst=burst,
    )


def make_timing(args: MockEngineArgs) -> TimingModel:
    """Return the model of time that the arguments select. Raises as `check_timing` and `InterpolatedTiming.load`."""
    check_timing(args)
    if args.planner_profile_data is None:
        return PolynomialTiming()
    return InterpolatedTiming.load(args.planner_profile_data)


def check_timing(args: MockEngineArgs) -> None:
    """Raise InvalidArgument, naming the argument, if the arguments describe a predictor, which they cannot make."""
    if (name := next((name for name in _PREDICTOR if getattr(args, name) is not None), None)) is not None:
        text = (
            "describes a predictor of times, which has to be given: MockEngine(args, timing=PredictedTiming(predictor))"
        )
        raise InvalidArgument(text, field=name)


def make_policy(args: MockEngineArgs) -> Policy:
    """Return the scheduling policy of the engine type."""
    match args.engine_type:
        case "vllm":
            return VllmPolicy(args.preemption_mode)
        case "trtllm":
            return NoEvictPolicy()
        case "sglang":
            given = asdict(SglangArgs() if args.sglang is None else args.sglang)
            del given["page_size"]
            return SglangPolicy(
                page_size=args.block_size, **{name: value for name, value in given.items() if value is not None}
            )


DTYPE_BYTES = {
    **dict.fromkeys(("auto", "float16", "fp16", "half", "bfloat16", "bf16"), 2),
    **dict.fromkeys(("float8", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 1),
    **dict.fromkeys(("float32", "fp32", "float"), 4),
}
"""Bytes of one number by the name of its type; `auto` is the usual one of models."""

STAGGER_FROM_WORKERS, STAGGER_S = 32, 0.1
STAGGER_MORE_ABOVE_WORKERS, STAGGER_MORE_S = 128, 0.2


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: str = "auto") -> int:
    """Return the bytes of one token's keys and values. Raises InvalidArgument for an unknown type."""
    size = DTYPE_BYTES.get(dtype.lower())
    if size is None:
        raise InvalidArgument(f"must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}", field="kv_cache_dtype")
    return layers * 2 * kv_heads * head_dim * size


def stagger_delay_s(workers: int, configured_s: float = -1.0) -> float:
    """Return the seconds between the starts of two workers; a negative setting derives them from their number."""
    if configured_s >= 0:
        return configured_s
    if workers < STAGGER_FROM_WORKERS:
        return 0.0
    return STAGGER_S if workers <= STAGGER_MORE_ABOVE_WORKERS else STAGGER_MORE_S
