"""PrefillTask: one prefill under way, from its reservation to what decode gets, in a task of its own.

    RESERVING ─► SENDING ─┬─► SENT ──────┬─► STREAMING ─► DONE        ERROR in any state: FAILED
                          └─► MEETING ───┘                            but for MEETING: STARVING ─► FAILED or STARVED

Its request is no child of the client's: a kill would cut the connection to the prefill worker in the middle of a
transfer, and its blocks would be lost for good. It ends by itself, by its time limit, or with its owner. A client that
leaves before a transfer can have begun withdraws it by a stop:

    no worker has it yet ─────────────────────────────────────────────► withdrawn
    no output yet, decode not sent or over, the worker stops prefills ─► withdrawn
    anything else ─────────────────────────────────────────────────────► goes on

Source: dynamo lib/llm/src/kv_router/prefill_router/execution.rs, spawn_prefill_task and execute_prefill. Other than
there it has an owner and a time limit, and decode does not wait in vain for a prefill that failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum, auto

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, field

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
    PreprocessedRequest,
    RequestTracker,
    TraceLink,
)
from pipeline.telemetry import Tracer, spanned, trace_link

from ..pool import Output
from .errors import PrefillError, TopologyError, reservation_error, routing_error
from .output import PrefillOutput, cached_tokens, handed_over, read_prefill
from .plan import Plan, bootstrap_from_params
from .pool import PrefillPool, PrefillWorker

_log = logging.getLogger(__name__)


class PrefillState(Enum):
    """How far a prefill has come."""

    RESERVING = auto()
    """It has no worker yet, and may wait for one in the pool's queue."""
    SENDING = auto()
    """Its worker is reserved; whether that has the request already, the tracker knows."""
    SENT = auto()
    """Its worker has it; decode waits for the output."""
    MEETING = auto()
    """Its worker has it; decode may begin, and gets the blocks where it meets the worker."""
    STREAMING = auto()
    """There is output: blocks may be on their way."""
    DONE = auto()
    """It has ended well."""
    FAILED = auto()
    STARVING = auto()
    """It has failed, and decode may wait for blocks that will not come."""
    STARVED = auto()
    """Decode was killed, because no block would have come."""


class PrefillEvent(Enum):
    """What moves a prefill on."""

    RESERVED = auto()
    TAKEN = auto()
    """The worker has taken the request, and its settings have no meeting point."""
    BOOTSTRAPPED = auto()
    """The worker has taken the request, and decode knows where to meet it."""
    OUTPUT = auto()
    END = auto()
    ERROR = auto()
    SETTLED = auto()
    """Decode has given an item, or is over."""
    PATIENCE_OVER = auto()


_S, _E = PrefillState, PrefillEvent
TRANSITIONS: Mapping[PrefillState, Mapping[PrefillEvent, PrefillState]] = {
    _S.RESERVING: {_E.RESERVED: _S.SENDING, _E.ERROR: _S.FAILED},
    _S.SENDING: {_E.TAKEN: _S.SENT, _E.BOOTSTRAPPED: _S.MEETING, _E.ERROR: _S.FAILED},
    _S.SENT: {_E.OUTPUT: _S.STREAMING, _E.ERROR: _S.FAILED},
    _S.MEETING: {_E.OUTPUT: _S.STREAMING, _E.ERROR: _S.STARVING},
    _S.STREAMING: {_E.END: _S.DONE, _E.ERROR: _S.FAILED},
    _S.STARVING: {_E.SETTLED: _S.FAILED, _E.PATIENCE_OVER: _S.STARVED},
}
"""What does not stand here does not happen."""

_OVER = (PrefillState.DONE, PrefillState.FAILED, PrefillState.STARVING, PrefillState.STARVED)
_NO_OUTPUT = (PrefillState.SENDING, PrefillState.SENT, PrefillState.MEETING)


class DecodeState(Enum):
    """How far the decode of the same request has come."""

    WAITING = auto()
    """It was not sent yet."""
    FETCHING = auto()
    """It was sent, and may wait for blocks."""
    SETTLED = auto()
    """It has given an item, so it makes no difference to it any more whether the prefill fails."""
    ENDED = auto()
    """It has ended by itself."""
    ABANDONED = auto()
    """It is over without having ended by itself: it has no use for blocks."""


@define(eq=False)
class PrefillTask:
    """See the module. `run` is the task; its owner runs it, or calls `give_up`."""

    request: Context[PreprocessedRequest]
    """The prefill's own request, with the payload as it came."""
    pool: PrefillPool
    resolve: Callable[[PrefillWorker], Plan]
    """Returns the plan for the worker that is reserved; called once."""
    permit: PhasePermit
    """Holds the request's phase until the worker is recorded."""
    timeout_s: float
    patience_s: float
    """Seconds decode has to give an item if the prefill fails when decode may wait for blocks already."""
    tracer: Tracer | None = None
    """Makes the spans of both halves, if the request is traced."""
    state: PrefillState = field(default=PrefillState.RESERVING, init=False)
    decode_state: DecodeState = field(default=DecodeState.WAITING, init=False)
    plan: Plan | None = field(default=None, init=False)
    """Set once the worker is reserved."""
    error: PenstockError | None = field(default=None, init=False)
    link: TraceLink | None = field(default=None, init=False)
    """The span of the prefill, once it is being sent."""
    found_no_worker: bool = field(default=False, init=False)
    """Whether there was no worker that it could be sent to, so that nothing was computed."""
    is_withdrawn: bool = field(default=False, init=False)
    """Whether the prefill was stopped, because its client left in time."""
    _client_left: bool = field(default=False, init=False)
    _has_ended: bool = field(default=False, init=False)
    tracker: RequestTracker = field(init=False)
    """That of the payload: shared with the client's request, its phases and times are those of both halves."""
    _sent_before: int = field(init=False)
    """How many prefills of the request were sent when this one began: they go one after the other."""
    _handed: BootstrapInfo | PrefillOutput | None = field(default=None, init=False)
    _decode: Control | None = field(default=None, init=False)
    _waiting: dict[anyio.Event, Callable[[], bool]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        tracker = self.request.payload.tracker
        assert tracker is not None
        self.tracker, self._sent_before = tracker, tracker.prefills_sent

    # -- for the owner

    async def run(self) -> None:
        """Run the prefill to its end; what goes wrong is kept in `error`."""
        try:
            with anyio.move_on_after(self.timeout_s) as limit:
                await self._prefill()
            if limit.cancelled_caught:
                self._fail(PrefillError("prefill took too long", cause=ResponseTimeout(f"over {self.timeout_s:g} s")))
            if self.state is PrefillState.STARVING:
                await self._starve()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """End it if it has not ended, or never began: what waits for it is woken, and the phase is free."""
        if self._has_ended:
            return
        self.permit.release()
        if self.state not in _OVER:
            self._fail(PrefillError("prefill was given up", cause=Unavailable("the prefill router is closing")))
        self._has_ended = True
        self._wake()

    async def ended(self) -> None:
        """Return when it has ended, whichever way."""
        await self._until(lambda: self._has_ended)

    # -- for decode

    async def ready(self) -> BootstrapInfo | PrefillOutput:
        """Return what decode needs, as soon as decode may begin: a meeting point, or the output of a complete prefill.

        Raise the error of a prefill that fails before.
        """
        await self._until(lambda: self._handed is not None or self.error is not None)
        if self._handed is not None:
            return self._handed
        assert self.error is not None
        raise self.error

    @property
    def is_done(self) -> bool:
        """Whether nothing of it can touch decode any more."""
        return self.state is PrefillState.DONE

    @property
    def starved_decode(self) -> bool:
        """Whether decode was killed, because no block would have come."""
        return self.state is PrefillState.STARVED

    @property
    def is_settled(self) -> bool:
        """Whether it makes no difference to decode any more that the prefill fails."""
        return self.decode_state not in (DecodeState.WAITING, DecodeState.FETCHING)

    @property
    def decode_is_over(self) -> bool:
        return self.decode_state in (DecodeState.ENDED, DecodeState.ABANDONED)

    def decode_sent(self, decode: Control) -> None:
        """Decode is being sent; `decode` is killed if it waits in vain, at once if that is known."""
        self._decode = decode
        self.decode_state = DecodeState.FETCHING
        if self.starved_decode:
            decode.kill()

    def decode_moves(self, state: DecodeState) -> None:
        """Decode has come so far; nothing happens if it is over."""
        if not self.decode_is_over:
            self.decode_state = state
            self._wake()

    def abandon(self) -> None:
        """Decode is over; unless it has ended by itself, there is no use for its blocks."""
        self.decode_moves(DecodeState.ABANDONED)
        self._withdraw()

    def client_left(self) -> None:
        """Withdraw the prefill if it is not too late; once decode was sent, that waits until decode is over."""
        self._client_left = True
        self._withdraw()

    async def fails_soon(self) -> None:
        """Return when the prefill has failed or is done, or neither for as long as decode's patience."""
        with anyio.move_on_after(self.patience_s):
            await self._until(lambda: self.state in _OVER)

    def _withdraw(self) -> None:
        is_unwanted = self._client_left or self.decode_state is DecodeState.ABANDONED
        if is_unwanted and not self.is_withdrawn and self._may_stop():
            self.is_withdrawn = True
            self.request.stop()

    def _may_stop(self) -> bool:
        """Whether no transfer of blocks can have begun, and the worker, if it has the request, may be sent a stop."""
        was_handed = self.tracker.prefills_sent > self._sent_before
        if self.state is PrefillState.RESERVING or (self.state is PrefillState.SENDING and not was_handed):
            return True
        if self.state not in _NO_OUTPUT or self.decode_state in (DecodeState.FETCHING, DecodeState.SETTLED):
            return False
        return self.plan is not None and self.plan.stops_prefills

    # -- the task

    async def _prefill(self) -> None:
        if self.request.is_stopped:
            self._fail(Cancelled("stopped before its prefill was sent"))
            return
        try:
            with self.permit:
                stream = await self._sent()
        except Exception as error:
            self._fail(self._not_sent(error))
            return
        try:
            async with stream:
                self._take()
                output = await read_prefill(stream, self._on_first)
        except Exception as error:
            self._fail(to_error(error))
            return
        self._move(PrefillEvent.END)
        self._hand(output)

    async def _sent(self) -> ResponseStream[Output]:
        """Return the prefill worker's stream, in a span that lasts as long as it."""
        if self.request.trace is None:
            return await self._send(self.request)
        return await spanned(self.request, "prefill", self._send, tracer=self.tracer)

    async def _send(self, request: Context[PreprocessedRequest]) -> ResponseStream[Output]:
        self.link = None if request.trace is None else trace_link(request)
        reservation = await self.pool.reserve(request)
        try:
            self._move(PrefillEvent.RESERVED)
            self.plan = self.resolve(reservation.worker)
            return await self.pool.send(request.with_payload(self.plan.request), reservation)
        finally:
            reservation.give_back()

    def _not_sent(self, error: Exception) -> PenstockError:
        if self.state is PrefillState.RESERVING:
            self.found_no_worker = isinstance(error, Unavailable)
            return reservation_error(error)
        return error if isinstance(error, TopologyError) else routing_error(error)

    def _take(self) -> None:
        """The worker has the request: decode may begin if it is known where it meets the worker."""
        assert self.plan is not None
        if self.plan.bootstrap is None:
            self._move(PrefillEvent.TAKEN)
        else:
            self._move(PrefillEvent.BOOTSTRAPPED)
            self._hand(self.plan.bootstrap)

    def _on_first(self, data: LLMEngineOutput | None) -> None:
        """The prompt is computed: decode may begin, if the output has a meeting point."""
        self._move(PrefillEvent.OUTPUT)
        self.tracker.record_prefill_complete()
        self.tracker.record_prefill_cached(cached_tokens(data))
        bootstrap = None if data is None else bootstrap_from_params(data.disaggregated_params)
        if bootstrap is not None and self._handed is None:
            handed_over(data)  # raises for parameters that decode could not use
            self._hand(bootstrap)

    def _hand(self, handed: BootstrapInfo | PrefillOutput) -> None:
        if self._handed is None:
            self._handed = handed
            self._wake()

    def _fail(self, error: PenstockError) -> None:
        if self.is_withdrawn:
            error = Cancelled("stopped before its prompt was computed", cause=error)
        elif self._handed is not None:
            _log.warning("prefill of request %r failed behind decode's back: %s", self.request.id, error.render())
        self.error = error
        self._move(PrefillEvent.ERROR)

    async def _starve(self) -> None:
        """Kill a decode that waits for blocks which will not come."""
        with anyio.move_on_after(self.patience_s):
            await self._until(lambda: self.is_settled)
            self._move(PrefillEvent.SETTLED)
            return
        self._move(PrefillEvent.PATIENCE_OVER)
        if self._decode is not None:
            self._decode.kill()

    # -- changes

    def _move(self, event: PrefillEvent) -> None:
        self.state = TRANSITIONS[self.state][event]
        if self.state in _OVER:  # no condition is about a state before
            self._wake()

    def _wake(self) -> None:
        """Wake what waits for a condition that holds now. May be called in a plain callback of the loop."""
        for event, is_so in [*self._waiting.items()]:
            if is_so():
                del self._waiting[event]
                event.set()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Return when the condition holds, which is looked at after each change; once it holds, it holds for good."""
        if is_so():
            await checkpoint()
            return
        event = anyio.Event()
        self._waiting[event] = is_so
        try:
            await event.wait()
        finally:
            self._waiting.pop(event, None)
