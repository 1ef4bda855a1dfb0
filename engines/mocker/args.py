"""MockEngineArgs: the arguments of a simulated engine, with their defaults, ranges, and their form in JSON.

The JSON form is strict: unknown names and wrong types are refused. Flags of older files are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike, fspath
from typing import Any, ClassVar, Literal, Self, get_args

from attrs import NOTHING, field, fields, frozen, has

from pipeline import InvalidArgument, wire
from pipeline.protocols.field_rules import U32, U32_MAX, WIRE_KEY, WireRule, null
from pipeline.settings import Check, Problem, one_of, raise_problems

from .scheduling import accept_rates

OWN_BLOCK_SIZE = {"vllm": 64, "trtllm": 32, "sglang": 1}
"""Default block size in tokens, by engine type."""

EngineType = Literal["vllm", "sglang", "trtllm"]
WorkerType = Literal["aggregated", "prefill", "decode"]
PreemptionMode = Literal["lifo", "fifo"]
TransferTimingMode = Literal["full_prompt", "destination_missing"]
QueuePolicy = Literal["fcfs", "wspt", "lcfs"]
SchedulePolicy = Literal["fifo", "fcfs", "lpm"]
CapacityPolicy = Literal["guaranteed_no_evict"]

_CHECK = "mocker.check"
"""Key of an argument's `Check` in its attrs metadata; None is right unless the default is a text."""
_BEYOND = 2**64
"""Exclusive bound of all numbers, so that each fits a float."""
_PORT_MAX = 65535
_IGNORED = "has_perf_model"
_ROLES = {"is_prefill": "prefill", "is_decode": "decode"}
"""Flags of older files, and the worker type that each one means."""
_ALWAYS = {WIRE_KEY: WireRule("always")}
"""Metadata of an argument that is written to JSON also while it is None."""


def _checked(check: Check, default: Any = None, **options: Any) -> Any:
    return field(default=default, metadata=_ALWAYS | {_CHECK: check}, **options)


def _least(low: int, default: Any = None) -> Any:
    """Return an argument that is a number from `low` on."""
    return _checked(Check(f"at least {low} and below 2^64", lambda value: low <= value < _BEYOND), default)


def _up_to(high: int, default: Any = None) -> Any:
    """Return an argument that is a number from 0 to `high`."""
    return _checked(Check(f"from 0 to {high}", lambda value: 0 <= value <= high), default)


def _choice(choices: Any, default: str | None = None) -> Any:
    """Return an argument that is one of the texts of a Literal, in any case."""
    return _checked(one_of(*get_args(choices)), default, converter=_lower if default else _lower_or_none)


def _lower(text: str) -> Any:
    return text.lower() if isinstance(text, str) else text


def _lower_or_none(text: str | None) -> Any:
    return None if text is None else _lower(text)


def _text_of_path(path: str | PathLike[str] | None) -> Any:
    return fspath(path) if isinstance(path, PathLike) else path


@frozen(kw_only=True)
class ReasoningArgs:
    """The thinking part of outputs, and the tokens around it."""

    wire_closed: ClassVar[bool] = True

    start_thinking_token_id: U32 = _up_to(U32_MAX, NOTHING)
    """First token of the thinking part."""
    end_thinking_token_id: U32 = _up_to(U32_MAX, NOTHING)
    """Last token of the thinking part."""
    thinking_ratio: float = _up_to(1, NOTHING)
    """Share of the output that is thinking, from 0 to 1."""


@frozen(kw_only=True)
class SglangArgs:
    """Arguments of SGLang only; None stands for the default named below each."""

    wire_closed: ClassVar[bool] = True

    schedule_policy: SchedulePolicy | None = _choice(SchedulePolicy)
    """Order of admission: fifo, fcfs, or lpm, which admits the longest cached prefix first. Default fifo."""
    page_size: int | None = _least(1)
    """Tokens of a page, equal to the block size. Default 1."""
    max_prefill_tokens: int | None = _least(1)
    """Most prompt tokens of a step. Default 16,384."""
    chunked_prefill_size: int | None = _least(1)
    """Tokens of a chunk of a long prompt, a multiple of the block size. Default 8,192."""
    clip_max_new_tokens: int | None = _least(1)
    """Most output tokens of a sequence that admission reserves room for. Default 4,096."""
    schedule_conservativeness: float | None = _up_to(1)
    """Factor on the share of running outputs that admission keeps free, from 0 to 1. Default 1.0."""


@frozen(kw_only=True)
class TrtllmArgs:
    """Arguments of TensorRT-LLM only."""

    wire_closed: ClassVar[bool] = True

    capacity_scheduler_policy: CapacityPolicy | None = _choice(CapacityPolicy)


@frozen(kw_only=True)
class MockEngineArgs:
    """The arguments of a simulated engine, under the names of the original's JSON.

    Names of choices may be in any case. Raises InvalidArgument, naming all arguments out of their ranges, or else all
    that do not go together.

    Source: dynamo lib/mocker/src/common/protocols.rs, MockEngineArgs. Other than there, a `speedup_ratio` of 0 means
    that nothing takes time.
    """

    wire_closed: ClassVar[bool] = True

    engine_type: EngineType = _choice(EngineType, "vllm")
    """The scheduler to simulate: vllm, sglang or trtllm."""
    num_gpu_blocks: int = _least(1, 16384)
    """Blocks of each rank's KV cache."""
    block_size: int = _least(0, 0)
    """Tokens of a block; 0 selects the engine type's own: 64 vllm, 32 trtllm, the page size for sglang."""
    max_model_len: int | None = _least(1)
    """Most tokens of a prompt and its output, for vllm only. None: no limit."""
    max_num_seqs: int | None = _least(1, 256)
    """Most running sequences of a rank. None: no limit."""
    max_num_batched_tokens: int | None = _least(1, 8192)
    """Most tokens of a step. None: no limit."""
    enable_prefix_caching: bool = True
    """Whether prompts reuse cached blocks; KV events need it."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps; always on for sglang."""
    preemption_mode: PreemptionMode = _choice(PreemptionMode, "lifo")
    """Which sequence vllm preempts: the last admitted (lifo) or the first (fifo)."""
    speedup_ratio: float = _least(0, 1.0)
    """Divisor of all simulated times; with 0 nothing takes time."""
    decode_speedup_ratio: float = _least(0, 1.0)
    """Further divisor of decode times; with 0 they take no time."""
    dp_size: int = _least(1, 1)
    """Data-parallel ranks, each with a cache and a batch of its own."""
    startup_time: float | None = _least(0)
    """Seconds that the start takes. None: no time."""
    worker_type: WorkerType = _choice(WorkerType, "aggregated")
    """Whether the worker serves whole requests (aggregated), only prompts (prefill), or outputs (decode)."""
    planner_profile_data: str | None = field(default=None, converter=_text_of_path, metadata=_ALWAYS)
    """Path of an NPZ file of measured times, or of its folder. None: built-in polynomials."""
    aic_backend: str | None = null()
    """This and the other `aic_` names describe an external predictor of times, which must be given to the engine."""
    aic_system: str | None = null()
    aic_backend_version: str | None = null()
    aic_tp_size: int | None = _least(1)
    aic_model_path: str | None = null()
    aic_moe_tp_size: int | None = _least(1)
    aic_moe_ep_size: int | None = _least(1)
    aic_attention_dp_size: int | None = _least(1)
    aic_gemm_dtype: str | None = null()
    aic_moe_dtype: str | None = null()
    aic_fmha_dtype: str | None = null()
    aic_kv_cache_dtype: str | None = null()
    aic_comm_dtype: str | None = null()
    aic_nextn: int | None = null()
    """Draft tokens of speculative decoding, 1 to 5. None: no drafts."""
    aic_nextn_accept_rates: str | None = null()
    """Chance of each draft given the ones before it, separated by commas. None: 0.85,0.3."""
    aic_mtp_seed: int = _least(0, 42)
    """Seed of the accepted drafts."""
    enable_local_indexer: bool = False
    """Without an effect here: the worker's own configuration decides it. Always off on a decode worker."""
    bootstrap_port: int | None = null()
    """Port in the address of a prefill worker at which decode workers fetch its blocks. None: no address."""
    handoff_session_timeout_ms: int = _least(1, 300_000)
    """Milliseconds that a whole KV transfer may take."""
    kv_bytes_per_token: int | None = _least(1)
    """Bytes of a token's keys and values, for the time of transfers. None: they take no time."""
    kv_transfer_bandwidth: float | None = _least(0)
    """Decimal gigabytes a second; with 0 or None a transfer takes no time."""
    kv_transfer_timing_mode: TransferTimingMode = _choice(TransferTimingMode, "full_prompt")
    """Tokens of a transfer: the whole prompt, or those missing at the decode worker."""
    reasoning: ReasoningArgs | None = null()
    """Thinking tokens in the outputs. None: none."""
    response_replay_trace_path: str | None = field(default=None, converter=_text_of_path, metadata=_ALWAYS)
    """Path of a JSON lines file of recorded answers: see `RecordedOutputs`. None: outputs are made up."""
    zmq_kv_events_port: int | None = null()
    """Port of rank 0 for KV events over ZeroMQ; the next ranks have the next ports. None: no events over ZeroMQ."""
    zmq_replay_port: int | None = null()
    """Port of rank 0 for replays of KV events, likewise. None: no replays."""
    router_queue_policy: QueuePolicy | None = _choice(QueuePolicy)
    """Without an effect here: it is for a router."""
    sglang: SglangArgs | None = null()
    trtllm: TrtllmArgs | None = null()
    watermark: float = _up_to(1, 0.01)
    """Without an effect here: the share of the cache that the classic scheduler leaves free."""

    def __attrs_post_init__(self) -> None:
        raise_problems(list(_out_of_range(self)))
        page_size = self.sglang.page_size if self.sglang is not None and self.engine_type == "sglang" else None
        # A frozen class is completed this way only.
        complete = object.__setattr__
        complete(self, "block_size", self.block_size or page_size or OWN_BLOCK_SIZE[self.engine_type])
        complete(self, "enable_local_indexer", self.enable_local_indexer and self.worker_type != "decode")
        raise_problems([*_ports(self), *_drafts(self), *_sizes(self)])

    @classmethod
    def from_plain(cls, value: Any) -> Self:
        """Return the arguments in a dict of plain values. Raises InvalidArgument for unknown names and wrong types."""
        if not isinstance(value, dict):
            raise InvalidArgument("engine arguments are an object")
        plain = _with_lower_choices(value)
        plain.pop(_IGNORED, None)
        _read_roles(plain)
        return wire.from_plain(plain, cls)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the arguments in one JSON document. Raises as `from_plain`, and for text that is not exactly one."""
        return cls.from_plain(wire.from_json(text, dict))

    def to_plain(self) -> dict[str, Any]:
        """Return all arguments as plain values, absent ones as None."""
        plain: dict[str, Any] = wire.to_plain(self)
        return plain

    @property
    def publishes_kv_events(self) -> bool:
        """Whether the engine has KV events: not without a prefix cache, and not on a decode worker."""
        return self.enable_prefix_caching and self.worker_type != "decode"

    @property
    def transfer_capacity(self) -> int:
        """Most KV transfers at once."""
        return max(1, self.num_gpu_blocks if self.max_num_seqs is None else self.max_num_seqs)


def _out_of_range(record: Any, place: str = "") -> Iterator[Problem]:
    for each in fields(type(record)):
        value, check = getattr(record, each.name), each.metadata.get(_CHECK)
        if has(type(value)):
            yield from _out_of_range(value, f"{place}{each.name}.")
        elif check is not None and (value is not None or isinstance(each.default, str)) and not check.holds(value):
            yield place + each.name, f"must be {check.text}, got {value!r}"


def _ports(args: MockEngineArgs) -> Iterator[Problem]:
    events, replay, last_rank = args.zmq_kv_events_port, args.zmq_replay_port, args.dp_size - 1
    ports = (("bootstrap_port", 0), ("zmq_kv_events_port", last_rank), ("zmq_replay_port", last_rank))
    for name, last in ports:
        port = getattr(args, name)
        if port is not None and not 1 <= port <= _PORT_MAX - last:
            yield name, f"must be a port, also for the last rank, got {port}"
    if replay is None:
        return
    if events is None:
        yield "zmq_replay_port", "needs zmq_kv_events_port: there is nothing to repeat without events"
    elif abs(events - replay) < args.dp_size:
        yield "zmq_replay_port", f"meets the ports of the ranks' events, which begin at {events}"


def _drafts(args: MockEngineArgs) -> Iterator[Problem]:
    if args.aic_nextn is None:
        if args.aic_nextn_accept_rates is not None:
            yield "aic_nextn_accept_rates", "needs aic_nextn"
        return
    try:
        accept_rates(args.aic_nextn, args.aic_nextn_accept_rates)
    except InvalidArgument as error:
        yield error.field or "aic_nextn", str(error)
    if args.decode_speedup_ratio != 1.0:
        yield "decode_speedup_ratio", "must be 1.0 with aic_nextn, which speeds up decode itself"


def _sizes(args: MockEngineArgs) -> Iterator[Problem]:
    size, sglang = args.block_size, args.sglang
    if args.max_model_len is not None and args.engine_type != "vllm":
        yield "max_model_len", f"{args.engine_type} has no such limit, only vllm"
    if args.engine_type != "sglang" and size < 2:
        yield "block_size", f"must be at least 2 for {args.engine_type}, got {size}"
    if args.engine_type != "sglang" or sglang is None:
        return
    if sglang.page_size is not None and sglang.page_size != size:
        yield "block_size", f"must be sglang.page_size, {sglang.page_size}, got {size}"
    if sglang.chunked_prefill_size is not None and sglang.chunked_prefill_size % size:
        yield "sglang.chunked_prefill_size", f"must be a multiple of the block size, {size}"
    if sglang.max_prefill_tokens is not None and sglang.max_prefill_tokens < size:
        yield "sglang.max_prefill_tokens", f"must be at least the block size, {size}"


_CHOICES = {
    each.name
    for record in (MockEngineArgs, SglangArgs, TrtllmArgs)
    for each in fields(record)
    if each.converter in (_lower, _lower_or_none)
}


def _with_lower_choices(plain: dict[str, Any]) -> dict[str, Any]:
    """Return plain arguments with their choices in lower case, as the codec expects them."""
    return {
        name: _with_lower_choices(item) if isinstance(item, dict) else _lower(item) if name in _CHOICES else item
        for name, item in plain.items()
    }


def _read_roles(plain: dict[str, Any]) -> None:
    """Replace the flags of older files by the worker type that they mean."""
    flags = {name: plain.pop(name) for name in _ROLES if name in plain}
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise InvalidArgument("expected true or false", field=name)
    roles = [_ROLES[name] for name, flag in flags.items() if flag]
    if len(roles) > 1:
        raise InvalidArgument("a worker is for prefill or for decode, not for both", field="is_prefill")
    if roles and plain.setdefault("worker_type", roles[0]) != roles[0]:
        raise InvalidArgument(f"contradicts worker_type {plain['worker_type']!r}", field=f"is_{roles[0]}")
