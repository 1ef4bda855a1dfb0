"""Handover: one prefill under way, from its dispatch to what decode gets, in a task of its own.

    RUNNING ──sent, worker recorded──► ROUTED ──first item──► STREAMING ──end──► DONE
       └───────────────┴──────────────────┴──error, time, owner gone──► FAILED

Its request is no child of the client's: a kill would cut the connection to the prefill worker in the middle of a
transfer, and its blocks would be lost for good. It ends by itself, by its time limit, or with its owner. Where the
client leaves before a transfer can have begun, it is withdrawn by a stop:

    not sent yet ─────────────────────────────────────────────────────► withdrawn
    sent, no item yet, no decode worker asked, worker stops prefills ─► withdrawn
    anything else ────────────────────────────────────────────────────► goes on

Source: dynamo lib/llm/src/kv_router/prefill_router/execution.rs, spawn_prefill_task and execute_prefill. Other than
there it has an owner and a time limit, and decode does not wait in vain for a prefill that failed.

Latch: set once, waited for by a few; costs next to nothing where nobody waits.

Prefilled: what a prefill worker's answer comes to, read from its stream.

Source: dynamo lib/llm/src/kv_router/prefill_router/execution.rs, execute_prefill. Other than there an error in a later
item counts too, prefill is complete only with an item that is no error, and events before the answer are passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, evolve, field, frozen

from pipeline import (
    Cancelled,
    Context,
    Control,
    PenstockError,
    ResponseStream,
    ResponseTimeout,
    Unavailable,
    to_error,
)
from pipeline.protocols import (
    BootstrapInfo,
    LLMEngineOutput,
    PhasePermit,
    PrefillResult,
    PreprocessedRequest,
    PromptTokensDetails,
    RequestTracker,
    TraceLink,
)
from pipeline.telemetry import Tracer, spanned, trace_link

from ..kv import ends_badly
from ..pool import Output
from .errors import NoDisaggregatedParams, PrefillError, routing_error
from .pool import PrefillPool
from .resolve import PrefillWorker, is_up_to, told_meeting


class Latch:
    """Closed until it is set. `set` may be called in a plain callback of the loop."""

    __slots__ = ("_event", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._event: anyio.Event | None = None

    def set(self) -> None:
        """Opens it, for good."""
        self.is_set = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Returns when it is set."""
        if self.is_set:
            await checkpoint()
            return
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()


_U64_MAX, _U32_MAX = 2**64 - 1, 2**32 - 1


@frozen
class Prefilled:
    """What decode gets: the engine's parameters, where prompt tokens came from, the worker's span, the worker."""

    params: Any
    details: PromptTokensDetails | None = None
    link: TraceLink | None = None
    worker: PrefillWorker | None = None

    @property
    def result(self) -> PrefillResult:
        return PrefillResult(self.params, self.details)


async def read_prefill(
    stream: ResponseStream[Output], is_first: Callable[[LLMEngineOutput | None], object]
) -> Prefilled:
    """All of the answer, to its end, so that the worker finishes in order. The caller closes the stream.

    `is_first` hears of the first item that is no error: from then on blocks may be on their way. Raises PrefillError
    where there is none, and for an error, raised or an item; NoDisaggregatedParams, after the end, where the first item
    hands nothing over.
    """
    first = await _first(stream)
    is_first(first.data)
    details = _details(first.data)
    while (item := await _next(stream)) is not None:
        _check(item)
        details = details or _details(item.data)
    return evolve(handed_over(first.data), details=details)


def handed_over(first: LLMEngineOutput | None) -> Prefilled:
    """What the first item hands over. Raises NoDisaggregatedParams if nothing that decode could use."""
    if first is None:
        raise NoDisaggregatedParams("prefill worker's output has no data field")
    params = first.disaggregated_params
    if params is None:
        raise NoDisaggregatedParams("prefill worker's output is missing disaggregated_params")
    if isinstance(params, dict) and _is_context_only(params) and params.get("ctx_request_id") is None:
        raise NoDisaggregatedParams("prefill worker's disaggregated_params have no usable ctx_request_id")
    return Prefilled(params, link=first.worker_trace_link, worker=worker_of(params))


def worker_of(params: Any) -> PrefillWorker | None:
    """The worker the parameters name; None if they do not, or not properly."""
    named = params.get("worker_id") if isinstance(params, dict) else None
    if not isinstance(named, dict) or not is_up_to(named.get("prefill_worker_id"), _U64_MAX):
        return None
    rank = named.get("prefill_dp_rank")
    return PrefillWorker(named["prefill_worker_id"], rank if is_up_to(rank, _U32_MAX) else None)


async def _first(stream: ResponseStream[Output]) -> Output:
    while (item := await _next(stream)) is not None:
        _check(item)
        if item.data is not None or item.event is None:
            return item
    raise PrefillError("prefill worker gave no output (stream ended)")


async def _next(stream: ResponseStream[Output]) -> Output | None:
    """The next item; None at the end. What the read raises becomes a PrefillError."""
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None
    except Exception as error:
        raise PrefillError(f"prefill worker's stream broke: {error}", cause=error) from error


def _check(item: Output) -> None:
    """Raises PrefillError for an item that says the prefill failed or was given up."""
    if not ends_badly(item):
        return
    error = item.extract_error()
    reason = None if item.data is None else item.data.finish_reason
    text = f"prefill worker reported an error in output: {error or reason}"
    raise PrefillError(text, cause=error) if isinstance(error, PenstockError) else PrefillError(text)


def cached_of(data: LLMEngineOutput | None) -> int | None:
    """How many tokens of the prompt the worker had cached, where it says so."""
    details = _details(data)
    return None if details is None else details.cached_tokens


def _details(data: LLMEngineOutput | None) -> PromptTokensDetails | None:
    usage = None if data is None else data.completion_usage
    return None if usage is None else usage.prompt_tokens_details


def _is_context_only(params: dict[str, Any]) -> bool:
    """Whether decode cannot go on without the id the prefill was computed under."""
    return "ctx_request_id" in params or params.get("request_type") == "context_only"


_log = logging.getLogger(__name__)


class Progress(Enum):
    """How far a prefill has come."""

    RUNNING = auto()
    ROUTED = auto()
    STREAMING = auto()
    DONE = auto()
    FAILED = auto()


@define(eq=False)
class Handover:
    """See the module. `run` is the task; whoever starts it has it run, or calls `give_up`.

    `permit` holds the request's phase until the worker is recorded. `meeting` is where decode joins, if that is known
    beforehand. Where the prefill fails and decode waits for it already, but no block can be on its way yet, decode gets
    `patience_s` to show an item all the same; then it is killed, and `starves` says why.
    """

    request: Context[PreprocessedRequest]
    pool: PrefillPool
    worker: PrefillWorker | None
    permit: PhasePermit
    meeting: BootstrapInfo | None
    timeout_s: float
    patience_s: float
    was_chosen: bool = False
    """Whether the worker is our choice, so that another one may take its place."""
    stops_prefills: Callable[[int], bool] = lambda _: False
    """Whether that worker may be sent a stop for a prefill it has."""
    tracer: Tracer | None = None
    """What makes the spans of both halves, if the request is traced."""
    link: TraceLink | None = field(default=None, init=False)
    """The span of the prefill, once it is being sent."""
    progress: Progress = field(default=Progress.RUNNING, init=False)
    error: PenstockError | None = field(default=None, init=False)
    starves: bool = field(default=False, init=False)
    """Decode was killed, because nothing would have come."""
    is_left: bool = field(default=False, init=False)
    is_withdrawn: bool = field(default=False, init=False)
    """The prefill was stopped, because its client left in time."""
    _is_unwanted: bool = field(default=False, init=False)
    _sent_before: int = field(init=False)
    """How many prefills of the request were sent when this one began: they go one after the other."""
    _failed_at: Progress | None = field(default=None, init=False)
    _handed: BootstrapInfo | Prefilled | None = field(default=None, init=False)
    _decode: Control | None = field(default=None, init=False)
    _ready: Latch = field(factory=Latch, init=False)
    _settled: Latch = field(factory=Latch, init=False)
    _over: Latch = field(factory=Latch, init=False)
    _ended: Latch = field(factory=Latch, init=False)

    def __attrs_post_init__(self) -> None:
        self._sent_before = self._tracker.prefills_sent

    async def run(self) -> None:
        """The prefill, to its end; what goes wrong is kept in `error`."""
        try:
            with anyio.move_on_after(self.timeout_s) as limit:
                await self._prefill()
            if limit.cancelled_caught:
                self._fail(PrefillError("prefill took too long", cause=ResponseTimeout(f"over {self.timeout_s:g} s")))
            await self._starve()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Ends it where it has not ended, or never began: whoever waits is told, and the phase is free."""
        self.permit.release()
        if self.progress not in (Progress.DONE, Progress.FAILED):
            self._fail(PrefillError("prefill was given up", cause=Unavailable("the prefill router is closing")))
        self._ended.set()

    # -- for decode

    async def ready(self) -> BootstrapInfo | Prefilled:
        """What decode needs, as soon as it may begin: a meeting once the prefill is routed, or else the result.

        Raises what the prefill met until then.
        """
        await self._ready.wait()
        if self._handed is not None:
            return self._handed
        assert self.error is not None
        raise self.error

    def feeds(self, decode: Control) -> None:
        """Whom to end if it waits in vain, at once if that is known."""
        self._decode = decode
        if self.starves:
            decode.kill()

    @property
    def is_over(self) -> bool:
        """Whether nothing of it can touch decode any more."""
        return self.progress is Progress.DONE

    @property
    def is_settled(self) -> bool:
        """Whether it makes no difference to decode any more that the prefill fails."""
        return self._settled.is_set

    def settle(self) -> None:
        """Decode has shown an item."""
        self._settled.set()

    def leave(self) -> None:
        """Decode has ended by itself."""
        self.is_left = True
        self._settled.set()

    def abandon(self) -> None:
        """Decode is over; unless it had ended by itself, its blocks are of no use to anybody."""
        if not self.is_left:
            self._is_unwanted = True
        self.leave()
        self._withdraw()

    def client_left(self) -> None:
        """Called when the client has left: withdraws the prefill if it is not too late for that.

        If a decode worker has been asked, that waits until decode is over.
        """
        self._is_unwanted = True
        self._withdraw()

    async def fails_soon(self) -> None:
        """Returns when the prefill has failed, has ended well, or neither for as long as decode's patience."""
        with anyio.move_on_after(self.patience_s):
            await self._over.wait()

    async def ended(self) -> None:
        """Returns when it has ended, whichever way."""
        await self._ended.wait()

    def _withdraw(self) -> None:
        if self._is_unwanted and not self.is_withdrawn and self._may_stop():
            self.is_withdrawn = True
            self.request.stop()

    def _may_stop(self) -> bool:
        """Whether no transfer of blocks can have begun, and the worker, if it has the request, can bear a stop."""
        if self.progress is Progress.RUNNING and self._tracker.prefills_sent == self._sent_before:
            return True
        if self.progress not in (Progress.RUNNING, Progress.ROUTED) or (self._decode is not None and not self.is_left):
            return False
        worker_id = self._tracker.prefill_worker.worker_id if self.worker is None else self.worker.worker_id
        return worker_id is not None and self.stops_prefills(worker_id)

    @property
    def _tracker(self) -> RequestTracker:
        tracker = self.request.payload.tracker
        assert tracker is not None
        return tracker

    # -- the task

    async def _prefill(self) -> None:
        if self.request.is_stopped:
            self._fail(Cancelled("stopped before its prefill was sent"))
            return
        try:
            with self.permit:
                stream = await self._sent()
        except Exception as error:
            self._fail(routing_error(error, was_chosen=self.was_chosen))
            return
        try:
            async with stream:
                self.progress = Progress.ROUTED
                if self.meeting is not None:
                    self._hand(self.meeting)
                prefilled = await read_prefill(stream, self._first)
        except Exception as error:
            self._fail(to_error(error))
            return
        self.progress = Progress.DONE
        self._over.set()
        self._hand(prefilled)

    async def _sent(self) -> ResponseStream[Output]:
        """The prefill worker's answer, in a span that lasts as long as it."""
        if self.request.trace is None:
            return await self._send(self.request)
        return await spanned(self.request, "prefill", self._send, tracer=self.tracer)

    async def _send(self, request: Context[PreprocessedRequest]) -> ResponseStream[Output]:
        self.link = trace_link(request)
        return await self.pool.send(request, None if self.worker is None else self.worker.worker_id)

    def _first(self, data: LLMEngineOutput | None) -> None:
        """The prompt is computed: decode may go on from here, if the worker says where to meet it."""
        self.progress = Progress.STREAMING
        self._tracker.record_prefill_complete()
        self._tracker.record_prefill_cached(cached_of(data))
        meeting = None if data is None else told_meeting(data.disaggregated_params)
        if meeting is not None and self._handed is None:
            self._learn(handed_over(data))
            self._hand(meeting)

    def _hand(self, handed: BootstrapInfo | Prefilled) -> None:
        if self._handed is None:
            if isinstance(handed, Prefilled):
                self._learn(handed)
            self._handed = handed
            self._ready.set()

    def _learn(self, prefilled: Prefilled) -> None:
        """Who it was; what was decided beforehand holds."""
        if self.worker is None:
            self.worker = prefilled.worker

    def _fail(self, error: PenstockError) -> None:
        if self.is_withdrawn:
            error = Cancelled("stopped before its prompt was computed", cause=error)
        elif self._handed is not None:
            _log.warning("prefill of request %r failed behind decode's back: %s", self.request.id, error.render())
        self._failed_at, self.progress = self.progress, Progress.FAILED
        self.error = error
        self._over.set()
        self._ready.set()

    async def _starve(self) -> None:
        """Ends a decode that waits for blocks which will not come."""
        if self._failed_at is not Progress.ROUTED or self._handed is None:
            return
        with anyio.move_on_after(self.patience_s):
            await self._settled.wait()
            return
        self.starves = True
        if self._decode is not None:
            self._decode.kill()
