"""TransferExchange: how the two sides of a transfer meet, and which sides are refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncGenerator
from typing import Any
from uuid import UUID

import anyio
import pytest
from attrs import evolve

from engines.mocker.transfer import TransferExchange, TransferKey, TransferOrder, TransferRole
from pipeline import InvalidArgument, WorkerOverloaded
from pipeline.errors import BackendConnectionTimeout, BackendDisconnected
from pipeline.protocols import BootstrapInfo
from tests.engines.mocker.transfer.worlds import (
    KEY,
    LATE_S,
    ORDERS,
    ROLES,
    Pair,
    ScriptedSide,
    SlowToLeave,
    attend,
    pair,
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("late", ROLES)
async def test_the_blocks_change_hands_whichever_side_comes_first(order: TransferOrder, late: TransferRole) -> None:
    calls: list[str] = []
    both = pair(order, ScriptedSide(2.0, shared=calls), ScriptedSide(1.0, shared=calls))
    started_s = anyio.current_time()
    await both.run(late=late)
    first = ["submit", "hold"], ["reserve"]
    steps = [*first[0], *first[1]] if order == "source_first" else [*first[1], *first[0]]
    assert calls == [*steps, "activate", "release"]
    assert both.errors == {"source": None, "destination": None}
    both.check_freed()
    # The side whose turn it is does not wait for the other one; 64 missing tokens take 64 ms.
    own_s = {"source": 2.0, "destination": 1.0}
    first_s = own_s[late] if late != order.removesuffix("_first") else sum(own_s.values())
    assert both.ended_s["destination"] - started_s == pytest.approx(LATE_S + first_s + 0.064)


async def test_a_full_hit_at_the_destination_takes_no_time_and_every_step() -> None:
    both = pair(destination=ScriptedSide(missing_tokens=0))
    started_s = anyio.current_time()
    await both.run()
    assert anyio.current_time() == started_s
    assert both.sides["destination"].calls == ["reserve", "activate"]
    assert both.sides["source"].calls == ["submit", "hold", "release"]


async def test_a_source_learns_when_its_blocks_are_held_and_may_yield_meanwhile() -> None:
    """A worker answers as soon as its prefill is done; the transfer does not depend on further reads."""
    exchange, source, destination = TransferExchange(), ScriptedSide(1.0), ScriptedSide()

    async def answer() -> AsyncGenerator[str, None]:
        async with exchange.source(KEY, source) as taken:
            await taken.held()
            yield "prefilled"
            await taken.done()
            yield "released"

    items = answer()
    started_s = anyio.current_time()
    assert await anext(items) == "prefilled"
    assert anyio.current_time() - started_s == pytest.approx(1.0)
    assert await attend(exchange, "destination", destination) is None
    assert source.calls == ["submit", "hold", "release"]
    assert await anext(items) == "released"
    await items.aclose()
    assert exchange.sessions == 0


@pytest.mark.parametrize("order", ORDERS)
async def test_it_is_known_how_many_have_their_blocks_on_the_way(order: TransferOrder) -> None:
    both = pair(order, ScriptedSide(2.0), ScriptedSide(1.0))
    seen = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(both.run)
        for wait_s in (
            0.5,
            2.0,
            0.53,
            1.0,
        ):  # the sides prepare at 0.5 s and 2.5 s; from 3 s on the transfer takes 64 ms
            await anyio.sleep(wait_s)
            seen.append((both.exchange.sessions, both.exchange.transfers))
    assert seen == [(1, 0), (1, 0), (1, 1), (0, 0)]
    gone = pair(order, ScriptedSide(2.0), ScriptedSide(missing_tokens=10**9))
    await gone.run()
    assert gone.exchange.transfers == 0


@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room", "handoff_id", "request_id"])
async def test_a_changed_identity_is_refused_without_disturbing_the_waiting_side(name: str) -> None:
    other: dict[str, Any] = {
        "bootstrap_host": "10.0.0.2",
        "bootstrap_port": 1,
        "bootstrap_room": 2,
        "handoff_id": UUID(int=3),
        "request_id": "x",
    }
    exchange, source, stranger = TransferExchange(), ScriptedSide(), ScriptedSide()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attend, exchange, "source", source)
        await anyio.wait_all_tasks_blocked()
        error = await attend(exchange, "destination", stranger, evolve(KEY, **{name: other[name]}))
        assert isinstance(error, InvalidArgument)
        assert error.field == name
        assert (exchange.waiting, exchange.sessions) == (1, 1)
        assert await attend(exchange, "destination", ScriptedSide()) is None
    assert stranger.calls == []
    assert source.calls == ["submit", "hold", "release"]


@pytest.mark.parametrize("role", ROLES)
async def test_a_seat_is_taken_once(role: TransferRole) -> None:
    exchange, side, second = TransferExchange(), ScriptedSide(), ScriptedSide()
    other: TransferRole = "destination" if role == "source" else "source"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attend, exchange, role, side)
        await anyio.wait_all_tasks_blocked()
        assert isinstance(await attend(exchange, role, second), InvalidArgument)
        assert await attend(exchange, other, ScriptedSide()) is None
    assert second.calls == []
    assert exchange.sessions == 0


async def test_rooms_without_a_handoff_id_meet_too() -> None:
    key = TransferKey.of(BootstrapInfo("10.0.0.1", 8998, 5), "request-2")
    exchange = TransferExchange()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attend, exchange, "source", ScriptedSide(), key)
        assert await attend(exchange, "destination", ScriptedSide(), key) is None


async def test_too_many_waiting_sides_are_refused_and_the_awaited_never() -> None:
    exchange, keys = TransferExchange(), [evolve(KEY, bootstrap_room=n, handoff_id=None) for n in range(257)]
    refused = ScriptedSide()
    async with anyio.create_task_group() as tasks:
        for key in keys[:-1]:
            tasks.start_soon(attend, exchange, "source", ScriptedSide(), key)
        await anyio.wait_all_tasks_blocked()
        assert exchange.waiting == 256
        assert isinstance(await attend(exchange, "source", refused, keys[-1]), WorkerOverloaded)
        assert await attend(exchange, "destination", ScriptedSide(), keys[0]) is None
        assert exchange.waiting == 255
        for key in keys[1:-1]:
            assert await attend(exchange, "destination", ScriptedSide(), key) is None
    assert refused.calls == []
    assert exchange.sessions == exchange.waiting == 0


async def test_a_side_that_comes_after_the_other_gave_up_fails_at_once() -> None:
    exchange, side = TransferExchange(), ScriptedSide()
    assert isinstance(await attend(exchange, "source", ScriptedSide(fails_in="hold")), OSError)
    started_s = anyio.current_time()
    error = await attend(exchange, "destination", side)
    assert isinstance(error, BackendDisconnected)
    assert "failed: hold" in str(error)
    assert anyio.current_time() == started_s
    assert side.calls == []
    assert exchange.sessions == 0


async def test_what_the_other_side_will_read_keeps_no_request_alive() -> None:
    exchange, side = TransferExchange(), ScriptedSide(fails_in="hold")
    kept = weakref.ref(side)
    await attend(exchange, "source", side)
    del side
    gc.collect()
    assert kept() is None
    assert "failed: hold" in str(await attend(exchange, "destination", ScriptedSide()))


async def test_a_side_that_gave_up_alone_may_come_again() -> None:
    exchange = TransferExchange()
    await attend(exchange, "source", ScriptedSide(fails_in="hold"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attend, exchange, "source", ScriptedSide())
        await anyio.wait_all_tasks_blocked()
        assert await attend(exchange, "destination", ScriptedSide()) is None
    assert exchange.sessions == 0


@pytest.mark.parametrize("first", ROLES)
async def test_two_that_met_in_vain_may_meet_again(first: TransferRole) -> None:
    both = pair(source=ScriptedSide(fails_in="hold"))
    await both.run()
    assert isinstance(both.errors["source"], OSError)
    again = Pair(both.exchange, ScriptedSide(), ScriptedSide())
    await again.run(late="destination" if first == "source" else "source")
    assert again.errors == {"source": None, "destination": None}
    again.check_freed()


async def test_after_the_rendezvous_limit_nothing_was_missed() -> None:
    exchange = TransferExchange()
    await attend(exchange, "source", ScriptedSide(fails_in="hold"))
    await anyio.sleep(30.0)
    assert isinstance(await attend(exchange, "destination", ScriptedSide()), BackendConnectionTimeout)


@pytest.mark.parametrize("first", ROLES)
@pytest.mark.parametrize("request_id", [KEY.request_id, "of another request"])
async def test_a_place_where_one_side_takes_its_time_to_go_is_free_for_the_next(
    first: TransferRole, request_id: str
) -> None:
    """A retry, or another request with the same room, is not disturbed when the old side leaves."""
    both = pair(destination=SlowToLeave(1_000.0))
    key = evolve(KEY, request_id=request_id)
    sides: dict[TransferRole, ScriptedSide] = {"source": ScriptedSide(60.0), "destination": ScriptedSide(60.0)}
    errors: list[Exception | None] = []

    async def come(role: TransferRole) -> None:
        errors.append(await attend(both.exchange, role, sides[role], key))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(both.run, both.controls["destination"].stop, 5.0)
        await anyio.sleep(6.0)
        tasks.start_soon(come, first)
        await anyio.sleep(1.0)
        tasks.start_soon(come, "destination" if first == "source" else "source")
        await anyio.sleep(50.0)
        assert both.exchange.sessions == 1
    assert both.ended_s["destination"] - both.ended_s["source"] == 100.0
    assert errors == [None, None]
    both.check_freed()


async def test_a_meeting_is_free_again_when_it_is_over() -> None:
    exchange = TransferExchange()
    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attend, exchange, "source", ScriptedSide())
            assert await attend(exchange, "destination", ScriptedSide()) is None


async def test_an_unknown_order_is_refused_before_either_side_comes() -> None:
    order: Any = "both_first"
    with pytest.raises(InvalidArgument):
        TransferExchange(order)
