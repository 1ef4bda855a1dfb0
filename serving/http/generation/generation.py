"""Generation: one request through its graph, from its first item to its last, and what ended it.

    graph ── item ──► usage, metrics, delivery
    client gone, a limit of time ── kill ──► graph

Knows nothing of HTTP: what becomes of the items is the delivery's business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, field

from operators import PROMPT_TOKENS
from pipeline import (
    Annotated,
    Cancelled,
    CannotConnect,
    Context,
    Disconnected,
    EngineShutdown,
    PenstockError,
    StreamIncomplete,
    Unavailable,
    to_error,
)
from pipeline.errors import BackendUnknown
from pipeline.foreign import raise_if_ours
from pipeline.llm import tracker_of
from pipeline.protocols import BackendOutput

from ...openai import OpenAIRequest, UsageCount
from ..availability import Availability, Phase
from ..metrics import RequestMeter
from ..problems import error_of
from ..request import log_as_part
from ..service import Graph
from ..side_task import call_later
from .delivery import Delivery

LEADING_ANNOTATIONS_MAX = 16
"""Annotations looked past for the first item; after more of them the answer has begun anyway."""

_PARTS_AT_ONCE = 8
"""Prompts of one request that are begun in one turn of the loop: each costs up to half a millisecond."""

KILL_GRACE_S = 2.0
"""How long a killed graph may take to end before its task is cancelled."""


@define(eq=False)
class Generation:
    """One request on its way. `context` is the whole request; each prompt runs under a context below it.

    A request that is cut because the server ends, as its `availability` shows, fails with Unavailable.
    """

    graph: Graph
    context: Context[OpenAIRequest]
    prompts: Sequence[OpenAIRequest]
    usage: UsageCount
    meter: RequestMeter
    availability: Availability
    client_gone: bool = field(init=False, default=False)
    finished: bool = field(init=False, default=False)
    is_complete: bool = field(init=False, default=False)
    items: int = field(init=False, default=0)
    _readers: int = field(init=False, default=0)
    _waits_for_client: int = field(init=False, default=0)
    _cut: PenstockError | None = field(init=False, default=None)
    _forget_patience: Callable[[], object] | None = field(init=False, default=None)
    _reading: anyio.CancelScope = field(init=False, factory=anyio.CancelScope)

    async def run(self, delivery: Delivery) -> Exception | None:
        """Reads every prompt's stream to its end, all streams are closed then. Returns what failed first, if any."""
        try:
            with self._reading:
                await self._read_all(delivery)
            if self._reading.cancelled_caught:
                self._explain_short_end(self.context, begun=True)
        except BaseException as error:
            return self._failure_of(error)  # kept in this frame it would be in a circle with its own traceback
        finally:
            self.is_complete = True
            if self._forget_patience is not None:
                self._forget_patience()
        return None

    def _failure_of(self, error: BaseException) -> Exception:
        failure = _lost_request(error)
        return self._cut_by_server(failure) or failure

    def _cut_by_server(self, failure: Exception) -> PenstockError | None:
        """What the client is told in the place of a failure that a limit or the server's own end caused."""
        if self._cut is not None and isinstance(failure, Cancelled):
            return self._cut
        phase = self.availability.phase
        is_killed = phase is Phase.STOPPING and isinstance(failure, Cancelled)
        is_lost = phase is not Phase.READY and isinstance(failure, CannotConnect | Disconnected | EngineShutdown)
        return Unavailable("the server is shutting down", cause=failure) if is_killed or is_lost else None

    def _read_all(self, delivery: Delivery) -> Awaitable[None]:
        if len(self.prompts) == 1:
            only, whole = self.prompts[0], self.context
            return self._read(whole if only is whole.payload else whole.with_payload(only), 0, delivery)
        return self._read_each(delivery)

    async def _read_each(self, delivery: Delivery) -> None:
        failures: Sequence[Exception] = ()
        try:
            async with anyio.create_task_group() as readers:
                for position, request in enumerate(self.prompts):
                    readers.start_soon(self._read_part, self._part(request, position), position, delivery)
                    if position % _PARTS_AT_ONCE == _PARTS_AT_ONCE - 1:
                        await checkpoint()
        except ExceptionGroup as group:
            failures = group.exceptions
        if failures:  # the others were cancelled because of the first, which is raised here to keep its own cause
            raise failures[0]

    def _part(self, request: OpenAIRequest, position: int) -> Context[OpenAIRequest]:
        """A request of its own for one prompt of many: nothing but stop and kill is shared with the others."""
        part = Context(request, id=f"{self.context.id}-{position}", metadata=self.context.metadata)
        part.trace = self.context.trace
        self.context.control.link_child(part.control)
        return part

    async def _read_part(self, part: Context[OpenAIRequest], position: int, delivery: Delivery) -> None:
        log_as_part(part)
        try:
            await self._read(part, position, delivery)
        except Exception:
            raise
        except BaseException as error:
            raise _lost_request(error) from error

    async def _read(self, context: Context[OpenAIRequest], prompt: int, delivery: Delivery) -> None:
        """Reads one prompt's stream. Raises whatever a stage does, also what is no Exception: see `_lost_request`."""
        leading, begun, finished = 0, False, False
        self._readers += 1
        async with await self.graph.generate(context) as stream:
            if (prompt_tokens := context.registry.get_optional(PROMPT_TOKENS, int)) is not None:
                self.usage.prompt(prompt, prompt_tokens)
            self.meter.add_tracker(tracker_of(context))
            async for item in stream:
                self.items += 1
                full = False
                if item.event is not None:
                    _raise_error(item)
                    full = delivery.annotate(item)
                if (output := item.data) is None:
                    leading += 1
                else:
                    if output.finish_reason is not None:
                        finished = _finished(output)
                        self.meter.add_finish_reason(output.finish_reason)
                    self.meter.add_tokens(len(output.token_ids))
                    self.usage.add(output, prompt)
                    full = delivery.take(output, prompt)
                if not begun and (output is not None or leading > LEADING_ANNOTATIONS_MAX):
                    begun = True
                    delivery.begin()
                if full and begun:
                    await self._wait_for_client(delivery)
        self._readers -= 1
        self.finished = self.finished or finished
        if not finished:
            self._explain_short_end(context, begun=begun)

    def _explain_short_end(self, context: Context[OpenAIRequest], *, begun: bool) -> None:
        """Raises why a stream ended without a finish reason, where that is known."""
        if self._cut is not None:
            raise self._cut
        if context.is_stopped:
            raise Cancelled("the request was stopped")
        if not begun:
            raise StreamIncomplete("the engine's stream ended without an item")

    async def _wait_for_client(self, delivery: Delivery) -> None:
        self._waits_for_client += 1
        try:
            await delivery.room()
        finally:
            self._waits_for_client -= 1

    # -- what may end it from outside

    @property
    def waits_for_client(self) -> bool:
        """Whether every stream that is read waits for the client, so that its engine is not to blame."""
        return 0 < self._readers == self._waits_for_client

    def lose_client(self) -> None:
        """End it because the client is gone: nothing is of use any more."""
        self.client_gone = True
        self._kill()

    def cut(self, reason: PenstockError) -> None:
        """End it with this error, unless it is ending already."""
        if self._cut is None and not self.client_gone and not self.is_complete:
            self._cut = reason
            self._kill()

    def _kill(self) -> None:
        """Kill the request; a graph that ignores that is cancelled."""
        self.context.kill()
        if self._forget_patience is None and not self.is_complete:
            self._forget_patience = call_later(KILL_GRACE_S, self._reading.cancel)


def _lost_request(error: BaseException) -> Exception:
    """What a stage raised, as an Exception: it loses this request only. Raises what is not a stage's."""
    if isinstance(error, Exception):
        return error
    raise_if_ours(error)
    failure = to_error(error)
    failure.__cause__ = error
    return failure


def _raise_error(item: Annotated[BackendOutput]) -> None:
    if (error := error_of(item)) is not None:
        raise error


def _finished(output: BackendOutput) -> bool:
    """True; raises if the choice finished with an error."""
    reason = output.finish_reason
    if reason is not None and reason.is_error:
        raise BackendUnknown(reason.message)
    return True
