"""Arguments that are set and change nothing, and why: nobody should believe that they do.

Arguments of a deployment that another of its workers needs are not among them.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import fields

from .args import MockEngineArgs

_PREDICTOR = (
    *("aic_backend", "aic_system", "aic_backend_version", "aic_tp_size", "aic_model_path", "aic_moe_tp_size"),
    *("aic_moe_ep_size", "aic_attention_dp_size", "aic_gemm_dtype", "aic_moe_dtype", "aic_fmha_dtype"),
    *("aic_kv_cache_dtype", "aic_comm_dtype"),
)
_HANDOFF = ("kv_bytes_per_token", "kv_transfer_bandwidth", "kv_transfer_timing_mode", "bootstrap_port")


def predictor_argument(args: MockEngineArgs) -> str | None:
    """The first argument that describes an external predictor of times; None if none does."""
    return next((name for name in _PREDICTOR if getattr(args, name) is not None), None)


def idle_arguments(args: MockEngineArgs, *, has_timing: bool = False) -> list[tuple[str, str]]:
    """The name of each argument that is set to something else than its default in vain, and the reason.

    `has_timing` says that the engine is given a model of time beside its arguments.
    """
    defaults = {attribute.name: attribute.default for attribute in fields(MockEngineArgs)}
    in_vain = dict(_in_vain(args))
    if has_timing:
        in_vain["planner_profile_data"] = "the engine was given another model of time"
    return [(name, why) for name, why in in_vain.items() if getattr(args, name) != defaults[name]]


def _in_vain(args: MockEngineArgs) -> Iterator[tuple[str, str]]:
    yield "watermark", "no block is kept free by the schedulers of today"
    yield "router_queue_policy", "it is for a router, and an engine has no queue of one"
    yield "enable_local_indexer", "whether a worker has one is said by its own configuration"
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
        for name in _HANDOFF:
            yield name, "an aggregated worker hands nothing over"
    elif args.kv_bytes_per_token is None:
        yield "kv_transfer_bandwidth", "how long a transfer takes needs kv_bytes_per_token"
