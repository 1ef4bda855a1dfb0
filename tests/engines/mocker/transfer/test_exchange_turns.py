"""HandoffExchange: a side that ends at any turn of the loop, of either side's waits, leaves nothing behind."""

from __future__ import annotations

from typing import get_args

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import define, field

from engines.mocker.transfer import HandoffExchange, HandoffKey, HandoffOrder, Role, TransferTiming
from pipeline import Cancelled, Control
from pipeline.errors import BackendConnectionTimeout, BackendDisconnected

pytestmark = pytest.mark.anyio

KEY = HandoffKey("10.0.0.1", 8998, 77, "request-1")
ROLES: tuple[Role, ...] = get_args(Role)
WAIT_TURNS = 3
ALL_TURNS = 24
"""More than a hand-over takes; the last ones disturb nobody."""


async def turns(count: int) -> None:
    for _ in range(count):
        await checkpoint()


@define(eq=False)
class Side:
    """Either side; waits for turns instead of time, and says what it was asked for."""

    calls: list[str] = field(factory=list)
    is_waiting: bool = False
    control: Control = field(factory=Control)
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)
    error: Exception | None = None

    def submit(self) -> None:
        self.calls.append("submit")

    async def hold(self) -> TransferTiming:
        await self._wait()
        return TransferTiming(1)

    async def reserve(self) -> int:
        self.calls.append("reserve")
        await self._wait()
        return 1

    def activate(self) -> None:
        self.calls.append("activate")

    def release(self) -> None:
        self.calls.append("release")

    def cancel(self) -> None:
        assert not self.is_waiting
        self.calls.append("cancel")

    async def _wait(self) -> None:
        self.is_waiting = True
        try:
            await turns(WAIT_TURNS)
        finally:
            self.is_waiting = False

    async def attend(self, exchange: HandoffExchange, role: Role, after_turns: int) -> None:
        seat = exchange.source if role == "source" else exchange.destination
        with self.scope:
            await turns(after_turns)
            try:
                async with seat(KEY, self, self.control) as taken:
                    await taken.done()
            except Exception as error:
                self.error = error

    def end(self, how: str) -> None:
        self.scope.cancel() if how == "cancel" else getattr(self.control, how)()


@pytest.mark.parametrize("order", get_args(HandoffOrder))
@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("late", [None, *ROLES])
async def test_at_whatever_turn_a_side_ends_both_give_back_once_what_they_have(
    order: HandoffOrder, how: str, role: Role, late: Role | None
) -> None:
    went_well = []
    for turn in range(ALL_TURNS):
        exchange, sides = HandoffExchange(order), {"source": Side(), "destination": Side()}
        async with anyio.create_task_group() as tasks:
            for coming in ROLES:
                tasks.start_soon(sides[coming].attend, exchange, coming, WAIT_TURNS if coming == late else 0)
            await turns(turn)
            sides[role].end(how)
        source, destination = sides["source"].calls, sides["destination"].calls
        has_moved = "release" in source
        assert source in ([], ["submit", "release"], ["submit", "cancel"])
        assert destination in ([], ["reserve", "cancel"], ["reserve", "activate"])
        assert has_moved == ("activate" in destination)
        assert exchange.meetings == exchange.waiting == 0
        for side in sides.values():
            told = (Cancelled, BackendDisconnected, BackendConnectionTimeout)
            assert side.error is None or (isinstance(side.error, told) and not has_moved)
        went_well.append(has_moved)
    assert not went_well[0]
    assert went_well[-1]
