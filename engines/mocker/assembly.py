"""A scheduler as the arguments of an engine ask for it."""

from __future__ import annotations

from random import Random

from attrs import asdict

from pipeline import InvalidArgument

from .args import MockEngineArgs, SglangArgs
from .args_idle import predictor_argument
from .blocks import BlockPool, OnEvent
from .policy import Policy
from .policy_sglang import SglangPolicy
from .policy_trtllm import NoEvictPolicy
from .policy_vllm import VllmPolicy
from .profile import InterpolatedTiming
from .scheduler import Scheduler
from .speculative import Burst, accept_rates
from .timing import PassTime, PolynomialTiming, TimingModel


def make_scheduler(
    args: MockEngineArgs,
    *,
    on_event: OnEvent | None = None,
    timing: TimingModel | None = None,
    seed_offset: int = 0,
) -> Scheduler:
    """One rank's scheduler with its pool. Workers with other offsets draw other numbers.

    `on_event` is not called where `args.publishes_kv_events` says so. `timing` replaces the model the arguments name,
    which ranks may share (`make_timing`).
    """
    return Scheduler(
        BlockPool(args.num_gpu_blocks, on_event if args.publishes_kv_events else None),
        block_size=args.block_size,
        policy=make_policy(args),
        time=PassTime(make_timing(args) if timing is None else timing, args.speedup_ratio, args.decode_speedup_ratio),
        worker_type=args.worker_type,
        max_seqs=args.max_num_seqs,
        # SGLang has limits of its own, which are the policy's.
        max_batched_tokens=None if args.engine_type == "sglang" else args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        prefix_caching=args.enable_prefix_caching,
        chunked_prefill=args.enable_chunked_prefill or args.engine_type == "sglang",
        burst=_burst(args, seed_offset),
    )


def make_timing(args: MockEngineArgs) -> TimingModel:
    """The model of time the arguments name. Raises InvalidArgument as `check_timing` and `InterpolatedTiming.load`."""
    check_timing(args)
    if args.planner_profile_data is None:
        return PolynomialTiming()
    return InterpolatedTiming.load(args.planner_profile_data)


def check_timing(args: MockEngineArgs) -> None:
    """Raises InvalidArgument, naming the argument, if only a predictor that nobody gave us knows the times."""
    if (name := predictor_argument(args)) is not None:
        text = (
            "describes a predictor of times, which has to be given: MockEngine(args, timing=PredictedTiming(predictor))"
        )
        raise InvalidArgument(text, field=name)


def make_policy(args: MockEngineArgs) -> Policy:
    """The choices of the engine the arguments name."""
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


def _burst(args: MockEngineArgs, seed_offset: int) -> Burst | None:
    if args.aic_nextn is None:
        return None
    rates = accept_rates(args.aic_nextn, args.aic_nextn_accept_rates)
    return Burst(rates, Random(args.aic_mtp_seed + seed_offset))
