"""The view of a pool: which instances are present, cool down, have refused or are busy, and when that ends."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, get_args

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.pool import COOLDOWN, InstanceHealth, PoolView, WorkerLoads
from pipeline import Disconnected, InvalidArgument, WorkerOverloaded
from pipeline.network import Members, Reach
from pipeline.network.requests import Connectivity
from pipeline.protocols.kv import ActiveLoad
from pipeline.rx import AnyIOScheduler, BehaviorSubject, Subject

from .worlds import Changing, answering, pool

FAULT, REFUSAL = Disconnected("lost"), WorkerOverloaded("full")
THREE = PoolView().with_members(Members.of({1: 0, 2: 1, 3: 2}))


@pytest.mark.parametrize(
    ("text", "duration_s"), [(None, 5), ("17", 17), ("0", 0), ("invalid", 5), ("-1", 5), ("1.5", 5), (" 7 ", 7)]
)
def test_the_environment_may_set_how_long(text: str | None, duration_s: float) -> None:
    assert COOLDOWN.of({} if text is None else {"DYN_RUNTIME_INHIBITED_DURATION_SECS": text}) == duration_s


# -- the record


def test_a_view_of_nothing_is_empty() -> None:
    view = PoolView()
    assert (view.ids, view.routable, view.free, view.overloaded, view.valid_until_s) == ((), (), (), set(), None)


def test_a_change_makes_a_later_view_and_leaves_the_view_before_as_it_is() -> None:
    after = THREE.with_cooldown(2, 1, 10.0)
    assert (THREE.routable, after.routable) == ((1, 2, 3), (1, 3))
    assert after.version == THREE.version + 1


def test_what_changes_nothing_makes_no_view() -> None:
    view = THREE.with_busy({2}).with_cooldown(1, 0, 10.0)
    assert view.with_busy(frozenset({2})) is view
    assert view.without_refusal(3) is view
    assert view.at(9.9) is view
    assert view.with_members(Members.of({1: 0, 2: 1, 3: 2})) is view
    assert view.with_cooldown(2, 7, 20.0) is view
    assert view.with_refusal(9, -1, 20.0) is view


def test_a_healthy_pool_shares_one_tuple_for_all_it_lists() -> None:
    assert THREE.ids is THREE.routable is THREE.free
    assert THREE.overloaded == frozenset()


def test_those_that_are_not_admitted_are_not_in_the_view() -> None:
    view = PoolView().with_members(Members.of({1: 0, 2: 1}), lambda instance_id: instance_id == 2)
    assert (view.ids, dict(view.incarnations)) == ((2,), {2: 1})
    assert view.with_cooldown(1, 0, 10.0) is view


def test_only_the_incarnation_that_was_at_fault_cools_down() -> None:
    view = THREE.with_cooldown(2, 1, 10.0).with_refusal(3, 2, 12.0)
    assert view.free == (1,)
    back = view.with_members(Members.of({1: 0, 2: 8, 3: 9}))
    assert back.free == (1, 2, 3)
    assert back.valid_until_s is None
    assert back.with_cooldown(2, 1, 13.0) is back, "a late fault of the incarnation before"


def test_those_that_stay_cool_down_on_when_others_come_and_leave() -> None:
    view = THREE.with_cooldown(2, 1, 10.0).with_cooldown(3, 2, 11.0)
    after = view.with_members(Members.of({2: 1, 4: 3}))
    assert (after.routable, after.valid_until_s) == ((4,), 10.0)


def test_the_view_holds_until_the_first_of_all_ends() -> None:
    view = THREE.with_cooldown(1, 0, 12.0).with_refusal(2, 1, 11.0)
    assert (view.free, view.valid_until_s) == ((3,), 11.0)
    assert (view.at(11.0).free, view.at(11.0).valid_until_s) == ((2, 3), 12.0)
    assert (view.at(99.0).free, view.at(99.0).valid_until_s) == ((1, 2, 3), None)


def test_the_latest_fault_decides_when_a_cooldown_ends() -> None:
    view = THREE.with_cooldown(1, 0, 10.0).with_cooldown(1, 0, 13.0)
    assert view.at(12.9).routable == (2, 3)
    assert view.at(13.0).routable == (1, 2, 3)


def test_a_cooldown_does_not_make_busy_and_a_refusal_does_not_make_unroutable() -> None:
    view = THREE.with_cooldown(1, 0, 10.0).with_refusal(2, 1, 10.0).with_busy({3, 9})
    assert (view.routable, view.overloaded, view.free) == ((2, 3), {2, 3}, ())


def reached(**states: Connectivity) -> Reach:
    """These states, by `i` and the instance."""
    reach = Reach()
    for name, state in states.items():
        reach = reach.with_state(int(name.removeprefix("i")), state)
    return reach


@pytest.mark.parametrize(
    ("reach", "routable"),
    [
        (reached(), (1, 2, 3)),
        (reached(i1="connected", i2="connecting", i3="unreachable"), (1,)),
        (reached(i1="unreachable", i2="connecting", i3="unreachable"), (2,)),
        (reached(i1="unreachable", i2="unreachable", i3="unreachable"), ()),
        (reached(i9="unreachable"), (1, 2, 3)),
    ],
)
def test_the_connected_are_routable_or_those_that_may_be_soon(reach: Reach, routable: tuple[int, ...]) -> None:
    view = THREE.with_reach(reach)
    assert (view.routable, view.free, view.ids) == (routable, routable, (1, 2, 3))


def test_while_the_connected_cool_down_those_that_connect_are_routable() -> None:
    view = THREE.with_reach(reached(i2="connecting", i3="unreachable")).with_cooldown(1, 0, 10.0)
    assert (view.routable, view.at(10.0).routable) == ((2,), (1,))


def test_where_requests_name_their_instance_what_is_not_reached_is_free() -> None:
    view = PoolView(skips_cooling_down=False).with_members(Members.of({1: 0, 2: 1}))
    assert view.with_reach(reached(i1="unreachable")).free == (1, 2)


def test_where_requests_name_their_instance_cooling_down_is_free() -> None:
    view = PoolView(skips_cooling_down=False).with_members(Members.of({1: 0, 2: 1})).with_cooldown(1, 0, 10.0)
    assert (view.routable, view.free, view.with_busy({1}).free) == ((2,), (1, 2), (2,))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=12), st.integers(0, 30))
def test_each_cools_down_for_the_duration_after_its_last_fault(faults: Any, asked_after: int) -> None:
    view, now_s, last = THREE, 0, dict[int, int]()
    for instance_id, later in faults:
        now_s += later
        view = view.at(now_s).with_cooldown(instance_id, instance_id - 1, now_s + 5)
        last[instance_id] = now_s
    now_s += asked_after
    out = {i for i, at_s in last.items() if now_s < at_s + 5}
    view = view.at(now_s)
    assert [i for i in (1, 2, 3) if i not in out] == list(view.routable)
    assert set(view.cooling_down) == out
    assert view.valid_until_s == min((last[i] + 5 for i in out), default=None)


STEPS = st.one_of(
    st.tuples(st.sampled_from(["join", "leave"]), st.integers(1, 4)),
    st.tuples(st.sampled_from(["fault", "refusal", "readmit"]), st.integers(1, 4)),
    st.tuples(st.just("late"), st.integers(1, 4)),
    st.tuples(st.just("busy"), st.frozensets(st.integers(1, 4))),
    st.tuples(st.just("reach"), st.tuples(st.integers(1, 4), st.sampled_from(get_args(Connectivity)))),
    st.tuples(st.just("time"), st.integers(0, 6)),
)


class Model:
    """The plainest pool: a list of what has happened to each present instance."""

    def __init__(self) -> None:
        self.now_s, self.stays = 0.0, 0
        self.present: dict[int, int] = {}
        self.faults: dict[int, tuple[int, float]] = {}
        self.refusals: dict[int, tuple[int, float]] = {}
        self.busy: AbstractSet[int] = frozenset()
        self.states: dict[int, str] = {}
        self.reach = Reach()

    def holds(self, ends: dict[int, tuple[int, float]], instance_id: int) -> bool:
        stay, until_s = ends.get(instance_id, (-1, 0.0))
        return self.present.get(instance_id) == stay and until_s > self.now_s

    def lists(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], set[int]]:
        ids = tuple(sorted(self.present))
        well = [i for i in ids if not self.holds(self.faults, i)]
        connected, connecting = (
            tuple(i for i in well if self.states.get(i, "connected") == state) for state in ("connected", "connecting")
        )
        routable = connected or connecting
        busy = {i for i in ids if i in self.busy or self.holds(self.refusals, i)}
        return ids, routable, tuple(i for i in routable if i not in busy), busy


@given(st.lists(STEPS, max_size=30))
def test_a_view_is_what_the_plainest_model_is(steps: list[tuple[str, Any]]) -> None:
    model, view = Model(), PoolView()
    for what, value in steps:
        before = view
        until_s = model.now_s + 5
        stay = -1 if what in ("busy", "reach") else model.present.get(value, -1)
        if what == "join":
            model.present[value] = model.stays
            model.stays += 1
            view = view.with_members(Members.of(model.present))
        elif what == "leave":
            model.present.pop(value, None)
            view = view.with_members(Members.of(model.present))
        elif what == "fault":
            model.faults[value] = (stay, until_s)
            view = view.with_cooldown(value, stay, until_s)
        elif what == "refusal":
            model.refusals[value] = (stay, until_s)
            view = view.with_refusal(value, stay, until_s)
        elif what == "readmit":
            model.refusals.pop(value, None)
            view = view.without_refusal(value)
        elif what == "late":
            view = view.with_cooldown(value, stay - 1, until_s)
        elif what == "busy":
            model.busy = value
            view = view.with_busy(value)
        elif what == "reach":
            model.states[value[0]] = value[1]
            model.reach = model.reach.with_state(*value)
            view = view.with_reach(model.reach)
        else:
            model.now_s += value
            view = view.at(model.now_s)
        assert (view.ids, view.routable, view.free, view.overloaded) == model.lists()
        assert view is before or view.version == before.version + 1


# -- the reducer


@pytest.mark.parametrize("duration_s", [-1.0, float("inf"), float("nan")])
def test_a_duration_that_cannot_be_is_refused(duration_s: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        InstanceHealth(pool(answering(1)), cooldown_s=duration_s)
    assert caught.value.field == "cooldown_s"


async def test_for_no_time_nothing_cools_down_or_is_refused() -> None:
    health = InstanceHealth(pool(answering(1)), cooldown_s=0)
    before = health.view
    health.blame(1, 0, FAULT)
    health.blame(1, 0, REFUSAL)
    assert health.view is before


async def test_every_change_is_pushed_when_it_comes_and_the_end_of_a_cooldown_too() -> None:
    changing, reports = Changing(answering(1, 2)), Subject[ActiveLoad]()
    loads, busy = WorkerLoads(changing.workers), BehaviorSubject[AbstractSet[int]](frozenset())
    loads.follow(reports)
    health = InstanceHealth(changing.workers, loads=loads, busy=busy, cooldown_s=5)
    seen: list[Any] = []
    start_s = anyio.current_time()

    def note(view: PoolView) -> None:
        seen.append((round(anyio.current_time() - start_s, 3), view.routable, view.free))

    async with AnyIOScheduler() as scheduler:
        health.changes(scheduler).subscribe(note, on_completed=lambda: seen.append("closed"))
        health.blame(1, changing.workers.incarnation(1), FAULT)
        await anyio.sleep(1)
        health.blame(2, changing.workers.incarnation(2), REFUSAL)
        reports.on_next(ActiveLoad(2, kv_used_blocks=9))
        busy.on_next({2})
        changing.remove(2)
        changing.add(2)
        busy.on_next(frozenset())
        await anyio.sleep(9)
        changing.complete()
    assert seen == [
        (0, (1, 2), (1, 2)),
        (0, (2,), (2,)),
        (1, (2,), ()),
        (1, (2,), (2,)),
        (1, (2,), ()),
        (1, (), ()),
        (1, (2,), ()),
        (1, (2,), (2,)),
        (5, (1, 2), (1, 2)),
        (10, (), ()),
        "closed",
    ]


async def test_a_reader_sees_the_end_of_a_cooldown_without_a_scheduler() -> None:
    health, seen = InstanceHealth(pool(answering(1, 2)), cooldown_s=5), list[PoolView]()
    health.changes().subscribe(seen.append)
    health.blame(1, 0, FAULT)
    await anyio.sleep(5)
    assert [view.routable for view in seen] == [(1, 2), (2,)]
    assert health.view.routable == (1, 2)
    assert seen[-1] is health.view


async def test_a_subscriber_never_gets_an_older_view_after_a_newer_one() -> None:
    busy = BehaviorSubject[AbstractSet[int]](frozenset())
    health, seen = InstanceHealth(pool(answering(1, 2)), busy=busy), list[PoolView]()

    def answer(view: PoolView) -> None:
        if view.busy == {1}:
            busy.on_next({1, 2})

    health.changes().subscribe(answer)
    health.changes().subscribe(seen.append)
    busy.on_next({1})
    assert [view.free for view in seen] == [(1, 2), ()]


async def test_a_router_does_not_keep_a_closed_pool_running_and_a_subscriber_does() -> None:
    changing = Changing(answering(1))
    health = InstanceHealth(changing.workers)
    following = health.changes().subscribe()
    changing.workers.close()
    while_followed = health.view.ids
    following.dispose()
    assert (while_followed, health.view.ids) == ((1,), ())
