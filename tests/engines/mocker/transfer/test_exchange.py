"""HandoffExchange: two workers meet, the blocks change hands, and whatever ends it both sides are freed once."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Callable
from random import Random
from typing import Any, get_args
from uuid import UUID
from weakref import ref

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.mocker.transfer import HandoffExchange, HandoffKey, HandoffOrder, Role, Seat, TransferTiming
from pipeline import Cancelled, Control, InvalidArgument, WorkerOverloaded
from pipeline.errors import BackendConnectionTimeout, BackendDisconnected, BackendResponseTimeout
from pipeline.protocols import BootstrapInfo

pytestmark = pytest.mark.anyio

ORDERS = get_args(HandoffOrder)
ROLES = get_args(Role)
INFO = BootstrapInfo("10.0.0.1", 8998, 77, UUID(int=7))
KEY = HandoffKey.of(INFO, "request-1")
TIMING = TransferTiming(128, 1_000_000, 1.0, "destination_missing")
"""A missing token takes 1 ms."""
LATE_S = 5.0


class Side:
    """Either side: counts its blocks, checks its contract, and raises where it is told to."""

    def __init__(
        self, wait_s: float = 0.0, *, fails_in: str = "", missing_tokens: int = 64, shared: Any = None
    ) -> None:
        self.wait_s = wait_s
        self.fails_in = fails_in
        self.missing_tokens = missing_tokens
        self.calls: list[str] = [] if shared is None else shared
        self.held = 0
        self.freed = 0
        self.is_waiting = False
        self.activated_s: float | None = None

    def submit(self) -> None:
        self.held += 1
        self._say("submit")

    async def hold(self) -> TransferTiming:
        await self._wait("hold")
        return TIMING

    async def reserve(self) -> int:
        await self._wait("reserve")
        return self.missing_tokens

    def activate(self) -> None:
        assert self.held == 1
        self._say("activate")

    def release(self) -> None:
        self._say("release")
        self._free()

    def cancel(self) -> None:
        assert not self.is_waiting
        self._free()
        self._say("cancel")

    def _free(self) -> None:
        self.freed += self.held
        self.held = 0

    async def _wait(self, name: str) -> None:
        self.is_waiting = True
        try:
            await anyio.sleep(self.wait_s)
            self.held = 1
            self._say(name)
        finally:
            self.is_waiting = False

    def _say(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_in:
            raise OSError(name)


def seat(
    exchange: HandoffExchange, role: Role, side: Side, key: HandoffKey = KEY, control: Control | None = None
) -> Seat:
    return (exchange.source if role == "source" else exchange.destination)(key, side, control)


async def attend(
    exchange: HandoffExchange, role: Role, side: Side, key: HandoffKey = KEY, control: Control | None = None
) -> Exception | None:
    """Takes the seat and waits for the end; gives the error it ended with."""
    try:
        async with seat(exchange, role, side, key, control) as taken:
            await taken.done()
    except Exception as error:
        return error
    return None


class Pair:
    """Both sides of one hand-over, each in its task."""

    def __init__(self, exchange: HandoffExchange, source: Side, destination: Side) -> None:
        self.exchange = exchange
        self.sides: dict[Role, Side] = {"source": source, "destination": destination}
        self.errors: dict[Role, Exception | None] = {}
        self.scopes: dict[Role, anyio.CancelScope] = {role: anyio.CancelScope() for role in self.sides}
        self.controls: dict[Role, Control] = {role: Control() for role in self.sides}
        self.ended_s: dict[Role, float] = {}

    async def attend(self, role: Role, after_s: float = 0.0) -> None:
        try:
            with self.scopes[role]:
                await anyio.sleep(after_s)
                self.errors[role] = await attend(self.exchange, role, self.sides[role], control=self.controls[role])
        finally:
            self.ended_s[role] = anyio.current_time()

    async def run(
        self, disturb: Callable[[], object] | None = None, after_s: float = 0.0, *, late: Role | None = None
    ) -> None:
        """From the arrival of both, or with the late one coming `LATE_S` after the other."""
        async with anyio.create_task_group() as tasks:
            for role in self.sides:
                tasks.start_soon(self.attend, role, LATE_S if role == late else 0.0)
            if disturb is not None:
                await anyio.sleep(after_s)
                disturb()

    def check_freed(self) -> None:
        """Nothing stays open: no meeting, no block, and nothing was freed twice."""
        assert self.exchange.meetings == self.exchange.waiting == 0
        source, destination = self.sides["source"], self.sides["destination"]
        assert not source.held
        assert source.freed == ("submit" in source.calls)
        has_decode = "activate" in destination.calls and "cancel" not in destination.calls
        assert destination.held == has_decode
        for side in (source, destination):
            assert max([side.calls.count(call) for call in ("release", "cancel", "activate")]) <= 1


def pair(order: HandoffOrder = "source_first", source: Side | None = None, destination: Side | None = None) -> Pair:
    return Pair(HandoffExchange(order), source or Side(), destination or Side())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("late", ROLES)
async def test_the_blocks_change_hands_whoever_comes_first(order: HandoffOrder, late: Role) -> None:
    """MOCK-101, MOCK-103."""
    calls: list[str] = []
    both = pair(order, Side(2.0, shared=calls), Side(1.0, shared=calls))
    started_s = anyio.current_time()
    await both.run(late=late)
    first = ["submit", "hold"], ["reserve"]
    steps = [*first[0], *first[1]] if order == "source_first" else [*first[1], *first[0]]
    assert calls == [*steps, "activate", "release"]
    assert both.errors == {"source": None, "destination": None}
    both.check_freed()
    # The side whose turn it is does not wait for the other one to come; 64 missing tokens take 64 ms.
    own_s = {"source": 2.0, "destination": 1.0}
    first_s = own_s[late] if late != order.removesuffix("_first") else sum(own_s.values())
    assert both.ended_s["destination"] - started_s == pytest.approx(LATE_S + first_s + 0.064)


async def test_a_full_hit_at_the_destination_takes_no_time_and_every_step() -> None:
    """MOCK-104."""
    both = pair(destination=Side(missing_tokens=0))
    started_s = anyio.current_time()
    await both.run()
    assert anyio.current_time() == started_s
    assert both.sides["destination"].calls == ["reserve", "activate"]
    assert both.sides["source"].calls == ["submit", "hold", "release"]


async def test_a_source_learns_when_its_blocks_are_held_and_may_yield_meanwhile() -> None:
    """A worker answers as soon as its prefill is done; the transfer does not need it to be read further."""
    exchange, source, destination = HandoffExchange(), Side(1.0), Side()

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
    assert exchange.meetings == 0


@pytest.mark.parametrize("role", ROLES)
async def test_whoever_waits_alone_gives_up_after_the_rendezvous_limit(role: Role) -> None:
    exchange, side = HandoffExchange(), Side(1.0)
    started_s = anyio.current_time()
    error = await attend(exchange, role, side)
    assert isinstance(error, BackendConnectionTimeout)
    assert anyio.current_time() - started_s == pytest.approx(30.0)
    assert exchange.meetings == exchange.waiting == side.held == 0
    assert side.freed == (role == "source")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("slow", ROLES)
async def test_a_session_that_takes_too_long_ends_on_both_sides(order: HandoffOrder, slow: Role) -> None:
    """MOCK-106 where the destination still waits for room."""
    both = pair(order)
    both.sides[slow].wait_s = 1_000.0
    started_s = anyio.current_time()
    await both.run(late=slow)
    assert {type(error) for error in both.errors.values()} == {BackendResponseTimeout}
    assert anyio.current_time() - started_s == pytest.approx(300.0)
    both.check_freed()


@pytest.mark.parametrize("order", ORDERS)
async def test_it_is_known_how_many_have_their_blocks_on_the_way(order: HandoffOrder) -> None:
    both = pair(order, Side(2.0), Side(1.0))
    seen = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(both.run)
        for wait_s in (0.5, 2.0, 0.53, 1.0):  # at 0.5 s and 2.5 s they prepare, from 3 s on it takes 64 ms
            await anyio.sleep(wait_s)
            seen.append((both.exchange.meetings, both.exchange.transfers))
    assert seen == [(1, 0), (1, 0), (1, 1), (0, 0)]
    gone = pair(order, Side(2.0), Side(missing_tokens=10**9))
    await gone.run()
    assert gone.exchange.transfers == 0


async def test_the_session_limit_holds_for_the_time_on_the_way() -> None:
    both = pair(destination=Side(missing_tokens=10**9))
    await both.run()
    assert {type(error) for error in both.errors.values()} == {BackendResponseTimeout}
    both.check_freed()
    assert both.sides["destination"].calls == ["reserve", "cancel"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.01])
async def test_a_side_that_leaves_frees_both(order: HandoffOrder, role: Role, how: str, after_s: float) -> None:
    """In the first wait, in the second, and with the blocks on the way."""
    both = pair(order, Side(1.0), Side(1.0))
    disturb = both.scopes[role].cancel if how == "cancel" else getattr(both.controls[role], how)
    started_s = anyio.current_time()
    await both.run(disturb, after_s)
    other: Role = "destination" if role == "source" else "source"
    assert isinstance(both.errors[other], BackendDisconnected)
    if how == "cancel":
        assert role not in both.errors
    else:
        assert isinstance(both.errors[role], Cancelled)
    assert set(both.ended_s.values()) == {started_s + after_s}
    both.check_freed()


async def test_a_side_that_leaves_without_waiting_for_the_end_frees_both() -> None:
    both = pair(source=Side(1.0))

    async def leave() -> None:
        async with both.exchange.destination(KEY, both.sides["destination"]):
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(both.attend, "source")
        tasks.start_soon(leave)
    assert isinstance(both.errors["source"], BackendDisconnected)
    both.check_freed()


async def test_a_request_stopped_while_its_answer_is_not_read_frees_both_at_once() -> None:
    exchange, source, destination, control = HandoffExchange(), Side(), Side(1_000.0), Control()
    async with anyio.create_task_group() as tasks, exchange.source(KEY, source, control) as taken:
        tasks.start_soon(attend, exchange, "destination", destination)
        await taken.held()
        await anyio.sleep(1.0)
        control.stop()
        assert source.freed == 1
        await anyio.wait_all_tasks_blocked()
        assert exchange.meetings == 0
        with pytest.raises(Cancelled):
            await taken.done()
    assert destination.calls == ["cancel"]


async def test_a_request_stopped_before_it_came_asks_nothing_of_its_side() -> None:
    exchange, side, control = HandoffExchange(), Side(), Control()
    control.stop()
    assert isinstance(await attend(exchange, "source", side, control=control), Cancelled)
    assert side.calls == []
    assert exchange.meetings == 0


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
async def test_a_side_that_fails_keeps_its_error_and_frees_both(order: HandoffOrder, role: Role, fails_in: str) -> None:
    both = pair(order, Side(1.0), Side(1.0))
    both.sides[role].fails_in = fails_in
    await both.run()
    error, told = both.errors[role], both.errors["destination" if role == "source" else "source"]
    assert isinstance(error, OSError)
    assert isinstance(told, BackendDisconnected)
    assert told.__cause__ is None  # what one side raised must not look like the fault of the other one
    assert fails_in in str(told)
    both.check_freed()


async def test_a_cancel_that_fails_is_logged_and_does_not_keep_the_other(caplog: pytest.LogCaptureFixture) -> None:
    both = pair(source=Side(1.0, fails_in="cancel"), destination=Side(1_000.0))
    await both.run(both.controls["destination"].stop, 5.0)
    assert isinstance(both.errors["source"], BackendDisconnected)
    assert "could not be cancelled" in caplog.text
    both.check_freed()


async def test_a_timing_without_end_is_the_failure_of_the_side_that_said_it() -> None:
    class Endless(Side):
        async def hold(self) -> TransferTiming:
            await super().hold()
            return TransferTiming(1, 10**300, 1e-20)

    both = pair("destination_first", source=Endless())
    await both.run()
    assert isinstance(both.errors["source"], InvalidArgument)
    assert isinstance(both.errors["destination"], BackendDisconnected)
    both.check_freed()


@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room", "handoff_id", "request_id"])
async def test_an_identity_may_not_change_and_who_waits_does_not_notice(name: str) -> None:
    other: dict[str, Any] = {
        "bootstrap_host": "10.0.0.2",
        "bootstrap_port": 1,
        "bootstrap_room": 2,
        "handoff_id": UUID(int=3),
        "request_id": "x",
    }
    exchange, source, stranger = HandoffExchange(), Side(), Side()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attend, exchange, "source", source)
        await anyio.wait_all_tasks_blocked()
        error = await attend(exchange, "destination", stranger, evolve(KEY, **{name: other[name]}))
        assert isinstance(error, InvalidArgument)
        assert error.field == name
        assert (exchange.waiting, exchange.meetings) == (1, 1)
        assert await attend(exchange, "destination", Side()) is None
    assert stranger.calls == []
    assert source.calls == ["submit", "hold", "release"]


@pytest.mark.parametrize("role", ROLES)
async def test_a_seat_is_taken_once(role: Role) -> None:
    exchange, side, second = HandoffExchange(), Side(), Side()
    other: Role = "destination" if role == "source" else "source"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attend, exchange, role, side)
        await anyio.wait_all_tasks_blocked()
        assert isinstance(await attend(exchange, role, second), InvalidArgument)
        assert await attend(exchange, other, Side()) is None
    assert second.calls == []
    assert exchange.meetings == 0


async def test_rooms_without_a_handoff_id_meet_too() -> None:
    key = HandoffKey.of(BootstrapInfo("10.0.0.1", 8998, 5), "request-2")
    exchange = HandoffExchange()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attend, exchange, "source", Side(), key)
        assert await attend(exchange, "destination", Side(), key) is None


async def test_too_many_waiting_sides_are_refused_and_the_awaited_never() -> None:
    exchange, keys = HandoffExchange(), [evolve(KEY, bootstrap_room=n, handoff_id=None) for n in range(257)]
    refused = Side()
    async with anyio.create_task_group() as tasks:
        for key in keys[:-1]:
            tasks.start_soon(attend, exchange, "source", Side(), key)
        await anyio.wait_all_tasks_blocked()
        assert exchange.waiting == 256
        assert isinstance(await attend(exchange, "source", refused, keys[-1]), WorkerOverloaded)
        assert await attend(exchange, "destination", Side(), keys[0]) is None
        assert exchange.waiting == 255
        for key in keys[1:-1]:
            assert await attend(exchange, "destination", Side(), key) is None
    assert refused.calls == []
    assert exchange.meetings == exchange.waiting == 0


async def test_who_comes_after_the_other_gave_up_is_told_at_once() -> None:
    exchange, side = HandoffExchange(), Side()
    assert isinstance(await attend(exchange, "source", Side(fails_in="hold")), OSError)
    started_s = anyio.current_time()
    error = await attend(exchange, "destination", side)
    assert isinstance(error, BackendDisconnected)
    assert "failed: hold" in str(error)
    assert anyio.current_time() == started_s
    assert side.calls == []
    assert exchange.meetings == 0


async def test_who_gave_up_alone_may_come_again() -> None:
    exchange = HandoffExchange()
    await attend(exchange, "source", Side(fails_in="hold"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attend, exchange, "source", Side())
        await anyio.wait_all_tasks_blocked()
        assert await attend(exchange, "destination", Side()) is None
    assert exchange.meetings == 0


@pytest.mark.parametrize("first", ROLES)
async def test_two_that_met_in_vain_may_meet_again(first: Role) -> None:
    both = pair(source=Side(fails_in="hold"))
    await both.run()
    assert isinstance(both.errors["source"], OSError)
    again = Pair(both.exchange, Side(), Side())
    await again.run(late="destination" if first == "source" else "source")
    assert again.errors == {"source": None, "destination": None}
    again.check_freed()


async def test_after_the_rendezvous_limit_nothing_was_missed() -> None:
    exchange = HandoffExchange()
    await attend(exchange, "source", Side(fails_in="hold"))
    await anyio.sleep(30.0)
    assert isinstance(await attend(exchange, "destination", Side()), BackendConnectionTimeout)


class Slow(Side):
    """Takes 100 seconds to go."""

    async def reserve(self) -> int:
        try:
            return await super().reserve()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(100.0)


async def test_who_waits_is_told_at_once_though_the_other_takes_its_time_to_go() -> None:
    both = pair(destination=Slow(1_000.0))
    started_s = anyio.current_time()
    await both.run(both.controls["destination"].stop, 5.0)
    assert isinstance(both.errors["source"], BackendDisconnected)
    assert {role: ended_s - started_s for role, ended_s in both.ended_s.items()} == {
        "source": 5.0,
        "destination": 105.0,
    }
    both.check_freed()


@pytest.mark.parametrize("first", ROLES)
@pytest.mark.parametrize("request_id", [KEY.request_id, "of somebody else"])
async def test_a_place_where_one_side_takes_its_time_to_go_is_free_for_the_next(first: Role, request_id: str) -> None:
    """A retry of the request, or another one with the same room; the old side's leaving does not disturb it."""
    both = pair(destination=Slow(1_000.0))
    key = evolve(KEY, request_id=request_id)
    sides: dict[Role, Side] = {"source": Side(60.0), "destination": Side(60.0)}
    errors: list[Exception | None] = []

    async def come(role: Role) -> None:
        errors.append(await attend(both.exchange, role, sides[role], key))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(both.run, both.controls["destination"].stop, 5.0)
        await anyio.sleep(6.0)
        tasks.start_soon(come, first)
        await anyio.sleep(1.0)
        tasks.start_soon(come, "destination" if first == "source" else "source")
        await anyio.sleep(50.0)
        assert both.exchange.meetings == 1
    assert both.ended_s["destination"] - both.ended_s["source"] == 100.0
    assert errors == [None, None]
    both.check_freed()


async def test_a_seat_that_was_left_is_not_kept_by_its_request() -> None:
    exchange, control = HandoffExchange(), Control()
    taken = exchange.source(KEY, Side(), control)
    async with taken:
        left = ref(taken)
    del taken
    gc.collect()
    assert left() is None
    control.stop()


async def test_a_meeting_is_free_again_when_it_is_over() -> None:
    exchange = HandoffExchange()
    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attend, exchange, "source", Side())
            assert await attend(exchange, "destination", Side()) is None


async def test_an_unknown_order_is_refused_before_anybody_comes() -> None:
    order: Any = "both_first"
    with pytest.raises(InvalidArgument):
        HandoffExchange(order)


@settings(max_examples=60)
@given(st.sampled_from(ORDERS), st.integers(0, 2**32))
async def test_whatever_ends_it_both_sides_are_freed_once_and_nothing_stays_open(
    order: HandoffOrder, seed: int
) -> None:
    """Twenty hand-overs at once: arrivals, waits, failures, stops and cancellations at random, ties included."""
    rng, exchange = Random(seed), HandoffExchange(order, rendezvous_timeout_s=4.0, session_timeout_s=6.0)
    pairs = [Pair(exchange, Side(rng.randrange(5)), Side(rng.randrange(5))) for _ in range(20)]

    async def live(number: int, both: Pair) -> None:
        key = evolve(KEY, bootstrap_room=number, handoff_id=UUID(int=number))

        async def come(role: Role) -> None:
            with both.scopes[role]:
                await anyio.sleep(rng.randrange(6))
                both.errors[role] = await attend(exchange, role, both.sides[role], key, both.controls[role])

        if rng.random() < 0.3:
            both.sides[rng.choice(ROLES)].fails_in = rng.choice(["submit", "hold", "reserve", "activate", "release"])
        role: Role = rng.choice(ROLES)
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
