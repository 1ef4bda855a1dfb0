"""NatsConnection: one connection of this process to a deployment's NATS servers, shared by store, events and objects.

    open ──► session ──► lost ──► back-off ──► session ──► ...

It is connected again for ever. Whoever works over it starts anew with each session, see `each_session`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from random import Random

import anyio
from anyio import CancelScope
from anyio.lowlevel import current_token

from pipeline import CannotConnect, PenstockError, Unavailable
from pipeline.loop import clock
from pipeline.rx import AnyIOScheduler, DisposableBase

from ..log_limit import LogLimit
from .broker_session import BrokerSession, PermanentRefusal
from .options import NatsOptions, ServerAddress, parse_addresses

_log = logging.getLogger(__name__)


class NatsConnection:
    """See the module. `scheduler` runs its background work, `rng` spreads the attempts of many processes.

    `urls` is `nats://host:port[,host:port]`, see `parse_addresses`. Each of the planes over it opens and closes it; the
    last one that closes it ends the connection.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        scheduler: AnyIOScheduler,
        options: NatsOptions | None = None,
        *,
        rng: Random | None = None,
    ) -> None:
        self.options = options or NatsOptions()
        self.scheduler = scheduler
        self.sessions = 0
        """Connections made so far; all but the first are reconnects."""
        self.slow_drops = 0
        """Messages that were dropped because this process was too slow to read them."""
        self._addresses = parse_addresses(urls)
        self.rng = rng or Random()
        self._users = 0
        self._session: BrokerSession | None = None
        self._changed = anyio.Event()
        self._opening = anyio.Lock()
        self._running: DisposableBase | None = None
        self._ended = anyio.Event()
        self._slow_log = LogLimit(_log)

    def __str__(self) -> str:
        return ",".join(map(str, self._addresses))

    @property
    def is_connected(self) -> bool:
        """Whether there is a session now."""
        return self._present is not None

    @property
    def _present(self) -> BrokerSession | None:
        return None if self._session is None or self._session.lost.is_set() else self._session

    async def open(self) -> None:
        """Connect, if no other user has. Each `open` needs its `close`.

        Raise CannotConnect, with the addresses and the reason, on trio, after `connect_timeout_s`, and at once if every
        server refuses for good: the login, a version before 2.11, no JetStream.
        """
        if not isinstance(current_token().native_token, asyncio.AbstractEventLoop):
            raise CannotConnect(f"{self}: the client library of NATS, nats-py, runs on asyncio only, and this is trio")
        async with self._opening:
            if not self._users:
                first = await self._connect_first()
                self._set(first)
                self._ended = anyio.Event()
                self._running = self.scheduler.spawn(lambda scope: self._run(scope, first))
            self._users += 1

    async def close(self) -> None:
        """Give the connection up; the last user's call ends it. A call without its `open` does nothing."""
        async with self._opening:
            if not self._users:
                return
            self._users -= 1
            if self._users or self._running is None:
                return
            self._running.dispose()
            self._running = None
            await self._ended.wait()

    async def each_session(self, work: Callable[[BrokerSession], Awaitable[None]]) -> None:
        """Call `work` with the present session and, when that is lost, with each later one; until it is cancelled.

        `work` is cut short by the loss. If it fails otherwise, it is called again after a pause of `reconnect_max_s`;
        if it returns, with the next session.
        """
        done: BrokerSession | None = None
        failures = LogLimit(_log)
        while True:
            while (session := self._present) is None or session is done:
                await self._changed.wait()
            done = session
            try:
                with session.call():
                    await work(session)
            except PenstockError as error:
                if not session.lost.is_set():
                    failures.warning("%s: %s", self, error)
                    done = None
                    await anyio.sleep(self.options.reconnect_max_s)

    async def session(self, deadline_s: float) -> BrokerSession:
        """Return the present session, or the next one. Raise Unavailable at the deadline, of the loop's clock."""
        with CancelScope(deadline=deadline_s):
            while (session := self._present) is None:
                if not self._users:
                    raise Unavailable(f"the connection to {self} is closed")
                await self._changed.wait()
            return session
        raise Unavailable(f"there is no connection to {self}")

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[BrokerSession]:
        """Give the present session, or the next one, for one call: `call_timeout_s` bounds the wait and the block.

        Raise Unavailable as `BrokerSession.call` does.
        """
        now_s, timeout_s = clock(), self.options.call_timeout_s
        deadline_s = now_s() + timeout_s
        session = await self.session(deadline_s)
        with session.call(max(0.0, deadline_s - now_s())):
            yield session

    def session_now(self) -> BrokerSession:
        """Return the present session. Raise Unavailable if there is none."""
        if (session := self._present) is None:
            raise Unavailable(f"there is no connection to {self}")
        return session

    def steady_since_s(self) -> float:
        """Return since when, by the loop's clock, servers have answered without a pause; infinity while they do not."""
        session = self._present
        return session.steady_since_s if session is not None and session.is_steady else math.inf

    # -- the connection's own task

    async def _run(self, scope: CancelScope, first: BrokerSession) -> None:
        session, pause_s, now_s = first, self.options.reconnect_min_s, clock()
        try:
            with scope:
                while True:
                    begun_s = now_s()
                    await self._use(session)
                    if now_s() - begun_s >= self.options.reconnect_max_s:  # not one that is lost each time
                        pause_s = self.options.reconnect_min_s
                    session, pause_s = await self._connect_again(pause_s)
                    self._set(session)
        finally:
            self._ended.set()

    async def _use(self, session: BrokerSession) -> None:
        try:
            await session.beat()
            _log.warning("%s: the connection is lost: %s", session.address, session.loss)
        finally:
            self._set(None)
            await session.end()

    def _set(self, session: BrokerSession | None) -> None:
        self._session = session
        self.sessions += session is not None
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _connect_first(self) -> BrokerSession:
        now_s = clock()
        deadline_s = now_s() + self.options.connect_timeout_s
        errors: dict[ServerAddress, CannotConnect] = {}
        pause_s = self.options.reconnect_min_s
        while True:
            for number, address in enumerate(self._addresses):
                share_s = (deadline_s - now_s()) / (len(self._addresses) - number)  # one that is silent leaves time
                if share_s <= 0:
                    break
                try:
                    return await self._attempt(address, share_s)
                except CannotConnect as error:
                    errors[address] = error
            if now_s() + pause_s >= deadline_s or all(isinstance(e, PermanentRefusal) for e in errors.values()):
                raise CannotConnect("; ".join(str(error) for error in errors.values()) or f"no time for {self}")
            await anyio.sleep(pause_s)
            pause_s *= 2

    async def _connect_again(self, pause_s: float) -> tuple[BrokerSession, float]:
        """Return the next session, and the pause before an attempt after it. The first pause is up to `pause_s`."""
        limit, addresses = LogLimit(_log), list(self._addresses)
        while True:
            await anyio.sleep(self.rng.uniform(0, pause_s))
            pause_s = min(2 * pause_s, self.options.reconnect_max_s)
            self.rng.shuffle(addresses)
            for address in addresses:
                try:
                    session = await self._attempt(address, self.options.connect_timeout_s)
                except CannotConnect as error:
                    limit.warning("%s", error)
                else:
                    _log.warning("%s: connected again", address)
                    return session, pause_s

    async def _attempt(self, address: ServerAddress, timeout_s: float) -> BrokerSession:
        session = BrokerSession(address, self.options, self._dropped)
        await session.connect(timeout_s)
        return session

    def _dropped(self) -> None:
        self.slow_drops += 1
        self._slow_log.warning("%s: this process reads too slowly: %d messages dropped so far", self, self.slow_drops)
