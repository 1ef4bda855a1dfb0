"""MockEngineArgs: the arguments of a simulated engine, with their ranges and defaults.

Their checks, alone and together.

Their form in JSON: strict, without unknown names, and with the older names of earlier files.
"""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from attrs import field, frozen

from pipeline import InvalidArgument, wire
from pipeline.protocols.field_rules import U32, WIRE_KEY, WireRule, null

from .scheduling import accept_rates

OWN_BLOCK_SIZE = {"vllm": 64, "trtllm": 32, "sglang": 1}
"""Default block size in tokens, by engine type."""

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
"""Exclusive bound of all numbers, so that each fits a float."""


def check(args: MockEngineArgs) -> None:
    """Raise InvalidArgument, naming the argument, for the first invalid value."""
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
    """Return the given block size, else the engine type's own."""
    page_size = args.sglang.page_size if args.sglang is not None and args.engine_type == "sglang" else None
    return args.block_size or page_size or OWN_BLOCK_SIZE[args.engine_type]


def _check_choices(args: MockEngineArgs) -> None:

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


T = TypeVar("T")

ALWAYS = {WIRE_KEY: WireRule("always")}
"""Metadata of a field that is written to JSON also while it is None."""

_CHOICES = ("engine_type", "worker_type", "preemption_mode", "kv_transfer_timing_mode", "router_queue_policy")
_NESTED_CHOICES = {"sglang": "schedule_policy", "trtllm": "capacity_scheduler_policy"}
_IGNORED = "has_perf_model"
_ROLES = {"is_prefill": "prefill", "is_decode": "decode"}
"""Flags of older files, and the worker type that each one means."""


def from_plain(value: Any, cls: type[T]) -> T:
    """Return the arguments in a dict. Raises InvalidArgument, naming the place, for unknown names and wrong types."""
    if not isinstance(value, dict):
        raise InvalidArgument("engine arguments are an object")
    plain = {name: item for name, item in value.items() if name != _IGNORED}
    for name in _CHOICES:
        _lower_case_keys(plain, name)
    for place, name in _NESTED_CHOICES.items():
        if isinstance(plain.get(place), dict):
            plain[place] = dict(plain[place])
            _lower_case_keys(plain[place], name)
    _read_roles(plain)
    return wire.from_plain(plain, cls)


def from_json(text: str | bytes, cls: type[T]) -> T:
    """As `from_plain`, of one JSON document. Raises InvalidArgument also for text that is not exactly one document."""
    return from_plain(wire.from_json(text, dict), cls)


def to_plain(args: object) -> dict[str, Any]:
    """Every argument by name."""
    plain: dict[str, Any] = wire.to_plain(args)
    return plain


def _lower_case_keys(plain: dict[str, Any], name: str) -> None:
    if isinstance(plain.get(name), str):
        plain[name] = plain[name].lower()


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


EngineType = Literal["vllm", "sglang", "trtllm"]
WorkerType = Literal["aggregated", "prefill", "decode"]
PreemptionMode = Literal["lifo", "fifo"]
TransferTimingMode = Literal["full_prompt", "destination_missing"]
QueuePolicy = Literal["fcfs", "wspt", "lcfs"]
SchedulePolicy = Literal["fifo", "fcfs", "lpm"]


def _lower(text: str) -> Any:
    """Return a choice in lower case; other values are refused later."""
    return text.lower() if isinstance(text, str) else text


def _lower_or_none(text: str | None) -> Any:
    return None if text is None else _lower(text)


def _text_of_path(path: str | PathLike[str] | None) -> Any:
    return fspath(path) if isinstance(path, PathLike) else path


@frozen(kw_only=True)
class ReasoningArgs:
    """The thinking part of outputs, and the tokens around it."""

    wire_closed: ClassVar[bool] = True

    start_thinking_token_id: U32
    """First token of the thinking part."""
    end_thinking_token_id: U32
    """Last token of the thinking part."""
    thinking_ratio: float
    """Share of the output that is thinking, from 0 to 1."""


@frozen(kw_only=True)
class SglangArgs:
    """Arguments of SGLang only; None stands for the default named below each."""

    wire_closed: ClassVar[bool] = True

    schedule_policy: SchedulePolicy | None = field(default=None, converter=_lower_or_none, metadata=ALWAYS)
    """Order of admission: fifo, fcfs, or lpm, which admits the longest cached prefix first. Default fifo."""
    page_size: int | None = null()
    """Tokens of a page, equal to the block size. Default 1."""
    max_prefill_tokens: int | None = null()
    """Most prompt tokens of a step. Default 16,384."""
    chunked_prefill_size: int | None = null()
    """Tokens of a chunk of a long prompt, a multiple of the block size. Default 8,192."""
    clip_max_new_tokens: int | None = null()
    """Most output tokens of a sequence that admission reserves room for. Default 4,096."""
    schedule_conservativeness: float | None = null()
    """Factor on the share of running outputs that admission keeps free, from 0 to 1. Default 1.0."""


@frozen(kw_only=True)
class TrtllmArgs:
    """Arguments of TensorRT-LLM only."""

    wire_closed: ClassVar[bool] = True

    capacity_scheduler_policy: Literal["guaranteed_no_evict"] | None = field(
        default=None, converter=_lower_or_none, metadata=ALWAYS
    )


@frozen(kw_only=True)
class MockEngineArgs:
    """The arguments of a simulated engine, under the names of the original's JSON.

    Names of choices may be in any case. Raises InvalidArgument, naming the argument, for values that are invalid alone
    or together.

    Source: dynamo lib/mocker/src/common/protocols.rs, MockEngineArgs. Other than there, a `speedup_ratio` of 0 means
    that nothing takes time.
    """

    wire_closed: ClassVar[bool] = True

    engine_type: EngineType = field(default="vllm", converter=_lower)
    """The scheduler to simulate: vllm, sglang or trtllm."""
    num_gpu_blocks: int = 16384
    """Blocks of each rank's KV cache."""
    block_size: int = 0
    """Tokens of a block; 0 selects the engine type's own: 64 vllm, 32 trtllm, the page size for sglang."""
    max_model_len: int | None = null()
    """Most tokens of a prompt and its output, for vllm only. None: no limit."""
    max_num_seqs: int | None = 256
    """Most running sequences of a rank. None: no limit."""
    max_num_batched_tokens: int | None = 8192
    """Most tokens of a step. None: no limit."""
    enable_prefix_caching: bool = True
    """Whether prompts reuse cached blocks; KV events need it."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps; always on for sglang."""
    preemption_mode: PreemptionMode = field(default="lifo", converter=_lower)
    """Which sequence vllm preempts: the last admitted (lifo) or the first (fifo)."""
    speedup_ratio: float = 1.0
    """Divisor of all simulated times; with 0 nothing takes time."""
    decode_speedup_ratio: float = 1.0
    """Further divisor of decode times; with 0 they take no time."""
    dp_size: int = 1
    """Data-parallel ranks, each with a cache and a batch of its own."""
    startup_time: float | None = null()
    """Seconds that the start takes. None: no time."""
    worker_type: WorkerType = field(default="aggregated", converter=_lower)
    """Whether the worker serves whole requests (aggregated), only prompts (prefill), or outputs (decode)."""
    planner_profile_data: str | None = field(default=None, converter=_text_of_path, metadata=ALWAYS)
    """Path of an NPZ file of measured times, or of its folder. None: built-in polynomials."""
    aic_backend: str | None = null()
    """This and the other `aic_` names describe an external predictor of times, which must be given to the engine."""
    aic_system: str | None = null()
    aic_backend_version: str | None = null()
    aic_tp_size: int | None = null()
    aic_model_path: str | None = null()
    aic_moe_tp_size: int | None = null()
    aic_moe_ep_size: int | None = null()
    aic_attention_dp_size: int | None = null()
    aic_gemm_dtype: str | None = null()
    aic_moe_dtype: str | None = null()
    aic_fmha_dtype: str | None = null()
    aic_kv_cache_dtype: str | None = null()
    aic_comm_dtype: str | None = null()
    aic_nextn: int | None = null()
    """Draft tokens of speculative decoding, 1 to 5. None: no drafts."""
    aic_nextn_accept_rates: str | None = null()
    """Chance of each draft given the ones before it, separated by commas. None: 0.85,0.3."""
    aic_mtp_seed: int = 42
    """Seed of the accepted drafts."""
    enable_local_indexer: bool = False
    """Without an effect here: the worker's own configuration decides it. Always off on a decode worker."""
    bootstrap_port: int | None = null()
    """Port in the address of a prefill worker at which decode workers fetch its blocks. None: no address."""
    handoff_session_timeout_ms: int = 300_000
    """Milliseconds that a whole KV transfer may take."""
    kv_bytes_per_token: int | None = null()
    """Bytes of a token's keys and values, for the time of transfers. None: they take no time."""
    kv_transfer_bandwidth: float | None = null()
    """Decimal gigabytes a second; with 0 or None a transfer takes no time."""
    kv_transfer_timing_mode: TransferTimingMode = field(default="full_prompt", converter=_lower)
    """Tokens of a transfer: the whole prompt, or those missing at the decode worker."""
    reasoning: ReasoningArgs | None = null()
    """Thinking tokens in the outputs. None: none."""
    response_replay_trace_path: str | None = field(default=None, converter=_text_of_path, metadata=ALWAYS)
    """Path of a JSON lines file of recorded answers: see `RecordedOutputs`. None: outputs are made up."""
    zmq_kv_events_port: int | None = null()
    """Port of rank 0 for KV events over ZeroMQ; the next ranks have the next ports. None: no events over ZeroMQ."""
    zmq_replay_port: int | None = null()
    """Port of rank 0 for replays of KV events, likewise. None: no replays."""
    router_queue_policy: QueuePolicy | None = field(default=None, converter=_lower_or_none, metadata=ALWAYS)
    """Without an effect here: it is for a router."""
    sglang: SglangArgs | None = null()
    trtllm: TrtllmArgs | None = null()
    watermark: float = 0.01
    """Without an effect here: the share of the cache that the classic scheduler leaves free."""

    def __attrs_post_init__(self) -> None:
        check(self)
        # A frozen class is completed this way only.
        object.__setattr__(self, "block_size", resolved_block_size(self))
        object.__setattr__(self, "enable_local_indexer", self.enable_local_indexer and self.worker_type != "decode")

    @classmethod
    def from_plain(cls, value: Any) -> Self:
        """Return the arguments in a dict of plain values. Raises InvalidArgument for unknown names and wrong types."""
        return from_plain(value, cls)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the arguments in one JSON document. Raises as `from_plain`, and for text that is not exactly one."""
        return from_json(text, cls)

    def to_plain(self) -> dict[str, Any]:
        """Return all arguments as plain values, absent ones as None."""
        return to_plain(self)

    @property
    def publishes_kv_events(self) -> bool:
        """Whether the engine has KV events: not without a prefix cache, and not on a decode worker."""
        return self.enable_prefix_caching and self.worker_type != "decode"

    @property
    def transfer_capacity(self) -> int:
        """Most KV transfers at once."""
        return max(1, self.num_gpu_blocks if self.max_num_seqs is None else self.max_num_seqs)
