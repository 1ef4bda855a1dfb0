"""KvRouter's queue: which requests wait, which goes next, and what becomes of those that are given up."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from operators.kv import KvRouter
from operators.kv.errors import QueueRejected
from operators.kv.queue import PolicyClass, PolicyProfile
from operators.kv.request import RouteRequest
from operators.kv.reservation import Reservation
from operators.kv.types import WorkerRank
from operators.pool import PoolView
from pipeline import Cancelled, Control, Unavailable
from pipeline.protocols import RoutingConstraints
from pipeline.protocols.card import ModelRuntimeConfig

from .worlds import GivenHealth, prompt, published, reserved, router_of

ONE_AT_A_TIME = PolicyProfile.single(PolicyClass(prefill_busy_threshold=0))
"""A rank with any prompt in flight is busy."""


class Waiters:
    """Requests that wait in tasks of their own, and the outcome of each, in order."""

    def __init__(self, router: KvRouter, tasks: Any) -> None:
        self._router, self._tasks = router, tasks
        self.placed: dict[str, Reservation] = {}
        self.failed: dict[str, Exception] = {}

    async def send(self, request_id: str, request: RouteRequest | None = None, control: Control | None = None) -> None:
        """Send a request; return when it is placed, refused or waits."""
        own = prompt(first=100 * ord(request_id))  # shared with no other, so nothing of it is cached
        self._tasks.start_soon(self._ask, request_id, request or own, control)
        await settled()

    async def _ask(self, request_id: str, request: RouteRequest, control: Control | None) -> None:
        try:
            self.placed[request_id] = await reserved(self._router, request, request_id, control=control)
        except Exception as error:
            self.failed[request_id] = error


async def settled() -> None:
    for _ in range(5):
        await checkpoint()


async def test_a_request_waits_while_all_are_busy_and_goes_when_one_is_free() -> None:
    router = router_of(1, 2, profile=ONE_AT_A_TIME)
    tasks = anyio.create_task_group()
    waiters = Waiters(router, tasks)
    async with tasks:
        for name in "abcd":
            await waiters.send(name)
        assert (list(waiters.placed), len(router.queue)) == (["a", "b"], 2)
        waiters.placed["b"].mark_prefill_completed()
        await settled()
        assert (list(waiters.placed), waiters.placed["c"].rank) == (["a", "b", "c"], waiters.placed["b"].rank)
        waiters.placed["a"].release()
        await settled()
        assert (list(waiters.placed), len(router.queue)) == (["a", "b", "c", "d"], 0)


async def test_each_that_goes_sees_the_one_before() -> None:
    router = router_of(1, profile=ONE_AT_A_TIME)
    tasks = anyio.create_task_group()
    waiters = Waiters(router, tasks)
    async with tasks:
        for name in "abc":
            await waiters.send(name)
        waiters.placed["a"].release()
        await settled()
        assert (list(waiters.placed), len(router.queue)) == (["a", "b"], 1)
        tasks.cancel_scope.cancel()


async def test_a_request_for_a_busy_worker_holds_up_no_other() -> None:
    router = router_of(1, 2, profile=ONE_AT_A_TIME)
    tasks = anyio.create_task_group()
    waiters = Waiters(router, tasks)
    async with tasks:
        await waiters.send("a", prompt(worker_id=1))
        await waiters.send("b", prompt(worker_id=1))
        await waiters.send("c", prompt(worker_id=2))
        assert list(waiters.placed) == ["a", "c"]
        tasks.cancel_scope.cancel()


async def test_a_request_no_worker_may_take_is_refused_at_once() -> None:
    router = router_of(1, profile=ONE_AT_A_TIME)
    await reserved(router, prompt())
    with pytest.raises(Unavailable):
        await reserved(router, prompt(constraints=RoutingConstraints({"none-has-it"})), "b")


@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
async def test_one_that_is_given_up_waits_no_more_and_lets_others_pass(how: str) -> None:
    router, control = router_of(1, profile=ONE_AT_A_TIME), Control()
    before = await reserved(router, prompt(), "a")
    tasks, given_up = anyio.create_task_group(), anyio.create_task_group()
    first, second = Waiters(router, given_up), Waiters(router, tasks)
    async with tasks:
        async with given_up:
            await first.send("b", control=control)
            await second.send("c")
            {"stop": control.stop, "kill": control.kill, "cancel": given_up.cancel_scope.cancel}[how]()
        assert (len(router.queue), len(router.loads)) == (1, 1)
        before.release()
    assert (list(second.placed), first.placed) == (["c"], {})
    assert [type(error) for error in first.failed.values()] == ([] if how == "cancel" else [Cancelled])


async def test_a_booking_whose_caller_has_gone_meanwhile_is_undone() -> None:
    router = router_of(1, profile=ONE_AT_A_TIME)
    before = await reserved(router, prompt(), "a")
    tasks = anyio.create_task_group()
    waiters = Waiters(router, tasks)
    async with tasks:
        await waiters.send("b")
        tasks.cancel_scope.cancel()
        before.release()  # books b, whose task has not learned of its end yet
        assert len(router.loads) == 1
    assert (waiters.placed, len(router.loads)) == ({}, 0)


async def test_a_booking_that_is_there_wins_over_a_stop() -> None:
    router, control = router_of(1, profile=ONE_AT_A_TIME), Control()
    before = await reserved(router, prompt(), "a")
    tasks = anyio.create_task_group()
    waiters = Waiters(router, tasks)
    async with tasks:
        await waiters.send("b", control=control)
        before.release()
        control.stop()
        await settled()
    assert waiters.placed["b"].is_live


async def test_a_full_queue_refuses_and_books_nothing() -> None:
    profile = PolicyProfile.single(PolicyClass(prefill_busy_threshold=0, request_queue_limit_per_worker=1))
    router = router_of(1, profile=profile)
    tasks = anyio.create_task_group()
    waiters = Waiters(router, tasks)
    async with tasks:
        for name in "abc":
            await waiters.send(name)
        assert isinstance(waiters.failed["c"], QueueRejected)
        assert (len(router.queue), len(router.loads)) == (1, 1)
        tasks.cancel_scope.cancel()


async def test_closing_fails_requests_that_wait_and_that_come() -> None:
    router = router_of(1, profile=ONE_AT_A_TIME)
    tasks = anyio.create_task_group()
    waiters = Waiters(router, tasks)
    async with tasks:
        with router:
            await waiters.send("a")
            await waiters.send("b")
        await waiters.send("c")
    assert {name: type(error) for name, error in waiters.failed.items()} == {"b": Unavailable, "c": Unavailable}
    assert waiters.placed["a"].release()


@pytest.mark.parametrize(("refresh_after_s", "expected"), [(1.0, 2), (None, 0)])
async def test_after_a_long_wait_what_is_cached_is_looked_up_again(refresh_after_s: float, expected: int) -> None:
    router = router_of(1, profile=ONE_AT_A_TIME, refresh_after_s=refresh_after_s)
    tasks = anyio.create_task_group()
    waiters = Waiters(router, tasks)
    async with tasks:
        await waiters.send("a", prompt(first=500))
        await waiters.send("b", prompt())
        await anyio.sleep(5)
        router.lookup.record(WorkerRank(1), prompt().blocks, anyio.current_time())
        waiters.placed["a"].release()
        await settled()
        assert waiters.placed["b"].decision.overlap_blocks == expected


async def test_a_booking_that_is_not_released_expires_and_the_queue_goes_on() -> None:
    router = router_of(1, profile=ONE_AT_A_TIME, expiry_s=100.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(router.run)
        waiters = Waiters(router, tasks)
        await waiters.send("a")
        await waiters.send("b")
        await anyio.sleep(200)
        assert (list(waiters.placed), waiters.placed["a"].is_live) == (["a", "b"], False)
        assert not waiters.placed["a"].release()
        tasks.cancel_scope.cancel()


async def test_modelled_prompt_work_makes_room_by_time_alone() -> None:
    config = {"router_prefill_load_model": "aic"}
    router = router_of(1, profile=ONE_AT_A_TIME, config=config, prefill_duration=lambda prompt, cached: 3.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(router.run)
        waiters = Waiters(router, tasks)
        await waiters.send("a")
        await waiters.send("b")
        await anyio.sleep(2.5)
        assert list(waiters.placed) == ["a"]
        await anyio.sleep(0.8)
        assert list(waiters.placed) == ["a", "b"]
        tasks.cancel_scope.cancel()


async def test_advice_books_nothing_even_while_others_wait() -> None:
    router = router_of(1, profile=ONE_AT_A_TIME)
    tasks = anyio.create_task_group()
    waiters = Waiters(router, tasks)
    async with tasks:
        await waiters.send("a")
        await waiters.send("b")
        assert router.advise(prompt()).rank == WorkerRank(1)
        assert (len(router.loads), len(router.queue)) == (1, 1)
        tasks.cancel_scope.cancel()


async def test_a_worker_that_comes_takes_what_waits() -> None:
    health = published({1: ModelRuntimeConfig()}, 2)
    router = router_of(1, 2, profile=ONE_AT_A_TIME, health=health)
    tasks = anyio.create_task_group()
    waiters = Waiters(router, tasks)
    async with tasks:
        await waiters.send("a")
        await waiters.send("b")
        assert list(waiters.placed) == ["a"]
        health.publish({1: ModelRuntimeConfig(), 2: ModelRuntimeConfig()})
        await settled()
        assert waiters.placed["b"].rank == WorkerRank(2)


async def test_a_request_for_a_worker_that_leaves_fails_and_waits_no_more() -> None:
    health = published({1: ModelRuntimeConfig(), 2: ModelRuntimeConfig()})
    router = router_of(1, 2, profile=ONE_AT_A_TIME, health=health)
    async with anyio.create_task_group() as tasks:
        waiters = Waiters(router, tasks)
        await waiters.send("a", prompt(worker_id=1))
        await waiters.send("b", prompt(worker_id=1))
        health.publish({2: ModelRuntimeConfig()})
        await settled()
        assert (waiters.placed["a"].is_live, type(waiters.failed["b"])) == (False, Unavailable)
        assert (len(router.queue), len(router.loads)) == (0, 0)


async def test_a_request_that_was_stopped_before_does_not_wait() -> None:
    router, control = router_of(1, profile=ONE_AT_A_TIME), Control()
    await reserved(router, prompt(), "a")
    control.stop()
    with pytest.raises(Cancelled):
        await reserved(router, prompt(first=100), "b", control=control)
    assert (len(router.queue), len(router.loads)) == (0, 1)


async def test_a_callback_that_fails_fails_the_request_and_leaves_none_waiting() -> None:
    class Unreadable(GivenHealth):
        @property
        def view(self) -> PoolView:
            if self.views.observers and len(router.queue):
                raise OSError("nobody knows")
            return super().view

    router = router_of(1, profile=ONE_AT_A_TIME, health=Unreadable(1))
    await reserved(router, prompt(), "a")
    with pytest.raises(OSError, match="nobody knows"):
        await reserved(router, prompt(first=100), "b")
    assert (len(router.queue), len(router.loads)) == (0, 1)
