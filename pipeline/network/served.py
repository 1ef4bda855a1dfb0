"""Served: one engine at one endpoint, from its publication to its end."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio

from pipeline import Unavailable

from .discovery import Lease, Model
from .names import Instance
from .request_plane import Serving

if TYPE_CHECKING:
    from .runtime import Runtime

_log = logging.getLogger(__name__)


class Served:
    """What `runtime.serve` returns. It ends with its `close`, or with the runtime."""

    def __init__(self, runtime: Runtime, instance: Instance, model: Model | None, serving: Serving) -> None:
        self.instance = instance
        self.leases: tuple[Lease, ...] = ()
        """While it is published; to abandon them is to stop renewing without a word, as a hanging process does."""
        self._runtime = runtime
        self._model = model
        self._serving = serving
        self._is_withdrawn = False

    @property
    def instance_id(self) -> int:
        return self.instance.instance_id

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return self._serving.running

    async def publish(self) -> None:
        """Makes it visible; again after `unpublish`. If the card is refused the instance is not visible either.

        Raises Unavailable once it has been withdrawn or cut: nobody could reach it.
        """
        if self._is_withdrawn:
            raise Unavailable(f"{self.instance} takes no requests any more")
        if self.leases:
            return
        discovery = self._runtime.discovery
        lease = await discovery.register(self.instance)
        try:
            card = () if self._model is None else (await discovery.register_model(self._model),)
        except BaseException:
            await lease.release()
            raise
        self.leases = (lease, *card)

    async def unpublish(self) -> None:
        """Makes it invisible; who knows it may still ask it."""
        leases, self.leases = self.leases, ()
        async with AsyncExitStack() as releases:
            for lease in leases:
                releases.push_async_callback(lease.release)

    async def withdraw(self) -> None:
        """Makes it invisible, then takes no new request. If discovery fails the leases lapse, which is logged."""
        self._is_withdrawn = True
        try:
            await self.unpublish()
        except Exception:
            _log.exception("%s could not be unpublished", self.instance)
        finally:
            self._serving.refuse()

    async def drained(self) -> None:
        """Returns when nothing runs."""
        await self._serving.drained()

    async def close(self, graceful_timeout_s: float | None = None) -> None:
        """Withdraws it, waits for what runs and cuts what is left after the time, by default the runtime's.

        Callers that are cut get Disconnected.
        """
        bound_s = self._runtime.graceful_timeout_s if graceful_timeout_s is None else graceful_timeout_s
        try:
            await self.withdraw()
            with anyio.move_on_after(bound_s):
                await self.drained()
        finally:
            self.cut()

    def cut(self) -> None:
        """Takes no new request and ends what runs: the engine is killed, callers get Disconnected."""
        self._is_withdrawn = True
        self._serving.cut()
        if self._runtime.served.get(self.instance.key) is self:  # another may serve the instance meanwhile
            del self._runtime.served[self.instance.key]

    def abort(self) -> None:
        """What a crash looks like: it cannot be reached any more, what runs is cut, and discovery drops it at once.

        For a crash that discovery notices by the lease only, `cut` it and abandon its leases.
        """
        self.cut()
        if self.leases:
            self._runtime.scheduler.spawn(lambda _: self.withdraw())
