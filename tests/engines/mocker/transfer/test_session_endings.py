"""Sessions that end early: both sides free their blocks once and receive the reason."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random
from typing import get_args
from uuid import UUID
from weakref import ref

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.mocker.transfer import TransferExchange, TransferOrder, TransferRole, TransferTiming
from pipeline import Cancelled, Control, InvalidArgument
from pipeline.errors import BackendConnectionTimeout, BackendDisconnected, BackendResponseTimeout
from tests.engines.mocker.transfer.worlds import (
    KEY,
    ORDERS,
    ROLES,
    Pair,
    ScriptedSide,
    SlowToLeave,
    attend,
    pair,
    turns,
)


@pytest.mark.parametrize("role", ROLES)
async def test_a_side_that_waits_alone_gives_up_after_the_rendezvous_limit(role: TransferRole) -> None:
    exchange, side = TransferExchange(), ScriptedSide(1.0)
    started_s = anyio.current_time()
    error = await attend(exchange, role, side)
    assert isinstance(error, BackendConnectionTimeout)
    assert anyio.current_time() - started_s == pytest.approx(30.0)
    assert exchange.sessions == exchange.waiting == side.held == 0
    assert side.freed == (role == "source")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("slow", ROLES)
async def test_a_session_that_takes_too_long_ends_on_both_sides(order: TransferOrder, slow: TransferRole) -> None:
    """The destination still waits for room."""
    both = pair(order)
    both.sides[slow].wait_s = 1_000.0
    started_s = anyio.current_time()
    await both.run(late=slow)
    assert {type(error) for error in both.errors.values()} == {BackendResponseTimeout}
    assert anyio.current_time() - started_s == pytest.approx(300.0)
    both.check_freed()


async def test_the_session_limit_holds_for_the_time_on_the_way() -> None:
    both = pair(destination=ScriptedSide(missing_tokens=10**9))
    await both.run()
    assert {type(error) for error in both.errors.values()} == {BackendResponseTimeout}
    both.check_freed()
    assert both.sides["destination"].calls == ["reserve", "cancel"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.01])
async def test_a_side_that_leaves_frees_both(
    order: TransferOrder, role: TransferRole, how: str, after_s: float
) -> None:
    """The cases are the first wait, the second wait, and the transfer itself."""
    both = pair(order, ScriptedSide(1.0), ScriptedSide(1.0))
    disturb = both.scopes[role].cancel if how == "cancel" else getattr(both.controls[role], how)
    started_s = anyio.current_time()
    await both.run(disturb, after_s)
    other: TransferRole = "destination" if role == "source" else "source"
    assert isinstance(both.errors[other], BackendDisconnected)
    if how == "cancel":
        assert role not in both.errors
    else:
        assert isinstance(both.errors[role], Cancelled)
    assert set(both.ended_s.values()) == {started_s + after_s}
    both.check_freed()


async def test_a_side_that_leaves_without_waiting_for_the_end_frees_both() -> None:
    both = pair(source=ScriptedSide(1.0))

    async def leave() -> None:
        async with both.exchange.destination(KEY, both.sides["destination"]):
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(both.attend, "source")
        tasks.start_soon(leave)
    assert isinstance(both.errors["source"], BackendDisconnected)
    both.check_freed()


async def test_a_request_stopped_while_its_answer_is_not_read_frees_both_at_once() -> None:
    exchange, source, destination, control = TransferExchange(), ScriptedSide(), ScriptedSide(1_000.0), Control()
    async with anyio.create_task_group() as tasks, exchange.source(KEY, source, control) as taken:
        tasks.start_soon(attend, exchange, "destination", destination)
        await taken.held()
        await anyio.sleep(1.0)
        control.stop()
        assert source.freed == 1
        await anyio.wait_all_tasks_blocked()
        assert exchange.sessions == 0
        with pytest.raises(Cancelled):
            await taken.done()
    assert destination.calls == ["cancel"]


async def test_a_request_stopped_before_it_came_calls_nothing_on_its_side() -> None:
    exchange, side, control = TransferExchange(), ScriptedSide(), Control()
    control.stop()
    assert isinstance(await attend(exchange, "source", side, control=control), Cancelled)
    assert side.calls == []
    assert exchange.sessions == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("role", "fails_in"),
    [
        ("source", "submit"),
        ("source", "hold"),
        ("source", "release"),
        ("destination", "reserve"),
        ("destination", "activate"),
    ],
)
async def test_a_side_that_fails_keeps_its_error_and_frees_both(
    order: TransferOrder, role: TransferRole, fails_in: str
) -> None:
    both = pair(order, ScriptedSide(1.0), ScriptedSide(1.0))
    both.sides[role].fails_in = fails_in
    await both.run()
    error, other_error = both.errors[role], both.errors["destination" if role == "source" else "source"]
    assert isinstance(error, OSError)
    assert isinstance(other_error, BackendDisconnected)
    assert other_error.__cause__ is None  # an error of one side must not look like the fault of the other
    assert fails_in in str(other_error)
    both.check_freed()


async def test_a_cancel_that_fails_is_logged_and_does_not_keep_the_other(caplog: pytest.LogCaptureFixture) -> None:
    both = pair(source=ScriptedSide(1.0, fails_in="cancel"), destination=ScriptedSide(1_000.0))
    await both.run(both.controls["destination"].stop, 5.0)
    assert isinstance(both.errors["source"], BackendDisconnected)
    assert "could not be cancelled" in caplog.text
    both.check_freed()


async def test_an_infinite_timing_is_the_failure_of_the_side_that_reported_it() -> None:
    class Endless(ScriptedSide):
        async def hold(self) -> TransferTiming:
            await super().hold()
            return TransferTiming(1, 10**300, 1e-20)

    both = pair("destination_first", source=Endless())
    await both.run()
    assert isinstance(both.errors["source"], InvalidArgument)
    assert isinstance(both.errors["destination"], BackendDisconnected)
    both.check_freed()


async def test_a_waiting_side_fails_at_once_though_the_other_is_slow_to_leave() -> None:
    both = pair(destination=SlowToLeave(1_000.0))
    started_s = anyio.current_time()
    await both.run(both.controls["destination"].stop, 5.0)
    assert isinstance(both.errors["source"], BackendDisconnected)
    assert {role: ended_s - started_s for role, ended_s in both.ended_s.items()} == {
        "source": 5.0,
        "destination": 105.0,
    }
    both.check_freed()


async def test_a_seat_that_was_left_is_not_kept_by_its_request() -> None:
    exchange, control = TransferExchange(), Control()
    taken = exchange.source(KEY, ScriptedSide(), control)
    async with taken:
        left = ref(taken)
    del taken
    gc.collect()
    assert left() is None
    control.stop()


@settings(max_examples=3 * settings().max_examples // 5)
@given(st.sampled_from(ORDERS), st.integers(0, 2**32))
async def test_every_ending_frees_both_sides_once_and_leaves_nothing_open(order: TransferOrder, seed: int) -> None:
    """Runs twenty handoffs at once: arrivals, waits, failures, stops and cancellations at random, ties included."""
    rng, exchange = Random(seed), TransferExchange(order, rendezvous_timeout_s=4.0, session_timeout_s=6.0)
    pairs = [Pair(exchange, ScriptedSide(rng.randrange(5)), ScriptedSide(rng.randrange(5))) for _ in range(20)]

    async def live(number: int, both: Pair) -> None:
        key = evolve(KEY, bootstrap_room=number, handoff_id=UUID(int=number))

        async def come(role: TransferRole) -> None:
            with both.scopes[role]:
                await anyio.sleep(rng.randrange(6))
                both.errors[role] = await attend(exchange, role, both.sides[role], key, both.controls[role])

        if rng.random() < 0.3:
            both.sides[rng.choice(ROLES)].fails_in = rng.choice(["submit", "hold", "reserve", "activate", "release"])
        role: TransferRole = rng.choice(ROLES)
        control, scope = both.controls[role], both.scopes[role]
        disturbances: list[Callable[[], object]] = [scope.cancel, control.stop, control.kill, list]
        disturb = rng.choice(disturbances)
        async with anyio.create_task_group() as tasks:
            for coming in ROLES:
                tasks.start_soon(come, coming)
            await anyio.sleep(rng.randrange(12) / 2)
            disturb()

    async with anyio.create_task_group() as tasks:
        for number, both in enumerate(pairs):
            tasks.start_soon(live, number, both)
    for both in pairs:
        both.check_freed()
        went_well = [role for role, error in both.errors.items() if error is None]
        assert went_well in ([], list(both.errors)), "one side went well and the other did not"


# -- a side that ends at any turn of the loop


WAIT_TURNS = 3
ALL_TURNS = 32
"""There are more turns than a transfer takes; the last ones disturb nothing."""


@pytest.mark.parametrize("order", get_args(TransferOrder))
@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("late", [None, *ROLES])
async def test_at_whatever_turn_a_side_ends_both_give_back_once_what_they_have(
    order: TransferOrder, how: str, role: TransferRole, late: TransferRole | None
) -> None:
    went_well = []
    for turn in range(ALL_TURNS):
        both = pair(
            order, ScriptedSide(turns=WAIT_TURNS, missing_tokens=0), ScriptedSide(turns=WAIT_TURNS, missing_tokens=0)
        )
        async with anyio.create_task_group() as tasks:
            for coming in ROLES:
                tasks.start_soon(both.attend, coming, 0.0, WAIT_TURNS if coming == late else 0)
            await turns(turn)
            both.end(role, how)
        source, destination = both.sides["source"].calls, both.sides["destination"].calls
        has_moved = "release" in source
        assert source in ([], ["submit", "cancel"], ["submit", "hold", "cancel"], ["submit", "hold", "release"])
        assert destination in ([], ["cancel"], ["reserve", "cancel"], ["reserve", "activate"])
        assert has_moved == ("activate" in destination)
        assert both.exchange.sessions == both.exchange.waiting == 0
        both.check_freed()
        for error in both.errors.values():
            expected = (Cancelled, BackendDisconnected, BackendConnectionTimeout)
            assert error is None or (isinstance(error, expected) and not has_moved)
        went_well.append(has_moved)
    assert not went_well[0]
    assert went_well[-1]
