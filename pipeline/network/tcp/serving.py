"""TcpServing: an engine that serves the calls of one instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from pipeline import AsyncEngine, Context, Disconnected, Gate, InvalidArgument, to_error
from pipeline.foreign import raise_if_ours
from pipeline.wire import from_plain, item_to_msgpack, token_to_msgpack

from ..names import Instance
from ..requests import CallMeter, MeteredCall, Serving, count_taken
from .items import gives_tokens
from .messages import CallHead
from .service import ServedCall


class TcpServing(Serving):
    """Each request has a context of its own, which the caller's stop and kill reach.

    `takes` is the type of the payloads. `on_refuse` is called when no new calls are taken any more.
    """

    def __init__(
        self,
        instance: Instance,
        engine: AsyncEngine[Any, Any],
        takes: Any,
        meter: CallMeter | None,
        on_refuse: Callable[[TcpServing], object],
    ) -> None:
        self.instance = instance
        self._engine = engine
        self._takes = takes
        self._gives_tokens = gives_tokens(engine)
        self._meter = meter
        self._on_refuse = on_refuse
        self._calls: dict[ServedCall, None] = {}  # in the order they came, which is that in which they are cut
        self._idle = anyio.Event()

    @property
    def running(self) -> int:
        return len(self._calls)

    def refuse(self) -> None:
        self._on_refuse(self)

    async def drained(self) -> None:
        while self._calls:
            await self._idle.wait()

    def cut(self) -> None:
        self.refuse()
        for call in list(self._calls):
            call.cut(Disconnected(f"{self.instance} was lost"))

    async def take(self, call: ServedCall, head: CallHead) -> None:
        """Serve a call to its end."""
        try:
            payload = from_plain(head.payload, self._takes)
        except InvalidArgument as error:
            call.fail(error)
            return
        request = call.context(head, payload)
        metered = None if self._meter is None else self._meter.begun(payload)
        if not self._calls:
            self._idle = anyio.Event()
        self._calls[call] = None
        try:
            await self._answer(call, request, metered, is_short=head.has_short_items)
            call.end()
        except BaseException as error:
            raise_if_ours(error)
            if self._meter is not None:
                self._meter.failed()
            call.fail(to_error(error))
        finally:
            self._end(call, metered)

    async def _answer(
        self, call: ServedCall, request: Context[Any], metered: MeteredCall | None, *, is_short: bool
    ) -> None:
        gate = Gate()
        async with await self._engine.generate(request) as stream:
            call.begin()
            if is_short and self._gives_tokens:
                stream.feed(count_taken(metered, _TokenTaker(call, gate).take), gate)
            async for item in stream:
                if not gate.is_open:
                    await call.room()
                    gate.is_open = True
                if metered is not None:
                    try:  # noqa: SIM105  # as in the embedded runtime
                        metered.tokens += len(item.data.token_ids)
                    except (AttributeError, TypeError):
                        pass
                if not call.send_item(item_to_msgpack(item, is_short=is_short)):
                    await call.room()

    def _end(self, call: ServedCall, metered: MeteredCall | None) -> None:
        self._calls.pop(call, None)
        if self._meter is not None and metered is not None:
            self._meter.ended(metered, cancelled=call.was_stopped)
        if not self._calls:
            self._idle.set()


class _TokenTaker:
    """Sends plain tokens while the task that serves the call waits for its engine."""

    __slots__ = ("_call", "_gate")

    def __init__(self, call: ServedCall, gate: Gate) -> None:
        self._call, self._gate = call, gate

    def take(self, token_id: int, index: int | None) -> bool:
        """See `pipeline.Take`."""
        call = self._call
        has_room = call.send_token(token_id) if index is None else call.send_item(token_to_msgpack(token_id, index))
        if not has_room:
            self._gate.is_open = False  # the task, which gets the next item, can wait for room
        return True
