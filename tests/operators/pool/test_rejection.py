"""Rejection: a request is refused early, and only when every worker is busy."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from typing import Any

import anyio
import pytest

from operators import AllBusy, PushRouter, Rejection
from operators.pool import OVERLOAD_STATUS
from pipeline import (
    Annotated,
    Context,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    WorkerOverloaded,
    identity,
)
from pipeline.errors import may_migrate
from pipeline.network import static_workers
from pipeline.rx import BehaviorSubject
from pipeline.testing import Probe, ScriptedEngine, check_operator


class Saying:
    """A gate that answers as it was made."""

    def __init__(self, refusal: PenstockError | None = None) -> None:
        self.answer = refusal

    def refusal(self) -> PenstockError | None:
        return self.answer


async def refused(stage: Rejection) -> AllBusy:
    """The error of a request that must not reach the next stage."""
    below = ScriptedEngine([1])
    with pytest.raises(AllBusy) as caught:
        await (stage >> below).generate(Context(None))
    assert below.requests == []
    return caught.value


async def test_a_request_is_refused_when_all_are_busy() -> None:
    busy = BehaviorSubject[AbstractSet[int]]({1, 2})
    probe = Probe()
    router = PushRouter(static_workers({i: ScriptedEngine([i]) for i in (1, 2)}), busy=busy)
    graph = Rejection(router, retry_after_s=3) >> probe >> router
    with pytest.raises(AllBusy, match="all workers are busy: 2") as caught:
        await graph.generate(Context(None))
    assert (caught.value.retry_after_s, caught.value.status, probe.requests) == (3, 529, 0)
    busy.on_next({1})
    assert await (await graph.generate(Context(None))).collect() == [2]


async def test_a_gate_that_knows_better_gives_the_time_to_retry() -> None:
    assert (
        await refused(Rejection(Saying(AllBusy("full", retry_after_s=0.25)), retry_after_s=9))
    ).retry_after_s == 0.25
    assert (await refused(Rejection(Saying(ResourceExhausted("full")), retry_after_s=9))).retry_after_s == 9
    router = PushRouter(static_workers({1: ScriptedEngine([], fails=WorkerOverloaded("full"))}), cooldown_s=5)
    with pytest.raises(WorkerOverloaded):
        await router.generate(Context(None))
    await anyio.sleep(4)
    assert (await refused(Rejection(router))).retry_after_s == pytest.approx(1)


async def test_one_gate_of_several_is_enough() -> None:
    error = await refused(Rejection(Saying(), Saying(ResourceExhausted("prefill is full")), Saying()))
    assert error.message == "prefill is full"


@pytest.mark.parametrize("trouble", [Unavailable("nobody"), WorkerOverloaded("one of them"), None])
async def test_any_other_trouble_is_left_to_the_stage_that_meets_it(trouble: PenstockError | None) -> None:
    below = ScriptedEngine([1])
    assert await (await (Rejection(Saying(trouble)) >> below).generate(Context(None))).collect() == [1]


async def test_a_stopped_request_is_handed_on() -> None:
    context, below = Context(None), ScriptedEngine([1])
    context.stop()
    assert await (await (Rejection(Saying(ResourceExhausted())) >> below).generate(context)).collect() == []


async def test_the_status_is_configured_or_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Saying(ResourceExhausted("full"))
    assert (await refused(Rejection(full, status=429))).facts.status == 429
    monkeypatch.setenv("DYN_HTTP_OVERLOAD_STATUS_CODE", "503")
    error = await refused(Rejection(full))
    assert (error.status, error.facts.status) == (503, 503)
    assert error.facts.retry
    assert not may_migrate(error)


@pytest.mark.parametrize(
    ("text", "status"),
    [(None, 529), ("abc", 529), ("99", 529), ("150", 529), (" 503 ", 503), ("200", 200), ("999", 999), ("1000", 529)],
)
def test_the_environment_may_set_the_status(text: str | None, status: int) -> None:
    assert OVERLOAD_STATUS.of({} if text is None else {"DYN_HTTP_OVERLOAD_STATUS_CODE": text}) == status


@pytest.mark.parametrize(
    "wrong", [{"status": 99}, {"status": 1000}, *({"retry_after_s": s} for s in (-1.0, math.nan, math.inf))]
)
def test_what_cannot_be_is_refused_at_declaration(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Rejection(Saying(), **wrong)
    assert caught.value.field in wrong


def test_a_graph_with_it_prints_as_it_was_written() -> None:
    router: PushRouter[Any, Any] = PushRouter(static_workers({}, name="pool"))
    graph = Rejection(router, retry_after_s=2) >> identity() >> router
    assert str(graph) == "Rejection(PushRouter(pool), retry_after_s=2) >> Identity() >> PushRouter(pool)"


async def test_the_operator_contract_holds() -> None:
    items = [Annotated(n) for n in range(60)]
    await check_operator(lambda: Rejection(Saying()), request=None, items=items)
    full = Saying(ResourceExhausted("full"))
    await check_operator(lambda: Rejection(full), request=None, items=items, bad_request="anything", rules=["E2"])
