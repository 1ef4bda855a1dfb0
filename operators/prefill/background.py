"""Handovers: the owner of all prefills under way: how many there may be, and that each has an end.

Source: dynamo lib/llm/src/kv_router/prefill_router/execution.rs. Other than there background work has an owner, which
waits for it at its own end and then cuts it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Any

import anyio

from pipeline import Context, PenstockError, ResourceExhausted, StreamClosed, Unavailable
from pipeline.rx import AnyIOScheduler, DisposableBase

from .transfer import Handover

_log = logging.getLogger(__name__)

_STOPPED_S = 1.0
"""How long an attempt that is replaced may take to end in order, and again when it is killed."""


class Handovers:
    """Runs hand-overs as tasks of the scheduler, at most `limit` at once, with strong references to all of them.

    Other work that must outlive its caller, `receive`, counts among them.
    """

    def __init__(self, scheduler: AnyIOScheduler, limit: int) -> None:
        self._scheduler = scheduler
        self._limit = limit
        self._tasks: dict[object, DisposableBase] = {}
        self._of_request: dict[Hashable, list[Handover]] = {}
        self._starting: dict[object, Callable[[], object]] = {}
        self._is_cut = False
        self._none = anyio.Event()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._tasks)

    def check_room(self) -> None:
        """Raises ResourceExhausted where no more may begin, Unavailable behind the end."""
        if self._is_cut:
            raise Unavailable("the prefill router is closed")
        if len(self._tasks) >= self._limit:
            raise ResourceExhausted(f"{len(self._tasks)} prefills are under way already")

    def start(self, handover: Handover, request: Context[Any]) -> None:
        """Begins a hand-over for a client's request, whose stop or kill it is told of.

        Raises StreamClosed where the scheduler does not run.
        """
        key = request.registry
        running = self._of_request.setdefault(key, [])
        running.append(handover)
        forget = request.control.on_stop(handover.client_left)

        def end() -> None:
            forget()
            handover.give_up()
            running.remove(handover)
            if not running:
                del self._of_request[key]

        self._spawn(handover, handover.run, end)

    async def replace(self, key: Hashable) -> None:
        """Ends the prefills of earlier attempts of the same request, whose decode is over.

        In order first, so that the worker frees its blocks; where that does not help, at once.
        """
        for earlier in [handover for handover in self._of_request.get(key, ()) if handover.is_left]:
            earlier.request.stop()
            with anyio.move_on_after(_STOPPED_S):
                await earlier.ended()
                continue
            earlier.request.kill()
            with anyio.move_on_after(_STOPPED_S):
                await earlier.ended()

    def receive(self, work: Callable[[], Awaitable[object]], timeout_s: float) -> None:
        """Runs something in the background for a caller that is gone; what it raises is logged. Not behind the end."""
        if self._is_cut:
            return

        async def run() -> None:
            try:
                with anyio.move_on_after(timeout_s):
                    await work()
            except PenstockError as error:
                _log.debug("nobody waits for this any more: %s", error.render())
            except Exception:
                _log.exception("what was left of a hand-over failed")

        with suppress(StreamClosed):  # the owner is gone as well
            self._spawn(object(), run, lambda: None)

    async def drained(self) -> None:
        """Returns when nothing runs any more."""
        while self._tasks:
            self._none = anyio.Event()
            await self._none.wait()

    def cut(self) -> None:
        """Ends everything now, for good."""
        self._is_cut = True
        for task in list(self._tasks.values()):
            task.dispose()
        for forget in list(self._starting.values()):  # a scheduler that is ending too never starts them
            forget()

    def _spawn(self, owned: object, run: Callable[[], Awaitable[None]], end: Callable[[], object]) -> None:
        """Runs it as a task; `end` is called behind it, once, also if it never starts."""

        async def work(scope: anyio.CancelScope) -> None:
            if self._starting.pop(owned, None) is None:
                return
            try:
                with scope:
                    await run()
            finally:
                forget()

        def forget() -> None:
            self._starting.pop(owned, None)
            end()
            self._tasks.pop(owned, None)
            if not self._tasks:
                self._none.set()

        self._starting[owned] = forget
        try:
            self._tasks[owned] = self._scheduler.spawn(work)
        except BaseException:
            forget()
            raise
