"""OtherRouters: what each other router knows is requested when it appears, and until it was given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import anyio
import pytest
from attrs import define, field

from operators.kv.other_routers import OtherRouters, RepairTimes
from pipeline import Disconnected
from pipeline.network import Members, Missed
from pipeline.rx import AnyIOScheduler, DisposableBase, Subject
from pipeline.testing import ScriptedEngine
from tests.operators.pool.worlds import Changing

OWN = 9
ROUTERS = (1, 2, 3, 4)
TIMES = RepairTimes(timeout_s=5.0, first_delay_s=1.0, longest_delay_s=8.0)

Answer = Callable[[], Awaitable[bool]]


async def knows() -> bool:
    await anyio.sleep(0.01)
    return True


async def knows_a_part() -> bool:
    await anyio.sleep(0.01)
    return False


async def breaks() -> bool:
    raise Disconnected("gone")


async def is_silent() -> bool:
    await anyio.sleep_forever()
    return True


@define(eq=False)
class World:
    """Routers that come and go, and what happened to each in this order."""

    pool: Changing = field(factory=lambda: Changing({i: ScriptedEngine([]) for i in (*ROUTERS, OWN)}))
    missed: Subject[Missed] = field(factory=Subject)
    answers: dict[int, Answer] = field(factory=dict)
    """What an attempt does; where none is named, it succeeds."""
    log: dict[int, list[str]] = field(factory=lambda: defaultdict(list))
    begun_s: dict[int, list[float]] = field(factory=lambda: defaultdict(list))
    open: int = 0
    """Attempts that have not ended."""
    due: list[Callable[[], object]] = field(factory=list)
    following: DisposableBase | None = None

    async def attempt(self, router_id: int) -> bool:
        self.begun_s[router_id].append(anyio.current_time())
        self.log[router_id].append("begun")
        self.open += 1
        result = "cut short"
        try:
            is_known = await self.answers.get(router_id, knows)()
            result = "known" if is_known else "in part"
        except Exception:
            result = "failed"
            raise
        finally:
            self.open -= 1
            self.log[router_id].append(result)
        return is_known

    def at_once(self, *changes: Callable[[], object]) -> None:
        """Make changes of the pool of which its followers see the result only."""
        first, *self.due = changes
        first()

    def _first_follower(self, members: Members) -> None:
        due, self.due = self.due, []
        for change in due:
            change()

    def waits_s(self, router_id: int) -> list[float]:
        """Return the seconds between the router's attempts."""
        begun_s = self.begun_s[router_id]
        return [round(later - earlier, 1) for earlier, later in pairwise(begun_s)]

    def follow(self, scheduler: AnyIOScheduler) -> None:
        self.pool.workers.follow(self._first_follower)
        others = OtherRouters(
            self.pool.workers, self.missed, OWN, self.attempt, lambda i: self.log[i].append("gone"), TIMES
        )
        self.following = others.follow(scheduler)


@asynccontextmanager
async def world(*present: int, **answers: Answer) -> AsyncIterator[World]:
    """Give a world with these routers, of which `r1` is how the first one answers. Nothing of it goes on after it."""
    made = World(answers={int(name[1:]): answer for name, answer in answers.items()})
    for router_id in ROUTERS:
        if router_id not in present:
            made.pool.remove(router_id)
    async with AnyIOScheduler() as scheduler:
        made.follow(scheduler)
        yield made
        assert made.following is not None
        made.following.dispose()
        await anyio.sleep(0.1)
        assert made.open == 0
        assert made.pool.workers.absence() == "closed"
        before = {router_id: len(times) for router_id, times in made.begun_s.items()}
        made.missed.on_next(Missed())
        made.pool.add(4)
        await anyio.sleep(100)
        assert {router_id: len(times) for router_id, times in made.begun_s.items()} == before


async def test_each_other_router_gets_one_request_when_it_appears() -> None:
    async with world(1, 2) as made:
        await anyio.sleep(50)
        made.pool.add(3)
        await anyio.sleep(50)
        assert made.log == {i: ["begun", "known"] for i in (1, 2, 3)}


@pytest.mark.parametrize(("answer", "result"), [(breaks, "failed"), (knows_a_part, "in part")])
async def test_an_attempt_that_failed_is_made_again_ever_later(answer: Answer, result: str) -> None:
    async with world(1, 2, r1=answer) as made:
        await anyio.sleep(30)
        assert made.waits_s(1) == [1, 2, 4, 8, 8]
        assert made.log[1] == ["begun", result] * 6
        assert made.log[2] == ["begun", "known"]
        made.answers.clear()
        await anyio.sleep(30)
        assert made.log[1] == ["begun", result] * 6 + ["begun", "known"]
        made.answers[1] = answer
        made.missed.on_next(Missed(1))
        await anyio.sleep(4)
        assert made.waits_s(1)[-2:] == [1, 2], "from the start again after a success"


async def test_a_router_that_does_not_answer_delays_no_other() -> None:
    async with world(1, 2, r1=is_silent) as made:
        await anyio.sleep(1)
        made.pool.add(3)
        made.missed.on_next(Missed(2))
        await anyio.sleep(1)
        assert (made.log[2], made.log[3]) == (["begun", "known"] * 2, ["begun", "known"])
        assert made.log[1] == ["begun"]
        await anyio.sleep(50)
        assert made.waits_s(1) == [5 + 1, 5 + 2, 5 + 4, 5 + 8, 5 + 8]
        assert made.log[1] == ["begun", "cut short"] * 5 + ["begun"]


async def test_a_loss_during_an_attempt_makes_another_one_due() -> None:
    async with world(1, 2) as made:
        await anyio.sleep(0.005)
        assert (made.log[1], made.log[2]) == (["begun"], ["begun"])
        made.missed.on_next(Missed(1))
        await anyio.sleep(1)
        assert (made.log[1], made.log[2]) == (["begun", "known"] * 2, ["begun", "known"])


async def test_a_loss_without_a_name_concerns_every_router() -> None:
    async with world(1, 2, 3) as made:
        await anyio.sleep(1)
        made.missed.on_next(Missed())
        await anyio.sleep(1)
        assert made.log == {i: ["begun", "known"] * 2 for i in (1, 2, 3)}


async def test_a_loss_of_a_router_that_is_not_there_changes_nothing() -> None:
    async with world(1) as made:
        await anyio.sleep(1)
        for router_id in (2, OWN):
            made.missed.on_next(Missed(router_id))
        await anyio.sleep(1)
        assert made.log == {1: ["begun", "known"]}


@pytest.mark.parametrize(
    ("answer", "result"),
    [(knows, "known"), (knows_a_part, "in part"), (breaks, "failed"), (is_silent, "cut short")],
)
async def test_of_a_router_that_is_gone_nothing_is_requested(answer: Answer, result: str) -> None:
    async with world(1, 2, r1=answer) as made:
        await anyio.sleep(0.5)
        made.pool.remove(1)
        await anyio.sleep(0.1)
        assert made.open == 0
        assert sorted(made.log[1]) == sorted(["begun", "gone", result])
        before = list(made.log[1])
        made.missed.on_next(Missed())
        await anyio.sleep(60)
        assert made.log[1] == before
        assert made.log[2] == ["begun", "known"] * 2


@pytest.mark.parametrize("answer", [knows, breaks, is_silent])
@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_router_that_is_gone_and_back_gets_another_request(answer: Answer, is_at_once: bool) -> None:
    async with world(1, 2, r1=answer) as made:
        await anyio.sleep(0.5)
        made.answers.clear()
        if is_at_once:
            made.at_once(lambda: made.pool.remove(1), lambda: made.pool.add(1))
        else:
            made.pool.remove(1)
            made.pool.add(1)
        assert made.log[1].count("begun") == 1, "what was known is dropped first"
        assert made.log[1][-1] == "gone"
        await anyio.sleep(60)
        assert made.log[1][-1] == "known"
        assert (made.log[1].count("begun"), made.log[1].count("gone")) == (2, 1)
        assert made.log[2] == ["begun", "known"]


async def test_several_that_go_and_come_at_once_are_each_seen() -> None:
    async with world(1, 2, r1=is_silent) as made:
        await anyio.sleep(0.5)
        changes = [(made.pool.remove, 1), (made.pool.remove, 2), (made.pool.add, 3), (made.pool.add, 4)]
        made.at_once(*(lambda change=change, i=i: change(i) for change, i in changes))
        await anyio.sleep(60)
        assert made.log == {
            1: ["begun", "gone", "cut short"],
            2: ["begun", "known", "gone"],
            3: ["begun", "known"],
            4: ["begun", "known"],
        }


@pytest.mark.parametrize("answer", [knows_a_part, breaks, is_silent])
async def test_once_disposed_nothing_is_requested_any_more(answer: Answer) -> None:
    async with world(1, 2, r1=answer) as made:
        await anyio.sleep(1.5)
        assert made.following is not None
        made.following.dispose()
        made.following.dispose()
        await anyio.sleep(0.1)
        assert made.open == 0
        before = {router_id: list(log) for router_id, log in made.log.items()}
        made.missed.on_next(Missed())
        made.pool.add(3)
        made.pool.remove(2)
        await anyio.sleep(60)
        assert made.log == before


async def test_disposed_before_its_tasks_ran_it_requests_nothing() -> None:
    made = World()
    async with AnyIOScheduler() as scheduler:
        made.follow(scheduler)
        assert made.following is not None
        made.following.dispose()
        await anyio.sleep(60)
    assert all(entry != "known" for log in made.log.values() for entry in log)
    assert made.open == 0


async def test_the_end_of_the_pool_is_the_end_of_every_router() -> None:
    async with world(1, 2, r1=is_silent) as made:
        await anyio.sleep(1)
        made.pool.complete()
        await anyio.sleep(60)
        assert made.log == {1: ["begun", "gone", "cut short"], 2: ["begun", "known", "gone"]}
