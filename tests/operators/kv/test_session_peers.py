"""shared_sessions: routers in different processes send the turns of a session to one worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import anyio
import pytest
from attrs import define, field

from operators import PushRouter
from operators.kv import KvPushRouter, KvRouterConfig, WorkerRank, kv_router, shared_sessions
from operators.kv.session_peers import SESSIONS_ENDPOINT, SESSIONS_TOPIC, SessionEvent, SessionsPart, SessionsRequest
from operators.kv.sessions import SESSION_HEADER, Bound, Claimed, SessionBinding, Sessions
from pipeline import Annotated, AsyncEngine, Context, Control, Unavailable, function_engine
from pipeline.loop import clock
from pipeline.network import Scope, static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.testing import ScriptedEngine
from tests.operators.kv.load.worlds import ENDPOINT
from tests.pipeline.network.direct_events.worlds import Deployment, Process, deployment

A, B = WorkerRank(1), WorkerRank(2)
TTL_S = 60.0
SCOPE = Scope("ns", "workers")


@define(eq=False)
class Front:
    """A front end: a process with sessions, and the workers that it knows."""

    process: Process
    sessions: Sessions
    known: set[WorkerRank] = field(factory=lambda: {A, B})

    async def turn(self, rank: WorkerRank = A, session_id: str = "s", *, lasts_s: float = 0.0) -> WorkerRank:
        """Hold a turn, which goes to `rank` if the session is not bound. Return where it went."""
        entry = await self.sessions.enter(session_id, "r", Control())
        bound = self.sessions.bind(entry, rank) if isinstance(entry, Claimed) else entry
        await anyio.sleep(lasts_s)
        self.sessions.leave(bound)
        return bound.rank

    def peek(self, session_id: str = "s") -> WorkerRank | None:
        return self.sessions.peek(session_id)


@asynccontextmanager
async def front(made: Deployment, *, bindings_max: int = 100) -> AsyncIterator[Front]:
    """Give another front end, which ends with the block."""
    async with made.process() as process:
        found = Front(process, Sessions(TTL_S, clock(), bindings_max))
        async with shared_sessions(process, ENDPOINT, found.sessions, found.known.__contains__):
            yield found


@asynccontextmanager
async def fronts(count: int, **given: Any) -> AsyncIterator[tuple[Deployment, list[Front]]]:
    """Give a deployment of so many front ends that have seen each other."""
    async with deployment() as made, AsyncExitStack() as stack:
        found = [await stack.enter_async_context(front(made, **given)) for _ in range(count)]
        await anyio.sleep(1)
        yield made, found


async def test_a_session_goes_to_one_worker_whichever_front_end_gets_its_turns() -> None:
    async with fronts(3) as (_, (one, other, third)):
        assert await one.turn(A) == A
        await anyio.sleep(0.1)
        assert (other.peek(), third.peek()) == (A, A)
        assert await other.turn(B) == A
        assert await third.turn(B) == A


async def test_a_front_end_that_starts_late_knows_the_sessions_of_all_others() -> None:
    async with fronts(2, bindings_max=600) as (made, (one, other)):
        for n in range(300):
            await one.turn(A, f"a{n}")
        await other.turn(B, "b")
        await anyio.sleep(1)
        async with front(made, bindings_max=600) as late:
            await anyio.sleep(1)
            assert [late.peek(f"a{n}") for n in range(300)] == [A] * 300
            assert late.peek("b") == B


async def test_what_a_late_front_end_gets_is_as_old_as_it_is() -> None:
    async with fronts(1) as (made, (one,)):
        await one.turn(A)
        await anyio.sleep(TTL_S - 10)
        async with front(made) as late:
            await anyio.sleep(1)
            assert late.peek() == A
            await anyio.sleep(10)
            assert (one.peek(), late.peek()) == (None, None)


async def test_the_bindings_of_a_front_end_that_died_stay() -> None:
    async with fronts(1) as (made, (one,)):
        async with front(made) as dies:
            await anyio.sleep(1)
            await dies.turn(B)
            await anyio.sleep(1)
            dies.process.crash()
        await anyio.sleep(20)
        assert await one.turn(A) == B


@pytest.mark.parametrize("lasts_s", [0.0, 50.0, 3 * TTL_S])
async def test_a_session_in_use_at_one_front_end_lasts_at_the_others(lasts_s: float) -> None:
    async with fronts(2) as (_, (one, other)):
        for _ in range(4):
            await one.turn(A, lasts_s=lasts_s)
            await anyio.sleep(TTL_S - 5)
            assert other.peek() == A
        await anyio.sleep(TTL_S)
        assert (one.peek(), other.peek()) == (None, None)


async def test_a_session_whose_worker_is_at_fault_is_bound_anew_everywhere() -> None:
    async with fronts(2) as (_, (one, other)):
        await one.turn(A)
        await anyio.sleep(0.1)
        entry = other.sessions.enter_nowait("s")
        assert isinstance(entry, Bound)
        other.sessions.leave(entry)
        assert other.sessions.invalidate(entry)
        await anyio.sleep(0.1)
        assert one.peek() is None
        await other.turn(B)
        await anyio.sleep(0.1)
        assert await one.turn(A) == B


async def test_a_turn_longer_than_the_time_keeps_its_session_elsewhere() -> None:
    async with fronts(2) as (_, (one, other)), anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: one.turn(A, lasts_s=3 * TTL_S))
        for _ in range(5):
            await anyio.sleep(TTL_S / 2)
            assert other.peek() == A


async def test_a_binding_to_another_worker_meanwhile_is_not_unbound() -> None:
    async with fronts(2) as (_, (one, other)):
        await one.turn(A)
        other.process.events.publisher(SCOPE, SESSIONS_TOPIC).publish(SessionEvent(7, [], [SessionBinding("s", B)]))
        await anyio.sleep(1)
        assert one.peek() == A


async def test_a_worker_that_is_not_known_here_yet_counts_once_it_is() -> None:
    async with fronts(2) as (made, (one, other)):
        other.known.remove(A)
        await one.turn(A)
        await anyio.sleep(3)
        assert other.peek() is None
        other.known.add(A)
        await anyio.sleep(2)
        assert other.peek() == A
        async with front(made) as late:
            late.known.clear()
            await anyio.sleep(20)
            late.known.add(A)
            await anyio.sleep(20)
            assert late.peek() == A


async def test_a_worker_that_stays_unknown_is_given_up() -> None:
    async with fronts(2) as (_, (one, other)):
        other.known.remove(A)
        await one.turn(A)
        await one.process.store.close()  # so that nothing is requested of it any more
        await anyio.sleep(40)
        other.known.add(A)
        await anyio.sleep(TTL_S / 3 - 15)
        assert other.peek() is None


async def test_what_was_lost_on_the_way_is_requested() -> None:
    async with fronts(2) as (made, (one, other)):
        made.faults.cut.add(one.process.number)
        made.faults.break_streams()
        await one.turn(A)
        await anyio.sleep(5)
        assert other.peek() is None
        made.faults.cut.clear()
        await anyio.sleep(12)
        assert other.peek() == A


def event(**changed: Any) -> dict[str, Any]:
    """Return an event as it is on the wire, with these fields of its binding changed."""
    binding = {"session_id": "s", "worker": {"worker_id": 1, "dp_rank": 0}, "idle_s": 0.0}
    return {"router_id": 7, "bound": [binding | changed], "unbound": []}


WRONG: list[Any] = [
    event(idle_s=-1.0),
    event(idle_s=float("nan")),
    event(idle_s=TTL_S),
    event(session_id="s" * 257),
    event(session_id=5),
    event(worker={"worker_id": 9, "dp_rank": 0}),
    "nothing",
]


@pytest.mark.parametrize("wrong", WRONG)
async def test_an_event_that_cannot_be_changes_nothing(wrong: Any) -> None:
    async with fronts(2) as (_, (one, other)):
        publisher = one.process.events.publisher(SCOPE, SESSIONS_TOPIC)
        publisher.publish(wrong)
        await anyio.sleep(1)
        assert len(other.sessions) == 0
        publisher.publish(event())
        await anyio.sleep(1)
        assert other.peek() == A


@asynccontextmanager
async def stranger(made: Deployment, engine: AsyncEngine[Any, Any], router_id: int = 5) -> AsyncIterator[None]:
    """Have a process that answers with this engine for the router of this id."""
    async with made.process() as process:
        await process.serve(f"ns/workers/{SESSIONS_ENDPOINT}", engine, instance_id=router_id)
        yield


def giving(*session_ids: str) -> AsyncEngine[Any, Any]:
    """Return an engine that gives these sessions, bound to A."""

    async def give(request: SessionsRequest) -> AsyncIterator[SessionsPart]:
        yield SessionsPart([SessionBinding(session_id, A) for session_id in session_ids])

    return function_engine(give)


async def test_an_answer_without_end_is_refused_and_requested_again() -> None:
    requested_s: list[float] = []

    @function_engine
    async def give(request: SessionsRequest) -> AsyncIterator[SessionsPart]:
        requested_s.append(anyio.current_time())
        for n in range(1000):
            yield SessionsPart([SessionBinding(f"{n}-{m}", A) for m in range(20)])

    async with fronts(1) as (made, (one,)), stranger(made, give):
        await anyio.sleep(30)
        assert len(one.sessions) <= one.sessions.bindings_max
        assert 4 < len(requested_s) < 12


async def test_a_front_end_that_does_not_answer_delays_no_other() -> None:
    open_answers: list[int] = []

    @function_engine
    async def give(request: SessionsRequest) -> AsyncIterator[SessionsPart]:
        open_answers.append(1)
        try:
            yield SessionsPart([SessionBinding("slow", B)])
            await anyio.sleep_forever()
        finally:
            open_answers.pop()

    async with fronts(1) as (made, (one,)), stranger(made, give):
        await anyio.sleep(1)
        assert one.peek("slow") == B, "what comes counts at once"
        async with stranger(made, giving("s"), router_id=6):
            await anyio.sleep(1)
            assert one.peek("s") == A
        async with front(made) as late:
            await anyio.sleep(1)
            assert late.peek("s") == A
            assert len(open_answers) == 2
        await anyio.sleep(1)
        assert len(open_answers) == 1, "the requests of a front end that has ended are closed"


async def test_a_front_end_that_answers_with_an_error_gets_requests_until_it_gives_its_sessions() -> None:
    requested_s: list[float] = []

    @function_engine
    async def give(request: SessionsRequest) -> AsyncIterator[SessionsPart]:
        requested_s.append(anyio.current_time())
        yield SessionsPart([SessionBinding(f"{len(requested_s)}", A)])
        if len(requested_s) < 4:
            raise Unavailable("not yet")

    async with fronts(1) as (made, (one,)), stranger(made, give):
        await anyio.sleep(60)
        assert len(requested_s) == 4
        assert one.peek("4") == A


async def test_a_front_end_that_is_back_under_its_id_is_known_anew() -> None:
    async with fronts(1) as (made, (one,)):
        for name in ("first", "second"):
            async with stranger(made, giving(name)):
                await anyio.sleep(1)
                assert one.peek(name) == A


async def test_nothing_is_shared_once_the_block_has_ended() -> None:
    async with fronts(1) as (made, (one,)):
        async with front(made) as gone:
            await anyio.sleep(1)
            kept = gone.sessions
        assert (kept.on_bound, kept.on_unbound) == (None, None)
        await one.turn(A)
        await anyio.sleep(1)
        assert kept.peek("s") is None


async def test_turns_over_two_front_ends_reach_one_engine() -> None:
    """Through the whole router: without credit for what is cached nothing else keeps requests together."""
    engines = {n: ScriptedEngine([Annotated(LLMEngineOutput([1]))]) for n in (1, 2, 3, 4)}

    async with deployment() as made, AsyncExitStack() as stack:
        graphs: list[AsyncEngine[Any, Any]] = []
        for seed in range(2):
            process = await stack.enter_async_context(made.process())
            workers = static_workers(engines)
            config = KvRouterConfig(overlap_score_credit=0.0)
            router = kv_router(workers, config, block_size_tokens=4, rng=Random(seed), session_ttl_s=TTL_S)
            assert router.sessions is not None
            await stack.enter_async_context(shared_sessions(process, ENDPOINT, router.sessions, router.pool.has_rank))
            graphs.append(KvPushRouter(router) >> PushRouter(workers))
        await anyio.sleep(1)
        for n in range(12):
            payload = PreprocessedRequest([n] * 8)
            request = Context(payload, metadata={SESSION_HEADER: "s"})
            await (await graphs[n % 2].generate(request)).collect()
            await anyio.sleep(0.1)
        assert sorted(len(engine.requests) for engine in engines.values()) == [0, 0, 0, 12]
