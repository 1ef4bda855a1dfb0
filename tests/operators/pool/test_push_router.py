"""PushRouter: which instance gets a request, and what happens when there is none."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from operators import PushRouter
from operators.pool import Loads, assign_worker
from operators.pool.push_router import RouterMode
from pipeline import (
    Annotated,
    AnyContext,
    CannotConnect,
    Context,
    GraphError,
    InvalidArgument,
    Unavailable,
    identity,
)
from pipeline.network import Runtime, Workers
from pipeline.protocols import PreprocessedRequest, RoutingHints
from pipeline.testing import ScriptedEngine, check_engine

from .worlds import (
    NAME,
    PICKING_MODES,
    Shrinking,
    answerer,
    answering,
    assigned,
    in_flight,
    lowest,
    pool,
    router,
    send_to,
)


async def test_round_robin_sends_to_one_after_the_other() -> None:
    engine = router(1, 2, 3)
    assert [await answerer(engine) for _ in range(4)] == [1, 2, 3, 1]


async def test_random_sends_as_its_rng_draws() -> None:
    engine, expected = router(1, 2, 3, mode="random", rng=Random(7)), Random(7)
    assert [await answerer(engine) for _ in range(40)] == [expected.choice([1, 2, 3]) for _ in range(40)]
    assert await answerer(router(1, 2, 3, mode="random")) in {1, 2, 3}


async def test_a_picker_of_ones_own_decides() -> None:
    def highest(candidates: Sequence[int], loads: Loads, request: AnyContext, rng: Random) -> int:
        return candidates[-1]

    assert await answerer(PushRouter(pool(answering(1, 2, 3)), pick=highest)) == 3


async def test_a_picker_gets_the_loads_and_the_request() -> None:
    seen: list[Any] = []

    def looking(candidates: Sequence[int], loads: Loads, request: AnyContext, rng: Random) -> int:
        seen.append((list(candidates), {i: loads[i].in_flight for i in candidates}, request.payload, rng.random()))
        return 2

    engine = PushRouter(pool(answering(1, 2)), rng=Random(5), pick=looking)
    async with await engine.generate(Context("a")):
        assert await answerer(engine, "b") == 2
    expected = Random(5)
    assert seen == [([1, 2], {1: 0, 2: 0}, "a", expected.random()), ([1, 2], {1: 0, 2: 1}, "b", expected.random())]


def test_an_unknown_mode_is_refused_at_declaration() -> None:
    unknown: Any = "busiest"
    with pytest.raises(GraphError, match="round_robin, random, power_of_two_choices, least_loaded"):
        router(1, mode=unknown)


def test_a_mode_and_a_picker_exclude_each_other() -> None:
    with pytest.raises(GraphError, match="exclude each other"):
        PushRouter(pool({}), "random", pick=lowest)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cooldown_s": -1.0},
        {"cooldown_s": float("nan")},
        {"silence_timeout_s": 0.0},
        {"silence_timeout_s": float("nan")},
        {"silence_timeout_s": float("inf")},
    ],
)
def test_times_that_cannot_be_are_refused_at_declaration(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        PushRouter(pool({}), **wrong)  # type: ignore[arg-type]
    assert caught.value.field in wrong


# -- direct, and what vanishes


async def test_a_request_names_its_instance_in_direct_mode() -> None:
    request = PreprocessedRequest([1], routing=RoutingHints(backend_instance_id=2))
    assert await answerer(router(1, 2, 3, mode="direct"), request) == 2


@pytest.mark.parametrize("payload", [None, PreprocessedRequest([1]), PreprocessedRequest([1], routing=RoutingHints())])
async def test_a_request_that_names_none_is_refused_in_direct_mode(payload: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await router(1, mode="direct").generate(Context(payload))
    assert caught.value.field == "routing.backend_instance_id"


async def test_an_unknown_instance_is_named_and_no_other_gets_the_request() -> None:
    engines = answering(1)
    with pytest.raises(CannotConnect, match=f"instance_id=9 not found for endpoint {NAME}"):
        await send_to(PushRouter(pool(engines)), 9)
    request = PreprocessedRequest([1], routing=RoutingHints(backend_instance_id=9))
    with pytest.raises(CannotConnect, match="instance_id=9 not found"):
        await PushRouter(pool(engines), "direct").generate(Context(request))
    assert engines[1].requests == []


@pytest.mark.parametrize("mode", [*PICKING_MODES, "direct"])
async def test_an_assigned_worker_gets_the_request_in_every_mode(mode: RouterMode) -> None:
    """Also where the request itself names another one."""
    engine = router(1, 2, 3, mode=mode)
    elsewhere = PreprocessedRequest([1], routing=RoutingHints(backend_instance_id=3))
    for payload in (None, elsewhere):
        assert [item.data for item in await (await engine.generate(assigned(2, payload))).collect()] == [2]


async def test_a_worker_is_assigned_for_one_dispatch() -> None:
    engine, request = router(1, 2), assigned(2)
    answers = [(await (await engine.generate(request)).collect())[0].data for _ in range(3)]
    assert answers == [2, 1, 2], "the turns of the mode begin behind it"


async def test_the_mark_holds_for_the_request_with_another_payload_and_not_for_its_children() -> None:
    engine, request = router(1, 2), assigned(2)
    assert [item.data for item in await (await engine.generate(request.child(None))).collect()] == [1]
    assert [item.data for item in await (await engine.generate(request.with_payload("other"))).collect()] == [2]


async def test_sub_requests_that_run_at_once_keep_their_own_workers() -> None:
    """As a prefill and the decode that waits for it: they share the registry the mark is in."""
    engine, request = router(1, 2), Context(None)
    parts = [request.child(None, linked=False), request.child(None)]
    for part, worker_id in zip(parts, (2, 1), strict=True):
        assign_worker(part, worker_id)
    assert [(await (await engine.generate(part)).collect())[0].data for part in parts] == [2, 1]


async def test_an_instance_that_vanishes_before_the_dispatch_is_replaced() -> None:
    assert await answerer(PushRouter(Shrinking([1, 2, 3], leaving=[1]).workers, pick=lowest)) == 2


async def test_the_load_of_a_request_moves_to_the_instance_that_takes_the_place() -> None:
    shrinking = Shrinking([1, 2, 3], leaving=[1])
    engine = PushRouter[Any, Any](shrinking.workers, pick=lowest)
    async with await engine.generate(Context("a")):
        assert [request.payload for request in shrinking.engines[2].requests] == ["a"]
        assert {i: load.in_flight for i, load in engine.loads.current().items()} == {2: 1, 3: 0}
    assert in_flight(engine) == 0


async def test_nothing_takes_the_place_of_an_assigned_worker_that_vanishes() -> None:
    engine = PushRouter[Any, Any](Shrinking([1, 2, 3], leaving=[1]).workers)
    with pytest.raises(CannotConnect, match="instance_id=1 not found"):
        await send_to(engine, 1)
    assert in_flight(engine) == 0


async def test_the_last_instance_that_vanishes_is_no_connection_trouble() -> None:
    with pytest.raises(Unavailable, match=r"instance_id=1 not found .*no other instances available"):
        await PushRouter(Shrinking([1], leaving=[1]).workers).generate(Context(None))


async def test_only_one_other_instance_is_tried() -> None:
    with pytest.raises(CannotConnect, match="instance_id=2 not found"):
        await PushRouter(Shrinking([1, 2, 3], leaving=[1, 2]).workers, pick=lowest).generate(Context(None))


async def test_what_an_instance_cannot_reach_itself_goes_to_the_caller() -> None:
    engines = {**answering(2), 1: ScriptedEngine([], fails=CannotConnect("its own trouble"))}
    with pytest.raises(CannotConnect, match="its own trouble"):
        await PushRouter(pool(engines)).generate(Context(None))
    with pytest.raises(CannotConnect, match="its own trouble"):
        await send_to(PushRouter(pool(engines)), 1)
    assert engines[2].requests == []


# -- choosing for others


@pytest.mark.parametrize("mode", PICKING_MODES)
async def test_a_selection_that_does_not_advance_changes_nothing(mode: RouterMode) -> None:
    """The next request goes to the worker it names."""
    engine = router(1, 2, 3, 4, mode=mode, rng=Random(3))
    (foretold,) = {engine.select_worker(Context(None), advances=False) for _ in range(16)}
    assert in_flight(engine) == 0
    assert await answerer(engine) == foretold


def test_a_selection_takes_the_turn_of_a_request() -> None:
    engine = router(10, 20, 30, 40)
    assert [engine.select_worker(Context(None)) for _ in range(4)] == [10, 20, 30, 40]
    assert in_flight(engine) == 0


def test_in_direct_mode_the_request_names_the_selection() -> None:
    engine = router(1, mode="direct")
    named = Context(PreprocessedRequest([1], routing=RoutingHints(backend_instance_id=1)))
    assert engine.select_worker(named) == engine.select_worker(named, advances=False) == 1
    with pytest.raises(InvalidArgument):
        engine.select_worker(Context(None))


@pytest.mark.parametrize("mode", PICKING_MODES)
def test_what_chance_decides_is_decided_anew_for_each_selection(mode: RouterMode) -> None:
    engine = router(*range(1, 9), mode=mode, rng=Random(3))
    found = set()
    for _ in range(64):
        foretold = engine.select_worker(Context(None), advances=False)
        assert engine.select_worker(Context(None)) == foretold
        found.add(foretold)
    assert len(found) >= 7


# -- the stream


async def test_the_request_and_the_stream_are_handed_on_as_they_are() -> None:
    engines = answering(1)
    context = Context("payload")
    async with await PushRouter(pool(engines)).generate(context) as stream:
        assert engines[1].requests == [context]
        assert stream.context is context


def test_a_drawing_shows_the_instances() -> None:
    graph = identity() >> router(1, 2)
    assert all(f"{NAME}/{i}" in graph.draw("text") for i in (1, 2))


async def test_a_pool_that_follows_discovery_is_followed() -> None:
    async with Runtime.in_process() as runtime:
        workers: Workers[Any, Any] = runtime.workers(NAME)
        engine = PushRouter(workers)
        first = await runtime.serve(NAME, ScriptedEngine([Annotated("first")]), instance_id=1)
        await runtime.serve(NAME, ScriptedEngine([Annotated("second")]), instance_id=2)
        await workers.wait_for_instances(2)
        assert [await answerer(engine) for _ in range(2)] == ["first", "second"]
        await first.close()
        assert {await answerer(engine) for _ in range(3)} == {"second"}


@pytest.mark.parametrize("mode", PICKING_MODES)
async def test_the_engine_contract_holds(mode: RouterMode) -> None:
    talkative = pool({i: ScriptedEngine([Annotated(n) for n in range(60)]) for i in (1, 2)})
    await check_engine(lambda: PushRouter(talkative, mode), request=None, open_count=in_flight)
    await check_engine(lambda: router(mode=mode), request=None, bad_request="anything", rules=["E2"])


async def test_the_engine_contract_holds_for_direct_requests_and_with_a_limit_to_silence() -> None:
    talkative = pool({1: ScriptedEngine([Annotated(n) for n in range(60)])})
    named = PreprocessedRequest([1], routing=RoutingHints(backend_instance_id=1))
    missing = PreprocessedRequest([1], routing=RoutingHints(backend_instance_id=2))
    await check_engine(
        lambda: PushRouter(talkative, "direct", silence_timeout_s=9),
        request=named,
        bad_request=missing,
        open_count=in_flight,
    )
