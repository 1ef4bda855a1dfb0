"""LLMEngine: the interface to implement to serve a model; `start`, `generate` and `cleanup` are required.

    construct ──► setup_peers ──► start ──► kv_event_sources, setup_metrics ──► generate, ... ──► drain ──► cleanup
                                      └──── background, beside all that ───────    └─ abort, when it is stopped ─┘

Host an engine with a `Worker`, or alone with `as_engine`; check it with `run_conformance`.

Source: dynamo lib/backend-common/src/engine.rs, LLMEngine, EngineConfig and GenerateContext.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias

from attrs import define, field, fields

from pipeline import RUNNING, AnyContext, Context, Gate, InvalidArgument, Take
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

from .peers import Peers
from .publishing import MetricsBindings, MetricsContext, PushSource


class FirstToken:
    """Fires once: the first token has come, or the KV transfer that a decode worker waits for is over."""

    __slots__ = ("_due", "is_fired")

    def __init__(self) -> None:
        self.is_fired = False
        self._due: list[Callable[[], object]] = []

    def fire(self) -> None:
        """Call the callbacks; does nothing the second time."""
        if not self.is_fired:
            self.is_fired = True
            due, self._due = self._due, []
            for callback in due:
                callback()

    def on_fire(self, callback: Callable[[], object]) -> None:
        """Call the callback when it fires; at once if it has."""
        if self.is_fired:
            callback()
        else:
            self._due.append(callback)


_SHUT = Gate()
_SHUT.is_open = False


def _refuse(*parts: Any) -> bool:
    return False


class GenerateContext(Context[None]):
    """The context of a request as its engine receives it: id, stop and kill, and metadata; without the payload.

    Between two items an engine checks `is_stopped`, which is True once stopped or killed, and then ends with a
    cancelled chunk. `first_token` is set on decode workers only: an abort before the KV transfer is over may corrupt
    what the prefill worker still sends, so it waits for the first token.
    """

    __slots__ = ("_first_token", "_gate", "_take", "inner", "is_steady", "take_error")

    def __init__(
        self, inner: AnyContext, first_token: FirstToken | None = None, *, metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(None, id=inner.id, metadata=metadata, control=inner.control)
        self.inner = inner
        """The context itself, for tasks that outlive `generate`."""
        self._first_token = first_token
        self._take, self._gate = _refuse, _SHUT
        self.is_steady = False
        """Set by the adapter: ordinary chunks of the only choice need no check any more."""
        self.take_error: Exception | None = None
        """What a stage raised for a token that it took, which ends the stream at the next chunk."""

    def __repr__(self) -> str:
        return f"GenerateContext(id={self.id!r}, state={self.control.state.name.lower()})"

    def notify_first_token(self) -> None:
        """Fire the first token although no item with one was yielded, as when the KV transfer is over.

        The first item with a token does it too. Idempotent; does nothing on workers that do not wait for it.
        """
        if self._first_token is not None:
            self._first_token.fire()

    def offer_token(self, token_id: int) -> bool:
        """Have a chunk of one token, and nothing else, taken at once. Return whether it was; else it is to be yielded.

        For the scheduler of an engine, which wakes nobody then: call it in the loop of the request, only while the
        generator waits and has nothing to yield. What was taken counts as yielded. It raises nothing.
        """
        if not (self._gate.is_open and self.is_steady and self.control.state is RUNNING):
            return False
        try:
            return self._take(token_id, None)
        except Exception as error:
            self.is_steady, self.take_error = False, error
            return False

    def feed(self, take: Take, gate: Gate) -> None:
        """Have offered tokens taken while the gate is open: see `ResponseStream.feed`. Called by the adapter."""
        self._take, self._gate = take, gate


Chunks: TypeAlias = AsyncIterator[LLMEngineOutput]


@define(slots=True, kw_only=True)
class EngineConfig:
    """The facts that a started engine advertises; None means not advertised, never zero."""

    model: str
    """Name of the model."""
    served_model_name: str | None = None
    """Name for clients. Default: that of the model."""
    model_aliases: list[str] = field(factory=list)
    """Further names for clients."""
    context_length: int | None = None
    """Most tokens of a prompt and its answer."""
    kv_cache_block_size: int | None = None
    """Tokens of a KV block; KV events need it."""
    total_kv_blocks: int | None = None
    """Blocks of the KV cache of one rank."""
    max_num_seqs: int | None = None
    """Most requests that run at the same time."""
    max_num_batched_tokens: int | None = None
    """Most tokens of a forward pass."""
    data_parallel_size: int | None = None
    """Number of data-parallel ranks."""
    data_parallel_start_rank: int | None = None
    """Number of the first rank."""
    bootstrap_host: str | None = None
    """Host at which decode workers reach this prefill worker, for engines with such a handshake; needs the port."""
    bootstrap_port: int | None = None
    """Port of that handshake; ignored without the host."""
    stops_prefills: bool = False
    """True promises that a stop ends a prefill here in order: it leaves the engine's queue, or its computation is
    abandoned, and its blocks are freed. A prefill router then forwards the stop of a client that has left to this
    worker, as long as the prefill has yielded no item and no decode worker was given its blocks; without the promise
    it does so only as long as the prefill was not sent."""
    publishes_kv_events: bool | None = None
    """False: it caches prefixes of prompts and publishes no KV events, so that a KV router predicts from what it sends
    there what this worker has cached. None: what has no KV event source caches nothing."""
    runtime_data: dict[str, Any] = field(factory=dict)
    """Further facts for the worker's card, by name."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the config in a mapping, flat or partly under `llm`. Raises InvalidArgument for an unknown name."""
        nested = {} if plain.get("llm") is None else plain["llm"]
        if not isinstance(nested, Mapping):
            raise InvalidArgument(f"expected an object, got {type(nested).__name__}", field="llm")
        flat = {name: value for name, value in plain.items() if name != "llm"} | dict(nested)
        known = {attribute.name for attribute in fields(cls)}
        if unknown := sorted(flat.keys() - known):
            raise InvalidArgument(f"no such setting; there are: {', '.join(sorted(known))}", field=unknown[0])
        if "model" not in flat:
            raise InvalidArgument("is required", field="model")
        return cls(**flat)


class LLMEngine(ABC):
    """An engine that answers tokens with tokens. The contract, checked by `run_conformance` and held by the adapter:

    L1. `generate` yields chunks of tokens and then exactly one terminal chunk, one with a finish reason; nothing
        follows it. With `n` choices each has its terminal chunk, distinguished by `index`, from 0.
    L2. Between two chunks, and after every wait, it checks `context.is_stopped`; once that is set it soon ends with a
        chunk of finish reason cancelled, and not otherwise. Where it overrides `abort`, it also stops working for the
        request elsewhere.
    L3. Whatever a request holds, its tasks and threads included, is released when its generator is closed, by
        `finally`: no `abort` comes then.
    L4. The usage of the last chunk, if it has one, counts as completion tokens exactly the tokens of all chunks, of all
        choices. Every usage counts as prompt tokens those of the request, and their sum as total.
    L5. A request that cannot be served, or not with its limits and choices, raises InvalidArgument, before or instead
        of the first chunk.
    L6. Requests run at the same time and do not affect each other. One may wait for room, but not for the reader of
        another, unless the config names `max_num_seqs=1`.
    L7. `cleanup` may come twice, and after a `start` that failed. It leaves neither tasks nor threads.
    L8. Each token is yielded once, and to its own request.
    L9. A choice has at most `max_tokens` tokens and then finish reason length. It does not end by itself before
        `min_tokens` nor, with `ignore_eos`, before `max_tokens`; a limit of the engine's own still ends it, with finish
        reason length. There are `n` choices, each with these limits. No later stage corrects any of it.
    L10. The request is read and never changed, and neither is a chunk that was yielded.
    L11. It does not block the loop: what takes more than some milliseconds is awaited, or runs in a thread.
    L12. Behind a `yield` the next step may come much later, or never, and in another task: no lock, cancel scope,
        deadline or task group is entered around one.

    An engine that raises loses this request only, whatever it raises. Its error keeps its class; a foreign one becomes
    a `BackendError`, as does a BaseException such as that of `sys.exit()` or of a Rust panic.
    """

    ends_on_kill: ClassVar[bool] = False
    """True promises that a generator ends by itself, at once, after a kill, whatever it waits for.

    That saves the adapter half a microsecond a chunk on asyncio, four on trio. Without the promise the adapter cancels
    the generator's wait, unless a cancel scope of its own shields it.
    """

    is_closing: bool = False
    """Set to True by a `cleanup` that ends the answers under way as cancelled.

    The adapter then yields these chunks, although the requests were not stopped.
    """

    shown_texts: ClassVar[Sequence[str]] = ()
    """Names of the parameters whose texts are never secret, so that reports of replays show them."""

    @abstractmethod
    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model; once it returns, `generate` is called for many requests at a time. May take minutes.

        Called once, before anything else but `setup_peers`. `worker_id` is unique among all live workers, and otherwise
        arbitrary. If it raises, `cleanup` follows.
        """

    async def setup_peers(self, peers: Peers) -> None:  # noqa: B027  (optional)
        """Keep the access to the engines of other workers, for hand-overs between them.

        Called once, before `start`, by hosts with a request plane; `as_engine` has none. What it raises counts as a
        failed start.
        """

    async def background(self) -> None:  # noqa: B027  (optional)
        """Run work beside the requests, such as a scheduler's loop; on asyncio or trio, whichever runs.

        The host runs it in a task of its own, from after `start` until after `cleanup`, and cancels it then. It may
        return early. What it raises ends the engine: the host shuts it down.
        """

    @abstractmethod
    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks | Awaitable[Chunks]:
        """Answer one request, as an async generator or as a coroutine that returns one. See the contract.

        Acquire the resources of the request in the generator's body: a generator that is never read is never begun.
        """

    async def abort(self, context: GenerateContext) -> None:  # noqa: B027  (optional)
        """Called at most once for a request that was stopped or killed, while its generator may still run.

        It notifies a scheduler elsewhere; what the request holds here is released in its generator. On a decode worker
        it is called once the first token has come. What it raises is logged.
        """

    async def drain(self) -> None:  # noqa: B027  (optional)
        """End background transfers, such as blocks that a decode worker still fetches.

        Called once, after the last request and before `cleanup`. What it raises is logged.
        """

    @abstractmethod
    async def cleanup(self) -> None:
        """Release everything, also after a failed `start`. Called once if `start` was; must allow a second call."""

    async def kv_event_sources(self) -> Sequence[PushSource]:
        """Return the sources of KV events, one for each rank, the same at each call. Called after `start`."""
        return ()

    async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
        """Set up metrics; return the ranks of which it will publish snapshots, the same at each call."""
        return MetricsBindings()

    async def health_check_payload(self) -> Mapping[str, Any] | None:
        """Return a minimal request, as plain values, that shows that the engine works; None: it is not probed."""
        return None
