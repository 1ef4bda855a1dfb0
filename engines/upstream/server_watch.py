"""ServerWatch: looks at a server's health until it is gone or was started again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from math import inf

import anyio

from pipeline import Control, PenstockError
from pipeline.errors import CannotConnect, EngineShutdown, ResponseTimeout

from .client import Client
from .errors import of_status
from .http_exchange import Exchange

HEALTH_S = 5.0
"""Longest wait for one answer."""

FAILURES = 3
"""How many looks in a row may fail by silence or a broken connection, as those of a server that is very busy do."""


class ServerWatch:
    """Reads `/health` by one connection of its own, which a restart breaks; then the incarnation is compared.

    `headers` go with each request, `known` is the incarnation at the start, `incarnation` returns the present one.
    `refresh` is called after each look at a server that is there.
    """

    def __init__(
        self,
        client: Client,
        headers: Mapping[str, str],
        known: str | None,
        incarnation: Callable[[], Awaitable[str | None]],
        refresh: Callable[[], Awaitable[None]],
        every_s: float,
    ) -> None:
        self._client, self._headers, self._every_s = client, headers, every_s
        self._known, self._incarnation, self._refresh = known, incarnation, refresh
        self._failures, self._failed_s = 0, -inf
        self._was_broken = True
        self._is_due, self._has_looked = anyio.Event(), anyio.Event()

    async def run(self) -> None:
        """Watch until the server is gone, then raise: CannotConnect if it takes no connection, EngineShutdown if it
        was started again or its engine has ended, ResponseTimeout or another error after several looks without an
        answer. A server without `/health` is only watched for restarts."""
        while True:
            self._is_due, has_looked, self._has_looked = anyio.Event(), self._has_looked, anyio.Event()
            try:
                await self._look()
            except (CannotConnect, EngineShutdown):
                raise
            except PenstockError:
                self._note_failure()
                if self._failures >= FAILURES:
                    raise
            else:
                self._failures = 0
            has_looked.set()
            if not self._failures:
                with anyio.move_on_after(HEALTH_S):
                    await self._refresh()
            with anyio.move_on_after(self._every_s):
                await self._is_due.wait()

    async def look_now(self) -> None:
        """Look at once, and return after that, unless the server was found to be gone: `run` raises then."""
        self._is_due.set()
        await self._has_looked.wait()

    def _note_failure(self) -> None:
        """Count a failure, unless one has counted a moment ago: requests that fail at a busy server look often."""
        self._was_broken = True
        if (now_s := anyio.current_time()) >= self._failed_s + self._every_s:
            self._failures, self._failed_s = self._failures + 1, now_s

    async def _look(self) -> None:
        with anyio.move_on_after(HEALTH_S):
            async with Exchange(self._client, Control()) as exchange:
                status = await exchange.send("GET", "/health", self._headers)
                body = await exchange.body()
                await exchange.finish()
            if status == 503:
                raise EngineShutdown("the engine of the server has ended: /health is 503")
            if status >= 500:
                raise of_status(status, body)
            if self._was_broken or exchange.has_reconnected:
                await self._compare()
            return
        raise ResponseTimeout(f"/health was silent for {HEALTH_S:g} s")

    async def _compare(self) -> None:
        """Raise EngineShutdown if another incarnation answers now."""
        present = await self._incarnation()
        self._was_broken = False
        if present != self._known and None not in (present, self._known):
            raise EngineShutdown("the server was started again")
