"""Workers a request has failed on: in no mode of the router they get it again, however soon they are back."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest

from operators import KvPushRouter, Migration, PushRouter
from operators.kv import KvRouterConfig, kv_router
from operators.pool import AllBusy
from operators.pool.health import note_failure, without_failed
from operators.pool.push_router import RouterMode
from pipeline import (
    Annotated,
    AsyncEngine,
    CannotConnect,
    Context,
    Disconnected,
    InvalidArgument,
    PenstockError,
    ResponseStream,
    Unavailable,
    WorkerOverloaded,
    link,
)
from pipeline.errors import BackendUnknown, chain
from pipeline.network import static_workers
from pipeline.protocols import LLMEngineOutput, MigrationState, PreprocessedRequest, RequestTracker
from pipeline.testing import Fail, ScriptedEngine, Stall, watch_streams

from .worlds import Shrinking

MODES: list[RouterMode] = ["round_robin", "random", "power_of_two_choices", "least_loaded", "device_aware_weighted"]
GONE = Disconnected("gone")


def item(token_id: int) -> Annotated[LLMEngineOutput]:
    return Annotated(LLMEngineOutput([token_id]))


class Refusing(ScriptedEngine):
    """Raises from `generate`, and counts that."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__([], fails=error)


def failing(how: str) -> ScriptedEngine:
    scripts: dict[str, list[Any]] = {
        "raises": [item(1), Fail(GONE)],
        "says": [item(1), Annotated[Any].from_error(GONE)],
        "at once": [Fail(GONE)],
        "falls silent": [item(1), Stall()],
    }
    errors: dict[str, PenstockError] = {"refuses": CannotConnect("no"), "is busy": WorkerOverloaded("busy")}
    return Refusing(errors[how]) if how in errors else ScriptedEngine(scripts[how])


WAYS = ["raises", "says", "at once", "falls silent", "refuses", "is busy"]


async def outcome(graph: AsyncEngine[Any, Any], payload: Any = None) -> tuple[int, Exception | None]:
    """How many tokens came, and what was raised."""
    tokens = 0
    try:
        async with await graph.generate(Context(payload or PreprocessedRequest([1]))) as stream:
            async for one in stream:
                tokens += len(one.data.token_ids) if one.data is not None else 0
                one.ok()
    except PenstockError as error:
        return tokens, error
    return tokens, None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("healthy", [1, 2, 3])
async def test_a_request_returns_to_no_worker_it_has_failed_on(mode: RouterMode, how: str, healthy: int) -> None:
    """A pool that excludes no worker by itself, and as many attempts as there are instances."""
    engines = {i: ScriptedEngine([item(9)]) if i == healthy else failing(how) for i in (1, 2, 3)}
    router = PushRouter(static_workers(engines), mode, Random(5), cooldown_s=0, silence_timeout_s=1)
    with watch_streams() as streams:
        for _ in range(4):
            tokens, raised = await outcome(Migration(2) >> router)
            assert (raised, tokens >= 1) == (None, True)
    assert streams.open == []
    sent = [len(engine.requests) for i, engine in engines.items() if i != healthy]
    assert len(engines[healthy].requests) == 4
    assert max(sent) <= 4
    assert {i: load.in_flight for i, load in router.loads.current().items()} == {1: 0, 2: 0, 3: 0}


async def test_each_request_keeps_its_own_list() -> None:
    engines = {1: ScriptedEngine([Fail(GONE)]), 2: ScriptedEngine([item(9)])}
    router = PushRouter(static_workers(engines), "round_robin", cooldown_s=0)
    for _ in range(3):
        await outcome(Migration(1) >> router)
    assert len(engines[1].requests) > 1


@pytest.mark.parametrize(("last", "kind"), [(CannotConnect("no"), Unavailable), (WorkerOverloaded("busy"), AllBusy)])
async def test_where_all_have_failed_the_reason_is_why(last: PenstockError, kind: type[PenstockError]) -> None:
    engines = {1: Refusing(last), 2: Refusing(last)}
    router = PushRouter(static_workers(engines), cooldown_s=0)
    tokens, raised = await outcome(Migration(5) >> router)
    assert (tokens, type(raised)) == (0, kind)
    assert "failed on 1, 2" in str(raised)
    assert [len(engine.requests) for engine in engines.values()] == [1, 1]


async def test_a_broken_answer_that_all_have_failed_ends_as_it_broke() -> None:
    router = PushRouter(static_workers({1: ScriptedEngine([item(1), Fail(GONE)])}), cooldown_s=0)
    tokens, raised = await outcome(Migration(5) >> router)
    assert (tokens, type(raised)) == (1, Disconnected)
    assert raised is not None
    assert [type(one) for one in chain(raised)] == [Disconnected, Unavailable]


async def test_a_selection_leaves_them_out_too() -> None:
    state = MigrationState()
    state.exclude(1, GONE)
    router = PushRouter(static_workers({1: ScriptedEngine([]), 2: ScriptedEngine([])}), "round_robin")
    sent = Context(PreprocessedRequest([1], migration_state=state))
    assert [router.select_worker(sent) for _ in range(3)] == [2, 2, 2]
    assert router.select_worker(sent, advances=False) == 2


async def test_the_stand_in_for_one_that_vanished_is_none_that_failed() -> None:
    state = MigrationState()
    state.exclude(1, GONE)
    sent = Context(PreprocessedRequest([1], migration_state=state))
    pool = Shrinking([1, 2], leaving=[2])
    with pytest.raises(Unavailable):
        await PushRouter(pool.workers, "round_robin", cooldown_s=0).generate(sent)


async def test_the_failure_is_noted_before_it_is_seen() -> None:
    state = MigrationState()
    router = PushRouter(static_workers({7: ScriptedEngine([item(1), Annotated[Any].from_error(GONE)])}))
    async with await router.generate(Context(PreprocessedRequest([1], migration_state=state))) as stream:
        await anext(stream)
        assert state.excluded_worker_ids == []
        assert (await anext(stream)).is_error
        assert (state.excluded_worker_ids, state.last_error) == ([7], GONE)


def test_what_is_no_fault_of_the_worker_is_not_noted() -> None:
    state = MigrationState()
    sent = PreprocessedRequest([1], migration_state=state)
    for error in (InvalidArgument("no"), BackendUnknown("bug"), Unavailable("none")):
        note_failure(sent, 1, error)
    assert state.excluded_worker_ids == []
    note_failure(sent, 1, GONE)
    assert without_failed([1, 2], sent) == [2]


@pytest.mark.parametrize("payload", [None, 5, "text", PreprocessedRequest([1])])
def test_a_request_that_does_not_migrate_excludes_no_worker(payload: Any) -> None:
    note_failure(payload, 1, GONE)
    assert without_failed([1, 2], payload) == [1, 2]


async def test_a_request_that_names_its_worker_is_not_sent_elsewhere() -> None:
    engines = {1: ScriptedEngine([Fail(GONE)]), 2: ScriptedEngine([item(9)])}
    router = PushRouter(static_workers(engines), "direct")
    named = PreprocessedRequest([1])
    named.ensure_routing().backend_instance_id = 1
    assert await outcome(Migration(3) >> router, named) == (0, GONE)
    assert engines[2].requests == []


async def test_requests_at_the_same_time_do_not_mix() -> None:
    class Picky(AsyncEngine[Any, Any]):
        def __init__(self, instance_id: int) -> None:
            self.instance_id = instance_id

        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            await anyio.sleep(1)
            steps = [item(1)] if request.payload.model == str(self.instance_id) else [Fail(GONE)]
            return await ScriptedEngine(steps).generate(request)

    router = PushRouter(static_workers({i: Picky(i) for i in (1, 2, 3)}), "random", Random(3), cooldown_s=0)
    found: list[Any] = []

    async def send(model: str) -> None:
        found.append(await outcome(Migration(2) >> router, PreprocessedRequest([1], model=model)))

    async with anyio.create_task_group() as tasks:
        for n in range(12):
            tasks.start_soon(send, str(n % 3 + 1))
    assert found == [(1, None)] * 12


async def test_the_kv_router_sends_it_elsewhere_and_the_tracker_knows_the_whole_answer() -> None:
    """As far as the pool itself leaves out workers that failed a moment ago."""
    first: list[Any] = [Annotated(LLMEngineOutput([n])) for n in range(5)]
    rest: list[Any] = [Annotated(LLMEngineOutput([n])) for n in range(5, 12)]
    engines = {i: ScriptedEngine(lambda p: rest if len(p.token_ids) > 8 else [*first, Fail(GONE)]) for i in (1, 2, 3)}
    workers = static_workers(engines)
    push: PushRouter[Any, Any] = PushRouter(workers)
    tracker = RequestTracker(anyio.current_time, lambda: 0, lambda: anyio.Semaphore(1))
    with kv_router(workers, KvRouterConfig(use_kv_events=False), block_size_tokens=4, health=push.health) as kv:
        graph = link(Migration(3), KvPushRouter(kv), push)
        assert await outcome(graph, PreprocessedRequest(list(range(8)), tracker=tracker)) == (12, None)
        assert len(kv.loads) == 0
    sent = {i: len(engine.requests) for i, engine in engines.items()}
    assert sorted(sent.values()) == [0, 1, 1]
    last = next(i for i, engine in engines.items() if engine.requests and len(engine.requests[0].payload.token_ids) > 8)
    assert (tracker.osl_tokens, tracker.isl_tokens, tracker.decode_worker.worker_id) == (12, 8, last)


async def test_where_no_worker_continues_the_tracker_names_the_one_that_answered() -> None:
    workers = static_workers({7: ScriptedEngine([item(1), Fail(GONE)])})
    tracker = RequestTracker(anyio.current_time, lambda: 0, lambda: anyio.Semaphore(1))
    with kv_router(workers, KvRouterConfig(use_kv_events=False), block_size_tokens=4) as kv:
        graph = link(Migration(3), KvPushRouter(kv), PushRouter(workers, cooldown_s=0))
        tokens, raised = await outcome(graph, PreprocessedRequest(list(range(8)), tracker=tracker))
    assert (tokens, type(raised)) == (1, Disconnected)
    assert (tracker.osl_tokens, tracker.prefill_worker.worker_id, tracker.decode_worker.worker_id) == (1, 7, 7)
