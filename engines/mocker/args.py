"""MockEngineArgs: everything a simulated engine is told, checked and completed."""

# The annotations are values here, not texts: programs read them to convert what was given on a command line.
from os import PathLike, fspath
from typing import Any, ClassVar, Literal, Self

from attrs import field, frozen

from pipeline.protocols.wire import U32, null

from .args_checks import check, resolved_block_size
from .args_json import ALWAYS, from_json, from_plain, to_plain

EngineType = Literal["vllm", "sglang", "trtllm"]
WorkerType = Literal["aggregated", "prefill", "decode"]
PreemptionMode = Literal["lifo", "fifo"]
TransferTimingMode = Literal["full_prompt", "destination_missing"]
QueuePolicy = Literal["fcfs", "wspt", "lcfs"]
SchedulePolicy = Literal["fifo", "fcfs", "lpm"]


def _lower(text: str) -> Any:
    """A choice is known by its name in any case; what is no text is left to be refused."""
    return text.lower() if isinstance(text, str) else text


def _lower_or_none(text: str | None) -> Any:
    return None if text is None else _lower(text)


def _text_of_path(path: str | PathLike[str] | None) -> Any:
    return fspath(path) if isinstance(path, PathLike) else path


@frozen(kw_only=True)
class ReasoningArgs:
    """Which part of an output is thinking, and the tokens around it."""

    wire_closed: ClassVar[bool] = True

    start_thinking_token_id: U32
    end_thinking_token_id: U32
    thinking_ratio: float
    """From 0 to 1."""


@frozen(kw_only=True)
class SglangArgs:
    """What only SGLang has; None is the default named behind."""

    wire_closed: ClassVar[bool] = True

    schedule_policy: SchedulePolicy | None = field(default=None, converter=_lower_or_none, metadata=ALWAYS)
    """fifo"""
    page_size: int | None = null()
    """1"""
    max_prefill_tokens: int | None = null()
    """16,384"""
    chunked_prefill_size: int | None = null()
    """8,192; a multiple of the block size"""
    clip_max_new_tokens: int | None = null()
    """4,096"""
    schedule_conservativeness: float | None = null()
    """1.0; from 0 to 1"""


@frozen(kw_only=True)
class TrtllmArgs:
    """What only TensorRT-LLM has."""

    wire_closed: ClassVar[bool] = True

    capacity_scheduler_policy: Literal["guaranteed_no_evict"] | None = field(
        default=None, converter=_lower_or_none, metadata=ALWAYS
    )


@frozen(kw_only=True)
class MockEngineArgs:
    """The arguments of a simulated engine, under the names of the original's JSON.

    Names of choices may be in any case. Raises InvalidArgument, naming the argument, for values that make no sense
    alone or together.

    Source: dynamo lib/mocker/src/common/protocols.rs, MockEngineArgs. Other than there, a `speedup_ratio` of 0 means
    that nothing takes time.
    """

    wire_closed: ClassVar[bool] = True

    engine_type: EngineType = field(default="vllm", converter=_lower)
    num_gpu_blocks: int = 16384
    block_size: int = 0
    """Tokens a block; 0 takes the engine's own: 64 vllm, 32 trtllm, sglang its page size."""
    max_model_len: int | None = null()
    """Most tokens of a prompt and its output; vllm only."""
    max_num_seqs: int | None = 256
    """None: any number."""
    max_num_batched_tokens: int | None = 8192
    """None: any number."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    preemption_mode: PreemptionMode = field(default="lifo", converter=_lower)
    speedup_ratio: float = 1.0
    """Times are divided by it; 0: nothing takes time."""
    decode_speedup_ratio: float = 1.0
    """The same for decode, on top."""
    dp_size: int = 1
    startup_time: float | None = null()
    """Seconds."""
    worker_type: WorkerType = field(default="aggregated", converter=_lower)
    planner_profile_data: str | None = field(default=None, converter=_text_of_path, metadata=ALWAYS)
    """Path of an NPZ file of measured times, or of its folder."""
    aic_backend: str | None = null()
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
    """Draft tokens of speculative decoding, 1 to 5."""
    aic_nextn_accept_rates: str | None = null()
    """Chance of each draft, given the ones before it, separated by commas."""
    aic_mtp_seed: int = 42
    enable_local_indexer: bool = False
    """Always off on a decode worker."""
    bootstrap_port: int | None = null()
    handoff_session_timeout_ms: int = 300_000
    kv_bytes_per_token: int | None = null()
    kv_transfer_bandwidth: float | None = null()
    """GB/s; 0: a transfer takes no time."""
    kv_transfer_timing_mode: TransferTimingMode = field(default="full_prompt", converter=_lower)
    reasoning: ReasoningArgs | None = null()
    response_replay_trace_path: str | None = field(default=None, converter=_text_of_path, metadata=ALWAYS)
    """Path of a JSON lines file of answers that are known: see `RecordedOutputs`."""
    zmq_kv_events_port: int | None = null()
    """Of rank 0; the next ranks have the next ports."""
    zmq_replay_port: int | None = null()
    router_queue_policy: QueuePolicy | None = field(default=None, converter=_lower_or_none, metadata=ALWAYS)
    sglang: SglangArgs | None = null()
    trtllm: TrtllmArgs | None = null()
    watermark: float = 0.01
    """Part of the cache the classic scheduler leaves free; the scheduler of today has none."""

    def __attrs_post_init__(self) -> None:
        check(self)
        # A frozen class is completed this way only.
        object.__setattr__(self, "block_size", resolved_block_size(self))
        object.__setattr__(self, "enable_local_indexer", self.enable_local_indexer and self.worker_type != "decode")

    @classmethod
    def from_plain(cls, value: Any) -> Self:
        """The arguments in a dict of plain values. Raises InvalidArgument for unknown names and wrong types."""
        return from_plain(value, cls)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The arguments in one JSON document. Raises as `from_plain`, and for text that is none or goes on."""
        return from_json(text, cls)

    def to_plain(self) -> dict[str, Any]:
        """The arguments as plain values, each of them, absent ones as None."""
        return to_plain(self)

    @property
    def publishes_kv_events(self) -> bool:
        """Whether anybody may learn what is cached here: not without a prefix cache, and not of a decode worker."""
        return self.enable_prefix_caching and self.worker_type != "decode"

    @property
    def handoff_capacity(self) -> int:
        """Most requests between a prefill and a decode worker at once."""
        return max(1, self.num_gpu_blocks if self.max_num_seqs is None else self.max_num_seqs)
