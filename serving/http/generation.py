"""Generation: one request through its graph, from its first item to its last, and what ended it.

    graph ── item ──► usage, metrics, delivery
    client gone, silence ── kill ──► graph

Knows nothing of HTTP: what becomes of the items is the delivery's business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
from attrs import define, field

from operators import PROMPT_TOKENS
from pipeline import (
    Annotated,
    AsyncEngine,
    Cancelled,
    CannotConnect,
    Context,
    Disconnected,
    EngineShutdown,
    ResponseTimeout,
    StreamIncomplete,
    Unavailable,
    to_error,
)
from pipeline.errors import BackendUnknown
from pipeline.foreign import raise_if_ours
from pipeline.phase import tracker_of
from pipeline.protocols import BackendOutput

from ..openai import UsageCount
from .availability import Availability, Phase
from .delivery import Delivery
from .problems import error_of
from .prompts import OpenAIRequest
from .request_meter import RequestMeter

Graph = AsyncEngine[OpenAIRequest, Annotated[BackendOutput]]
"""What serves a model: OpenAI requests in, detokenized items out."""

LEADING_ANNOTATIONS_MAX = 16
"""Annotations looked past for the first item; after more of them the answer has begun anyway."""

KILL_GRACE_S = 2.0
"""How long a killed graph may take to end before its task is cancelled."""

_LOOKS_PER_SILENCE = 4
"""How often is looked for new items within the time an engine may be silent."""


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
    finish_reasons: list[str] = field(init=False, factory=list)
    """Why each choice ended, in the order they did."""
    _complete: bool = field(init=False, default=False)
    _items: int = field(init=False, default=0)
    _readers: int = field(init=False, default=0)
    _waits_for_client: int = field(init=False, default=0)
    _timed_out: bool = field(init=False, default=False)
    _reading: anyio.CancelScope = field(init=False, factory=anyio.CancelScope)

    async def run(self, delivery: Delivery) -> Exception | None:
        """Reads every prompt's stream to its end, all streams are closed then. Returns what failed first, if any."""
        try:
            with self._reading:
                await self._read_all(delivery)
            if self._reading.cancelled_caught:
                self._explain_short_end(self.context, begun=True)
        except Exception as failure:
            return self._cut_by_server(failure) or failure
        finally:
            self._complete = True
        return None

    def _cut_by_server(self, failure: Exception) -> Unavailable | None:
        """What the client is told in the place of a failure that the server's own end caused."""
        phase = self.availability.phase
        is_killed = phase is Phase.STOPPING and isinstance(failure, Cancelled)
        is_lost = phase is not Phase.READY and isinstance(failure, CannotConnect | Disconnected | EngineShutdown)
        return Unavailable("the server is shutting down", cause=failure) if is_killed or is_lost else None

    async def _read_all(self, delivery: Delivery) -> None:
        if len(self.prompts) == 1:
            await self._read(self.context.with_payload(self.prompts[0]), 0, delivery)
            return
        parts = [self._part(request, position) for position, request in enumerate(self.prompts)]
        failures: Sequence[Exception] = ()
        try:
            async with anyio.create_task_group() as readers:
                for position, part in enumerate(parts):
                    readers.start_soon(self._read, part, position, delivery)
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

    async def _read(self, context: Context[OpenAIRequest], prompt: int, delivery: Delivery) -> None:
        """Reads one prompt's stream. Whatever a stage raises comes as an Exception: it loses this request only."""
        try:
            await self._read_stream(context, prompt, delivery)
        except Exception:
            raise
        except BaseException as error:
            raise_if_ours(error)
            raise to_error(error) from error

    async def _read_stream(self, context: Context[OpenAIRequest], prompt: int, delivery: Delivery) -> None:
        leading, begun, finished = 0, False, False
        self._readers += 1
        async with await self.graph.generate(context) as stream:
            if (prompt_tokens := context.registry.get_optional(PROMPT_TOKENS, int)) is not None:
                self.usage.prompt(prompt, prompt_tokens)
            self.meter.tracked(tracker_of(context))
            async for item in stream:
                self._items += 1
                full = False
                if item.event is not None:
                    _raise_error(item)
                    full = delivery.annotate(item)
                if (output := item.data) is None:
                    leading += 1
                else:
                    if output.finish_reason is not None:
                        finished = _finished(output)
                        self.finish_reasons.append(str(output.finish_reason))
                    self.meter.tokens(len(output.token_ids))
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
        if self._timed_out:
            raise ResponseTimeout("the engine said nothing for too long")
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

    # -- what may end it from outside, each a task of its own

    async def watch_client(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Kills the request when its client goes away; a graph that ignores that is cancelled."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._complete:
            self.lose_client()
            await self._cancel_later()

    def lose_client(self) -> None:
        """The client is gone: nothing is of use any more."""
        self.client_gone = True
        self.context.kill()

    async def watch_silence(self, timeout_s: float) -> None:
        """Kills the request when its engine makes nothing for `timeout_s`, or up to a quarter longer.

        Where every stream that is read waits for the client, the engine is not to blame.
        """
        seen, silent_looks = self._items, 0
        while silent_looks < _LOOKS_PER_SILENCE:
            await anyio.sleep(timeout_s / _LOOKS_PER_SILENCE)
            is_blocked = 0 < self._readers == self._waits_for_client
            silent_looks = 0 if seen != self._items or is_blocked else silent_looks + 1
            seen = self._items
        self._timed_out = True
        self.context.kill()
        await self._cancel_later()

    async def _cancel_later(self) -> None:
        await anyio.sleep(KILL_GRACE_S)
        self._reading.cancel()


def _raise_error(item: Annotated[BackendOutput]) -> None:
    if (error := error_of(item)) is not None:
        raise error


def _finished(output: BackendOutput) -> bool:
    """True; raises if the choice finished with an error."""
    reason = output.finish_reason
    if reason is not None and reason.is_error:
        raise BackendUnknown(reason.message)
    return True
