"""Generation: one request through its graph, from its first item to its last, and whatever ends it early.

    graph ── item ──► usage, metrics, reply ──► client
    client gone, a limit of time ── kill ──► graph

The caller's own task reads the graph. Beside it the reply's task sends while there is something to send; a server
that cannot call back has one more task, which waits for the client to leave.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, field
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from operators.text import PROMPT_TOKENS
from pipeline import (
    Annotated,
    Cancelled,
    CannotConnect,
    Context,
    Disconnected,
    EngineShutdown,
    Gate,
    ResponseTimeout,
    StreamIncomplete,
    Unavailable,
    to_error,
)
from pipeline.errors import BackendUnknown
from pipeline.foreign import raise_if_ours
from pipeline.llm import tracker_of
from pipeline.protocols import BackendOutput

from ...openai import OpenAIRequest, UsageCount
from ...problems import Refusal, error_of
from ..metrics import RequestMeter
from ..open_requests import Availability, Phase, RequestClock
from ..request import log_as_part
from ..service import Graph
from ..side_task import SideTask, Work, call_later, end
from .reply import Reply

ON_GONE = "penstock.on_gone"
"""Where a server that calls back, as ours does, puts an `OnGone` into the scope. With any other server the app waits in
`receive`, which takes a task and its wait, 1.8 KB of each open request."""

OnGone: TypeAlias = Callable[[Callable[[], object]], Callable[[], object]]
"""Takes a callback, calls it once in its loop when the client has left, at once if it has by then, and returns a
function that removes the callback."""

LEADING_ANNOTATIONS_MAX = 16
"""Annotations before the first item that do not begin the answer; one more does."""

_PARTS_AT_ONCE = 8
"""Prompts of one request that are begun in one turn of the loop: each costs up to half a millisecond."""

KILL_GRACE_S = 2.0
"""How long a killed graph may take to end before its task is cancelled."""


@define(eq=False)
class Generation:
    """One request on its way. A request that is cut because the server ends fails with Unavailable."""

    graph: Graph
    context: Context[OpenAIRequest]
    """The whole request. Each prompt of several runs under a context of its own below it."""
    prompts: Sequence[OpenAIRequest]
    """One request for each prompt."""
    usage: UsageCount
    meter: RequestMeter
    availability: Availability
    """Shows whether the server ends."""
    clock: RequestClock
    """The request's limits of time."""
    receive: Receive
    """ASGI's; awaited only without `on_gone`."""
    on_gone: OnGone | None
    start: Callable[[Work], SideTask]
    """Starts a task of the request."""
    client_gone: bool = field(init=False, default=False)
    finished: bool = field(init=False, default=False)
    """Whether a choice has its finish reason."""
    is_complete: bool = field(init=False, default=False)
    """Whether every stream is read and closed."""
    items: int = field(init=False, default=0)
    """Items read so far, without plain tokens."""
    _readers: int = field(init=False, default=0)
    """Streams that are read now."""
    _waiting: int = field(init=False, default=0)
    """Of these, streams that wait for the client."""
    _cut: Exception | None = field(init=False, default=None)
    _reply: Reply | None = field(init=False, default=None)
    _watcher: SideTask | None = field(init=False, default=None)
    _watcher_failure: Exception | None = field(init=False, default=None)
    _remove_callback: Callable[[], object] | None = field(init=False, default=None)
    _cancel_kill_timer: Callable[[], object] | None = field(init=False, default=None)
    _reading: anyio.CancelScope = field(init=False, factory=anyio.CancelScope)

    async def run(self, reply: Reply) -> Exception | None:
        """Answer with the graph's items. Return the failure that the client got as an event, None for a whole answer.

        Raise the failure, or ClientDisconnect, if nothing was sent.
        """
        self._reply = reply
        self._watch()
        try:
            failure = await self._read_all(reply)
            self._raise_unanswered(None if reply.committed else failure)
            reply.end(failure, finished=self.finished)
            await reply.sent()
            self._raise_unanswered(None)
        finally:
            await self._close(reply)
        return failure

    def _raise_unanswered(self, failure: Exception | None) -> None:
        """Raise the reason why the client gets no answer, if there is one."""
        broken = self._watcher_failure
        if broken is None and self._reply is not None:
            broken = self._reply.failure
        if broken is not None:
            raise broken
        if self.client_gone:
            raise ClientDisconnect
        if failure is not None:
            raise failure

    async def _close(self, reply: Reply) -> None:
        if self._remove_callback is not None:
            self._remove_callback()
            self._remove_callback = None
        await reply.close()
        self._reply = None  # it has `lose_client` of this generation, in a circle
        if self._watcher is not None:
            watcher, self._watcher = self._watcher, None  # as the reply
            await end(watcher)

    # -- reading

    async def _read_all(self, reply: Reply) -> Exception | None:
        """Read the stream of every prompt to its end and close it. Return the first failure, if any."""
        try:
            with self._reading:
                await self._read_prompts(reply)
            if self._reading.cancelled_caught:
                self._raise_short_end(self.context, begun=True)
        except BaseException as error:
            return self._failure_of(error)  # kept in this frame it would be in a circle with its own traceback
        finally:
            self.is_complete = True
            if self._cancel_kill_timer is not None:
                self._cancel_kill_timer()
        return None

    def _failure_of(self, error: BaseException) -> Exception:
        """Return the failure for the client: a limit or the server's own end replaces the errors it caused."""
        failure = _lost_request(error)
        if self._cut is not None and isinstance(failure, Cancelled):
            return self._cut
        phase = self.availability.phase
        is_killed = phase is Phase.STOPPING and isinstance(failure, Cancelled)
        is_lost = phase is not Phase.READY and isinstance(failure, CannotConnect | Disconnected | EngineShutdown)
        return Unavailable("the server is shutting down", cause=failure) if is_killed or is_lost else failure

    def _read_prompts(self, reply: Reply) -> Awaitable[None]:
        if len(self.prompts) == 1:
            only, whole = self.prompts[0], self.context
            return self._read(whole if only is whole.payload else whole.with_payload(only), 0, reply)
        return self._read_each(reply)

    async def _read_each(self, reply: Reply) -> None:
        failures: Sequence[Exception] = ()
        try:
            async with anyio.create_task_group() as readers:
                for position, request in enumerate(self.prompts):
                    readers.start_soon(self._read_part, self._part(request, position), position, reply)
                    if position % _PARTS_AT_ONCE == _PARTS_AT_ONCE - 1:
                        await checkpoint()
        except ExceptionGroup as group:
            failures = group.exceptions
        if failures:  # the first one cancelled the others; raised here it keeps its own cause
            raise failures[0]

    def _part(self, request: OpenAIRequest, position: int) -> Context[OpenAIRequest]:
        """Return the context of one prompt of several, which shares only stop and kill with the others."""
        part = Context(request, id=f"{self.context.id}-{position}", metadata=self.context.metadata)
        part.trace = self.context.trace
        self.context.control.link_child(part.control)
        return part

    async def _read_part(self, part: Context[OpenAIRequest], position: int, reply: Reply) -> None:
        log_as_part(part)
        try:
            await self._read(part, position, reply)
        except Exception:
            raise
        except BaseException as error:
            raise _lost_request(error) from error

    async def _read(self, context: Context[OpenAIRequest], prompt: int, reply: Reply) -> None:
        """Read one prompt's stream. Raise what a stage raises, even if it is no Exception: see `_lost_request`."""
        leading, begun, finished, gate = 0, False, False, Gate()
        self._readers += 1
        async with await self.graph.generate(context) as stream:
            if (prompt_tokens := context.registry.get_optional(PROMPT_TOKENS, int)) is not None:
                self.usage.prompt(prompt, prompt_tokens)
            self.meter.add_tracker(tracker_of(context))
            async for item in stream:
                self.items += 1
                full, gate.is_open = False, True
                if item.event is not None:
                    _raise_error(item)
                    full = reply.annotate(item)
                if (output := item.data) is None:
                    leading += 1
                else:
                    if (reason := output.finish_reason) is not None:
                        if reason.is_error:
                            raise BackendUnknown(reason.message)
                        finished = True
                        self.meter.add_finish_reason(reason)
                    self.meter.add_tokens(len(output.token_ids))
                    self.usage.add(output, prompt)
                    full = reply.take(output, prompt)
                if not begun and (output is not None or leading > LEADING_ANNOTATIONS_MAX):
                    begun = True
                    reply.begin()
                    stream.feed(_TokenTaker(self, prompt, reply, gate).take, gate)
                if full and begun:
                    await self._wait_for_client(reply)
        self._readers -= 1
        self.finished = self.finished or finished
        if not finished:
            self._raise_short_end(context, begun=begun)

    def _raise_short_end(self, context: Context[OpenAIRequest], *, begun: bool) -> None:
        """Raise the known reason why a stream ended without a finish reason, if there is one."""
        if self._cut is not None:
            raise self._cut
        if context.is_stopped:
            raise Cancelled("the request was stopped")
        if not begun:
            raise StreamIncomplete("the engine's stream ended without an item")

    async def _wait_for_client(self, reply: Reply) -> None:
        self._waiting += 1
        try:
            await reply.room()
        finally:
            self._waiting -= 1

    # -- ending it from outside

    def _watch(self) -> None:
        """End the request if its client leaves, from now on until `_close`."""
        if self.on_gone is not None:
            self._remove_callback = self.on_gone(self._on_client_gone)
        else:
            self._watcher = self.start(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        try:
            while (await self.receive())["type"] != "http.disconnect":
                pass
        except Exception as failure:
            self._watcher_failure = failure
        self._on_client_gone()

    def _on_client_gone(self) -> None:
        """Called when the client has left: after the last item only the sending ends."""
        if not self.is_complete:
            self._drop_client()
        elif self._reply is not None:
            self._reply.abandon()

    def check_time(self, now_s: float) -> None:
        """End the request if it is beyond a limit of time; called now and then."""
        reply, clock, items = self._reply, self.clock, self.items + self.meter.output_tokens
        if self.client_gone:
            return
        if reply is not None and clock.stalled_write(now_s, reply.write) is not None:
            self._drop_client()
        elif self.is_complete:
            if clock.lasted_too_long(now_s) is not None:  # only its end is sent, too slowly to wait for
                self._drop_client()
        elif (limit := clock.lasted_too_long(now_s)) is not None:
            text = "The request took longer than the server allows"
            self.end_early(Refusal(504, text, "response_timeout", exceeded=limit))
        # If every stream that is read waits for the client, no engine is to blame.
        elif (limit := clock.silence(now_s, items, is_excused=0 < self._readers == self._waiting)) is not None:
            error = ResponseTimeout("the engine was silent for too long")
            error.exceeded = limit
            self.end_early(error)

    def lose_client(self) -> None:
        """End the request because a write showed that the client is gone."""
        self.client_gone = True
        self._kill()

    def _drop_client(self) -> None:
        self.lose_client()
        if self._reply is not None:
            self._reply.abandon()

    def end_early(self, reason: Exception) -> None:
        """Kill the request, which then fails with this error, unless it ends already."""
        if self._cut is None and not self.client_gone and not self.is_complete:
            self._cut = reason
            self._kill()

    def _kill(self) -> None:
        """Kill the request. A graph that still runs after `KILL_GRACE_S` is cancelled."""
        self.context.kill()
        if self._cancel_kill_timer is None and not self.is_complete:
            self._cancel_kill_timer = call_later(KILL_GRACE_S, self._reading.cancel)


class _TokenTaker:
    """Takes the plain tokens of one prompt while `Generation._read` waits, as that does items.

    It touches as few objects of its request as it can: by the time of the next token none is in the processor's cache.
    """

    __slots__ = ("_gate", "_generation", "_meter", "_prompt", "_reply")

    def __init__(self, generation: Generation, prompt: int, reply: Reply, gate: Gate) -> None:
        self._generation, self._meter = generation, generation.meter
        self._prompt, self._reply, self._gate = prompt, reply, gate

    def take(self, token_id: int, index: int | None, text: str = "") -> bool:
        """See `pipeline.Take`."""
        try:
            self._meter.add_tokens(1)
            if self._reply.take_token(token_id, index, text, self._prompt):
                self._gate.is_open = False  # the reader, which gets the next item, can wait for the client
        except Exception as error:
            self._generation.end_early(error)
        return True


def _lost_request(error: BaseException) -> Exception:
    """Return a stage's error as an Exception, which loses this request only. Raise an error that is not a stage's."""
    if isinstance(error, Exception):
        return error
    raise_if_ours(error)
    failure = to_error(error)
    failure.__cause__ = error
    return failure


def _raise_error(item: Annotated[BackendOutput]) -> None:
    if (error := error_of(item)) is not None:
        raise error
