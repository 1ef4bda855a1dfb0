"""LLMEngine: what somebody writes to serve a model; `start`, `generate` and `cleanup` are required.

    construct ──► start ──► kv_event_sources, setup_metrics ──► generate, generate, ... ──► drain ──► cleanup
                      └──── background, beside all that ───────    └─ abort, when a request is stopped ────┘

Host one with a `Worker`, or alone with `as_engine`; prove one with `run_conformance`.

Source: dynamo lib/backend-common/src/engine.rs, LLMEngine and EngineConfig.

GenerateContext: what an engine sees of one request's life, and the signal that its first token is there.

Source: dynamo lib/backend-common/src/engine.rs, GenerateContext.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias

from attrs import define, field, fields

from pipeline import AnyContext, Control, InvalidArgument
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

from .kv_events import KvEventSource
from .metrics import MetricsBindings, MetricsContext


class FirstToken:
    """Fires once: the first token was seen, or what a decode worker waited for has arrived."""

    __slots__ = ("_due", "is_fired")

    def __init__(self) -> None:
        self.is_fired = False
        self._due: list[Callable[[], object]] = []

    def fire(self) -> None:
        """Calls back whoever waits; does nothing the second time."""
        if not self.is_fired:
            self.is_fired = True
            due, self._due = self._due, []
            for callback in due:
                callback()

    def on_fire(self, callback: Callable[[], object]) -> None:
        """Calls back when it fires; at once if it has."""
        if self.is_fired:
            callback()
        else:
            self._due.append(callback)


class GenerateContext:
    """The request's id, its stop and kill, and its metadata.

    `first_token` is there on decode workers only: an abort before the KV transfer is over may corrupt what the prefill
    worker still sends, so it waits for the first token.
    """

    __slots__ = ("_first_token", "control", "id", "inner", "metadata")

    def __init__(
        self,
        inner: AnyContext,
        first_token: FirstToken | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.inner = inner
        """The context itself, for tasks that outlive `generate`."""
        self.id: str = inner.id
        self.control: Control = inner.control
        self.metadata: Mapping[str, str] = {} if metadata is None else metadata
        self._first_token = first_token

    def __repr__(self) -> str:
        return f"GenerateContext(id={self.id!r}, state={self.control.state.name.lower()})"

    @property
    def is_stopped(self) -> bool:
        """True once stopped, and also once killed: look between two items, and end with a cancelled one."""
        return self.control.is_stopped

    @property
    def is_killed(self) -> bool:
        return self.control.is_killed

    def stopped(self) -> Coroutine[Any, Any, None]:
        """Await stop or kill; returns at once if that has happened already."""
        return self.control.stopped()

    def killed(self) -> Coroutine[Any, Any, None]:
        """Await kill; a plain stop does not wake it."""
        return self.control.killed()

    def stop_generating(self) -> None:
        """Asks for an early, orderly end of this request."""
        self.control.stop()

    def kill(self) -> None:
        """Ends this request at once."""
        self.control.kill()

    def notify_first_token(self) -> None:
        """Says that the first token is due although no item with one was yielded, as when the transfer is over.

        The first item with a token does it too. Idempotent; does nothing where nobody waits for it.
        """
        if self._first_token is not None:
            self._first_token.fire()


Chunks: TypeAlias = AsyncIterator[LLMEngineOutput]


@define(slots=True, kw_only=True)
class EngineConfig:
    """What a started engine says of itself; None means not advertised, never zero.

    Lengths in tokens. `bootstrap_host` and `bootstrap_port` are where decode workers meet this prefill worker, for
    engines with such a handshake; one without the other is ignored.
    """

    model: str
    served_model_name: str | None = None
    model_aliases: list[str] = field(factory=list)
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int | None = None
    data_parallel_start_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    stops_prefills: bool = False
    """True promises that a stop ends a prefill here in order: it leaves the engine's queue, or its computation is given
    up, and its blocks are freed. A prefill router then passes the stop of a client that has left on to this worker, as
    long as the prefill has given no item and no decode worker was asked for its blocks; without the promise it does so
    only as long as the prefill was not sent."""
    runtime_data: dict[str, Any] = field(factory=dict)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """From a mapping, flat or with a part of it nested under `llm`. Raises InvalidArgument for an unknown name."""
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
        follows it. With `n` choices each has its terminal chunk, told apart by `index`, from 0.
    L2. Between two chunks, and after every wait, it looks at `context.is_stopped`; once that is set it soon ends with a
        chunk of finish reason cancelled, and not otherwise. Where it overrides `abort`, it also stops working for the
        request elsewhere.
    L3. Whatever a request holds, its tasks and threads included, is released when its generator is closed, by
        `finally`: no `abort` comes then.
    L4. The usage of the last chunk, if it has one, counts as completion tokens exactly the tokens of all chunks, of all
        choices. Every usage counts as prompt tokens those of the request, and their sum as total.
    L5. A request that cannot be served, or not with the limits and choices it asks for, raises InvalidArgument, before
        or instead of the first chunk.
    L6. Requests run at the same time and do not affect each other. One may wait for room, but not for the reader of
        another, unless the config names `max_num_seqs=1`.
    L7. `cleanup` may come twice, and after a `start` that failed. It leaves neither tasks nor threads.
    L8. Each token is yielded once, and to its own request.
    L9. A choice has at most `max_tokens` tokens and then finish reason length. It does not end by itself before
        `min_tokens` nor, with `ignore_eos`, before `max_tokens`; a limit of the engine's own still ends it, with finish
        reason length. There are `n` choices, each with these limits. Nothing behind the engine makes up for any of it.
    L10. The request is read and never changed, and neither is a chunk that was yielded.
    L11. It does not block the loop: what takes more than some milliseconds is awaited, or runs in a thread.
    L12. Behind a `yield` the next step may come much later, or never, and in another task: no lock, cancel scope,
        deadline or task group is entered around one.

    An engine that raises loses this request only, whatever it raises. Its error keeps its class; a foreign one becomes
    a `BackendError`, and so does what is no Exception, as that of `sys.exit()` or a Rust panic.
    """

    ends_on_kill: ClassVar[bool] = False
    """True promises that a generator ends by itself, at once, after a kill, whatever it waits for.

    Nobody then needs to race its chunks against the kill: half a microsecond a chunk on asyncio, four on trio. Without
    the promise what the generator waits for is cancelled, unless a cancel scope of its own shields it.
    """

    is_closing: bool = False
    """Set to True by a `cleanup` that ends the answers under way as cancelled.

    The adapter then hands these chunks on, although the requests were not stopped.
    """

    shown_texts: ClassVar[Sequence[str]] = ()
    """Names of the parameters whose texts are never secret, so that the reports of replays show them."""

    @abstractmethod
    async def start(self, worker_id: int) -> EngineConfig:
        """Loads the model; when it returns `generate` is served, many requests at a time. May take minutes.

        Called once, before anything else. `worker_id` is unique among all live workers and means nothing. If it raises,
        `cleanup` follows.
        """

    async def background(self) -> None:  # noqa: B027  (optional)
        """What has to run beside the requests, such as a scheduler's loop, on whatever loop there is.

        The host runs it in a task of its own, from after `start` until after `cleanup`, and cancels it then. It may
        return early. What it raises ends the engine: the host gives it up.
        """

    @abstractmethod
    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks | Awaitable[Chunks]:
        """Answers one request: an async generator, or a coroutine that returns one. See the contract.

        Whatever the request holds is taken in the generator's body: one that is never read is never begun.
        """

    async def abort(self, context: GenerateContext) -> None:  # noqa: B027  (optional)
        """Called at most once for a request that was stopped or killed, while its generator may still run.

        For telling a scheduler elsewhere; what the request holds here is released in its generator. On a decode worker
        it waits for the first token. What it raises is logged.
        """

    async def drain(self) -> None:  # noqa: B027  (optional)
        """Ends transfers in the background, such as blocks that a decode worker still pulls.

        Called once, when no new request comes any more, before `cleanup`. What it raises is logged.
        """

    @abstractmethod
    async def cleanup(self) -> None:
        """Releases everything, also what a failed `start` left. Called once if `start` was; must bear a second call."""

    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        """Where its KV events come from, one source for each rank, the same at each call. Asked after `start`."""
        return ()

    async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
        """Attaches its metrics and names the ranks it will publish snapshots of, the same at each call."""
        return MetricsBindings()

    async def health_check_payload(self) -> Mapping[str, Any] | None:
        """A minimal request, as plain values, that shows that the engine works; None: it is not probed."""
        return None
