"""PrefillTasks: the owner of all prefills under way: how many there may be, and that each of them ends.

Source: dynamo lib/llm/src/kv_router/prefill_router/execution.rs. Other than there background work has an owner, which
waits for it at its own end and then cancels it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Any

import anyio

from pipeline import Context, PenstockError, ResourceExhausted, StreamClosed, Unavailable
from pipeline.rx import AnyIOScheduler, DisposableBase

from .task import PrefillTask

_log = logging.getLogger(__name__)

_STOPPED_S = 1.0
"""How long a prefill that is replaced may take to end in order, and again when it is killed."""


class PrefillTasks:
    """Runs prefills as tasks of the scheduler, at most `limit` at once, with strong references to all of them.

    Other work that must outlive its caller, see `run_detached`, counts among them.
    """

    def __init__(self, scheduler: AnyIOScheduler, limit: int) -> None:
        self._scheduler = scheduler
        self._limit = limit
        self._tasks: dict[object, DisposableBase] = {}
        self._of_request: dict[Hashable, list[PrefillTask]] = {}
        self._starting: dict[object, Callable[[], object]] = {}
        self._is_cut = False
        self._idle = anyio.Event()

    def __len__(self) -> int:
        """The number of prefills under way."""
        return len(self._tasks)

    def check_room(self) -> None:
        """Raise ResourceExhausted if no more may begin, Unavailable after the end."""
        if self._is_cut:
            raise Unavailable("the prefill router is closed")
        if len(self._tasks) >= self._limit:
            raise ResourceExhausted(f"{len(self._tasks)} prefills are under way already")

    def start(self, prefill: PrefillTask, request: Context[Any]) -> None:
        """Begin a prefill for a client's request, whose stop or kill reaches it as `client_left`.

        Raise StreamClosed if the scheduler does not run.
        """
        key = request.registry
        running = self._of_request.setdefault(key, [])
        running.append(prefill)
        forget = request.control.on_stop(prefill.client_left)

        def end() -> None:
            forget()
            prefill.give_up()
            running.remove(prefill)
            if not running:
                del self._of_request[key]

        self._spawn(prefill, prefill.run, end)

    async def replace(self, key: Hashable) -> None:
        """End the prefills of earlier attempts of the same request, whose decode is over.

        By a stop first, so that the worker frees its blocks; if that does not help, by a kill.
        """
        for earlier in [prefill for prefill in self._of_request.get(key, ()) if prefill.decode_is_over]:
            for end in (earlier.request.stop, earlier.request.kill):
                end()
                with anyio.move_on_after(_STOPPED_S):
                    await earlier.ended()
                    break

    def run_detached(self, work: Callable[[], Awaitable[object]], timeout_s: float) -> None:
        """Run something in the background for a caller that is gone, and log what it raises; not after the end."""
        if self._is_cut:
            return

        async def run() -> None:
            try:
                with anyio.move_on_after(timeout_s):
                    await work()
            except PenstockError as error:
                _log.debug("the rest of a prefill whose caller is gone failed: %s", error.render())
            except Exception:
                _log.exception("the rest of a prefill whose caller is gone failed")

        with suppress(StreamClosed):  # the owner is gone as well
            self._spawn(object(), run, lambda: None)

    async def drained(self) -> None:
        """Return when nothing runs any more."""
        while self._tasks:
            self._idle = anyio.Event()
            await self._idle.wait()

    def cut(self) -> None:
        """Cancel everything now; nothing more begins."""
        self._is_cut = True
        for task in list(self._tasks.values()):
            task.dispose()
        for forget in list(self._starting.values()):  # a scheduler that is ending too never starts them
            forget()

    def _spawn(self, owned: object, run: Callable[[], Awaitable[None]], end: Callable[[], object]) -> None:
        """Run it as a task; `end` is called once after it, also if it never starts."""

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
                self._idle.set()

        self._starting[owned] = forget
        try:
            self._tasks[owned] = self._scheduler.spawn(work)
        except BaseException:
            forget()
            raise
