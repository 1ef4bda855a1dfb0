"""The two sides of a transfer as scripts, each in its task, and what either holds in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args
from uuid import UUID

import anyio
from anyio.lowlevel import checkpoint

from engines.mocker.transfer import (
    SessionEndpoint,
    TransferExchange,
    TransferKey,
    TransferOrder,
    TransferRole,
    TransferTiming,
)
from pipeline import Control
from pipeline.protocols import BootstrapInfo

ORDERS = get_args(TransferOrder)
ROLES: tuple[TransferRole, ...] = get_args(TransferRole)
INFO = BootstrapInfo("10.0.0.1", 8998, 77, UUID(int=7))
KEY = TransferKey.of(INFO, "request-1")
TIMING = TransferTiming(128, 1_000_000, 1.0, "destination_missing")
"""A missing token takes 1 ms."""
LATE_S = 5.0
"""How much later than the other a late side comes."""


async def turns(count: int) -> None:
    """Give other tasks so many turns of the loop."""
    for _ in range(count):
        await checkpoint()


class ScriptedSide:
    """Either side of a transfer: waits `wait_s` seconds and `turns` turns of the loop, and counts its blocks.

    `fails_in` is the call that raises OSError. Sides may record their calls in one `shared` list.
    """

    def __init__(
        self,
        wait_s: float = 0.0,
        *,
        turns: int = 0,
        fails_in: str = "",
        missing_tokens: int = 64,
        shared: list[str] | None = None,
    ) -> None:
        self.wait_s, self.turns = wait_s, turns
        self.fails_in = fails_in
        self.missing_tokens = missing_tokens
        self.calls: list[str] = [] if shared is None else shared
        """The calls that had an effect, in order; waits count when they are over."""
        self.held = 0
        """Whether it holds blocks, as 0 or 1."""
        self.freed = 0
        """How often it gave blocks back."""
        self.is_waiting = False

    def submit(self) -> None:
        self.held += 1
        self._record("submit")

    async def hold(self) -> TransferTiming:
        await self._wait("hold")
        return TIMING

    async def reserve(self) -> int:
        await self._wait("reserve")
        return self.missing_tokens

    def activate(self) -> None:
        assert self.held == 1
        self._record("activate")

    def release(self) -> None:
        self._record("release")
        self._free()

    def cancel(self) -> None:
        assert not self.is_waiting
        self._free()
        self._record("cancel")

    def _free(self) -> None:
        self.freed += self.held
        self.held = 0

    async def _wait(self, name: str) -> None:
        self.is_waiting = True
        try:
            await anyio.sleep(self.wait_s)
            await turns(self.turns)
            self.held = 1
            self._record(name)
        finally:
            self.is_waiting = False

    def _record(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_in:
            raise OSError(name)


class SlowToLeave(ScriptedSide):
    """Takes 100 seconds to end its wait for room, however that ends."""

    async def reserve(self) -> int:
        try:
            return await super().reserve()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(100.0)


def endpoint(
    exchange: TransferExchange,
    role: TransferRole,
    side: ScriptedSide,
    key: TransferKey = KEY,
    control: Control | None = None,
) -> SessionEndpoint[Any]:
    """Return the endpoint of that role, to be entered."""
    return (exchange.source if role == "source" else exchange.destination)(key, side, control)


async def attend(
    exchange: TransferExchange,
    role: TransferRole,
    side: ScriptedSide,
    key: TransferKey = KEY,
    control: Control | None = None,
) -> Exception | None:
    """Take the endpoint, wait for the end, and return the error it ended with."""
    try:
        async with endpoint(exchange, role, side, key, control) as taken:
            await taken.done()
    except Exception as error:
        return error
    return None


class Pair:
    """Both sides of one transfer, each in its task."""

    def __init__(self, exchange: TransferExchange, source: ScriptedSide, destination: ScriptedSide) -> None:
        self.exchange = exchange
        self.sides: dict[TransferRole, ScriptedSide] = {"source": source, "destination": destination}
        self.errors: dict[TransferRole, Exception | None] = {}
        """How each side ended; a cancelled one has no entry."""
        self.scopes: dict[TransferRole, anyio.CancelScope] = {role: anyio.CancelScope() for role in self.sides}
        self.controls: dict[TransferRole, Control] = {role: Control() for role in self.sides}
        self.ended_s: dict[TransferRole, float] = {}

    async def attend(self, role: TransferRole, after_s: float = 0.0, after_turns: int = 0) -> None:
        """Come with that side, later by so much, and wait for its end."""
        try:
            with self.scopes[role]:
                await anyio.sleep(after_s)
                await turns(after_turns)
                self.errors[role] = await attend(self.exchange, role, self.sides[role], control=self.controls[role])
        finally:
            self.ended_s[role] = anyio.current_time()

    async def run(
        self, disturb: Callable[[], object] | None = None, after_s: float = 0.0, *, late: TransferRole | None = None
    ) -> None:
        """Run both sides to their ends; a late one comes `LATE_S` after the other. `disturb` is called meanwhile."""
        async with anyio.create_task_group() as tasks:
            for role in self.sides:
                tasks.start_soon(self.attend, role, LATE_S if role == late else 0.0)
            if disturb is not None:
                await anyio.sleep(after_s)
                disturb()

    def end(self, role: TransferRole, how: str) -> None:
        """Stop, kill or cancel that side."""
        if how == "cancel":
            self.scopes[role].cancel()
        else:
            getattr(self.controls[role], how)()

    def check_freed(self) -> None:
        """Assert that nothing stays open: no session and no block, and that nothing was freed twice."""
        assert self.exchange.sessions == self.exchange.waiting == 0
        source, destination = self.sides["source"], self.sides["destination"]
        assert not source.held
        assert source.freed == ("submit" in source.calls)
        has_decode = "activate" in destination.calls and "cancel" not in destination.calls
        assert destination.held == has_decode
        for side in (source, destination):
            assert max([side.calls.count(call) for call in ("release", "cancel", "activate")]) <= 1


def pair(
    order: TransferOrder = "source_first", source: ScriptedSide | None = None, destination: ScriptedSide | None = None
) -> Pair:
    """Return both sides at an exchange of their own."""
    return Pair(TransferExchange(order), source or ScriptedSide(), destination or ScriptedSide())
