"""Thousands of requests through the whole disaggregated graph while its workers crash, return and fall silent.

    Preprocess ─ Migration ─ Detokenize ─ PrefillRouter ─ KvPushRouter ─ PushRouter ──► decode workers
                                               └── KvPushRouter ─ PushRouter ──► prefill workers

Each answer is the one of an undisturbed run, or a prefix of it that ends as the rules allow; and nothing is left.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from random import Random
from typing import Any
from weakref import WeakSet

import anyio
import pytest
from anyio.abc import TaskGroup
from attrs import define, field, frozen

from operators import Detokenize, KvPushRouter
from pipeline import Annotated, AsyncEngine, CannotConnect, Context, Operator, PenstockError, ResponseStream
from pipeline.errors import Refused, chain, may_migrate
from pipeline.protocols import RequestPhase, RequestTracker
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from pipeline.testing import OpenStreams, watch_streams
from tests.graphs.worlds import Fleet, Half, Host, open_fleet

AT_ONCE = 60
LIMIT = 3
ACTIONS = ("none",) * 7 + ("stop", "kill", "close", "drop", "cancel")
WAYS = ("abort", "fail", "drain", "stall", "stall", "silence", "silence", "all")
FINAL = {"Unavailable"}
"""Errors of the routers that end a request: there is no worker, or none that the request has not failed on."""
BROKEN = {"Disconnected", "ResponseTimeout", "PrefillError", "BackendEngineShutdown"}
"""Errors after which a request migrates: shown if it has migrated too often, or if no worker could continue."""
RARELY_SHOWN = {"TransferFailed"}
"""Another one of them, after which hardly ever no worker can continue: it need not occur."""
WITHOUT_BLOCKS = {"BackendDisconnected"}
"""Errors of a decode whose blocks do not come: shown to a client that has stopped its request, else a PrefillError."""


@frozen
class Answer:
    """The answer to a request that nothing disturbs."""

    token_ids: list[int]
    text: str
    finish: str
    usage: Any


@frozen
class Plan:
    """What happens to one request: by another task at `after_s`, or by the reader after `after_items` if it is None."""

    kind: int
    action: str
    after_items: int
    after_s: float | None

    @classmethod
    def draw(cls, rng: Random, kinds: int) -> Plan:
        after_s = rng.choice([0.0, rng.uniform(0, 0.1), rng.uniform(0, 3)]) if rng.random() < 0.6 else None
        return cls(rng.randrange(kinds), rng.choice(ACTIONS), rng.randrange(6), after_s)


@define
class Seen:
    """What the reader of one request saw."""

    token_ids: list[int] = field(factory=list)
    text: str = ""
    finish: str | None = None
    usage: Any = None
    error: PenstockError | None = None
    after_kill: int = 0
    how: str = "cancelled"


class Watch(Operator[Any, Any, Any, Any]):
    """Pass everything on; count the attempts of each request and the errors that they failed with."""

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.prefilled: Counter[str] = Counter()
        self.trackers: WeakSet[RequestTracker] = WeakSet()

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        self.attempts[request.id] += 1
        self._record(request.payload)
        try:
            stream = await next.generate(request)
        except PenstockError as error:
            self.failures[error.type_name] += 1
            raise
        return ResponseStream(self._watched(stream), request, stream)

    async def _watched(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        try:
            async with stream:
                async for item in stream:
                    if (error := item.extract_error()) is not None:
                        self.failures[error.type_name] += 1
                    yield item
        except PenstockError as error:
            self.failures[error.type_name] += 1
            raise

    def _record(self, payload: Any) -> None:
        if payload.tracker is not None:
            self.trackers.add(payload.tracker)
        given = "has a result" if payload.prefill_result is not None else "nothing"
        self.prefilled["joins a transfer" if payload.bootstrap_info is not None else given] += 1


def request_of(kind: int) -> ChatCompletionRequest:
    """The chat of that kind: the same text, limit, stop string and seed each time."""
    rng = Random(kind)
    text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(1, 60)))
    stop = [chr(rng.randrange(97, 123))] if rng.random() < 0.2 else None
    return ChatCompletionRequest(
        model="echo",
        messages=[ChatMessage(role="user", content=text)],
        max_tokens=rng.randrange(1, 10),
        stop=stop,
        seed=kind,
    )


class Run:
    """All requests of one test and how they ended."""

    def __init__(self, fleet: Fleet, rng: Random, kinds: int, pause_s: float) -> None:
        self.fleet, self.rng, self.kinds, self.pause_s = fleet, rng, kinds, pause_s
        self.attempts, self.decodes = Watch(), Watch()
        graph = fleet.graph.insert_before(Detokenize, self.attempts.named("attempts"))
        self.graph = graph.insert_before(KvPushRouter, self.decodes.named("decodes"))
        self.answers: dict[int, Answer] = {}
        self.outcomes: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        """The outcomes of those requests that more than one worker had."""
        self.ways: Counter[str] = Counter()
        self._coming: list[tuple[Half, str]] = []
        self.wrong: list[Any] = []
        self.requests: WeakSet[Context[Any]] = WeakSet()

    async def learn(self) -> None:
        """Record the answer to each kind while nothing disturbs it."""
        for kind in range(self.kinds):
            seen = Seen()
            async with await self.graph.generate(Context(request_of(kind), id=f"kind {kind}")) as stream:
                async for item in stream:
                    note(item, seen)
            assert seen.error is None
            assert seen.finish in ("stop", "length")
            assert seen.token_ids
            assert seen.finish == "stop" or seen.usage.completion_tokens == len(seen.token_ids)
            self.answers[kind] = Answer(seen.token_ids, seen.text, seen.finish, seen.usage)

    # -- clients

    async def send(self, count: int) -> None:
        """Send this many requests, AT_ONCE at a time, while workers come and go."""
        numbers = iter(range(count))

        async def client() -> None:
            for number in numbers:
                await anyio.sleep(self.rng.uniform(0, 0.4))
                ending = await self.one(str(number), Plan.draw(self.rng, self.kinds))
                if ending in FINAL | BROKEN | RARELY_SHOWN:
                    await anyio.sleep(self.rng.uniform(0, 1.5))

        async with anyio.create_task_group() as returns, anyio.create_task_group() as disturbers:
            disturbers.start_soon(self.disturb, returns)
            async with anyio.create_task_group() as clients:
                for _ in range(min(count, AT_ONCE)):
                    clients.start_soon(client)
            disturbers.cancel_scope.cancel()

    async def one(self, request_id: str, plan: Plan) -> str | None:
        """Send one request, disturb it as planned, and return how it ended."""
        request, seen = Context(request_of(plan.kind), id=request_id), Seen()
        self.requests.add(request)
        async with anyio.create_task_group() as tasks:
            if plan.after_s is not None:
                tasks.start_soon(disturb_later, request, plan, tasks.cancel_scope)
            try:
                await self.read(request, plan, seen)
            except PenstockError as error:
                seen.how, seen.error = "raised", error
            tasks.cancel_scope.cancel()
        return self.judge(request, plan, seen)

    async def read(self, request: Context[Any], plan: Plan, seen: Seen) -> None:
        stream, items = await self.graph.generate(request), 0
        if plan.action == "drop":
            async for item in stream:
                note(item, seen)
                if (items := items + 1) > plan.after_items:
                    seen.how = "dropped"
                    return  # and out of scope, unclosed
            seen.how = "ended"
            return
        async with stream:
            while True:
                if plan.after_s is None and items == plan.after_items:
                    if plan.action == "close":
                        seen.how = "closed"
                        return
                    disturb(request, plan.action)
                was_killed = request.is_killed
                try:
                    item = await stream.__anext__()
                except StopAsyncIteration:
                    seen.how = "ended"
                    return
                items += 1
                seen.after_kill += was_killed
                note(item, seen)

    # -- what is allowed

    def judge(self, request: Context[Any], plan: Plan, seen: Seen) -> str | None:
        attempts, answer = self.attempts.attempts.pop(request.id, 0), self.answers[plan.kind]
        self.decodes.attempts.pop(request.id, None)
        ending = self.ending(request, plan, seen, answer, attempts)
        if ending is None:
            self.wrong.append((request.id, plan, seen, answer, attempts))
            return None
        self.outcomes[ending] += 1
        self.moved[ending] += attempts > 1
        return ending

    def ending(self, request: Context[Any], plan: Plan, seen: Seen, answer: Answer, attempts: int) -> str | None:
        """How the request ended; None if it may not have ended so."""
        delivered = len(seen.token_ids)
        if seen.token_ids != answer.token_ids[:delivered] or not answer.text.startswith(seen.text) or seen.after_kill:
            return None
        if seen.error is not None:
            return None if seen.finish is not None else self.failure(request, seen.error, attempts)
        if seen.finish == "cancelled":
            return "stopped" if plan.action == "stop" else None
        if seen.finish is not None:
            complete = (seen.token_ids, seen.text, seen.finish) == (answer.token_ids, answer.text, answer.finish)
            return "complete" if complete and same_usage(seen, answer) else None
        if seen.how != "ended":
            return seen.how
        return ("killed" if request.is_killed else "stopped") if request.is_stopped else None

    def failure(self, request: Context[Any], error: PenstockError, attempts: int) -> str | None:
        """The error's name if a request may have failed with it, else None."""
        name = error.type_name
        if name == "Cancelled" or name in WITHOUT_BLOCKS:
            return name if request.is_stopped else None
        if name in FINAL:
            return name
        if name not in BROKEN | RARELY_SHOWN:
            return None
        may_go_on = may_migrate(error) and not request.is_stopped and attempts <= LIMIT
        links = list(chain(error))
        no_worker = any(
            isinstance(link, Refused) and not isinstance(above, CannotConnect)
            for above, link in zip([None, *links], links, strict=False)
        )
        return None if may_go_on and not no_worker else name

    # -- workers

    async def disturb(self, returns: TaskGroup) -> None:
        rng, fleet = self.rng, self.fleet
        while True:
            await anyio.sleep(rng.uniform(0, self.pause_s))
            half, way = self._next_way()
            there = fleet.of(half)
            if not there:
                continue
            self.ways[f"{half} {way}"] += 1
            host = rng.choice(there)
            if way == "stall":
                host.engine.timing.stall_ms = rng.uniform(100, 5000)
            elif way == "silence":
                host.engine.timing.stall_ms = 1e12
                returns.start_soon(self.replace, half, [host], rng.uniform(5, 15), "abort")
            elif way == "all":
                returns.start_soon(self.replace, half, there, 0.0, rng.choice(("abort", "fail", "drain")))
            else:
                returns.start_soon(self.replace, half, [host], 0.0, way)

    def _next_way(self) -> tuple[Half, str]:
        """Return a half and what happens to it; each comes equally often, in an order by chance."""
        if not self._coming:
            halves: tuple[Half, ...] = ("prefill", "decode", "decode")
            self._coming = [(half, way) for half in halves for way in WAYS]
            self.rng.shuffle(self._coming)
        return self._coming.pop()

    async def replace(self, half: Half, hosts: list[Host], after_s: float, way: Any) -> None:
        """End workers and start as many again, under their id or another, all at once or one by one."""
        await anyio.sleep(after_s)
        hosts = [host for host in hosts if host in self.fleet.hosts]
        self.fleet.remove(hosts, way)
        for host in hosts:
            await anyio.sleep(self.rng.choice([0.0, self.rng.uniform(0, 2)]))
            same = self.rng.random() < 0.5
            if same and (way != "abort" or self.rng.random() < 0.5):
                await host.gone.wait()
            meets = self.rng.random() < 0.7
            await self.fleet.add(half, host.worker_id if same else None, meets=meets)


def note(item: Annotated[Any], seen: Seen) -> None:
    assert seen.error is None, "an item followed an error"
    seen.error = item.extract_error()
    if (data := item.data) is None:
        return
    if data.token_ids or data.text:
        assert seen.finish is None, "an item followed the finish reason"
    seen.token_ids += data.token_ids
    seen.text += data.text or ""
    seen.usage = data.completion_usage or seen.usage
    if data.finish_reason is not None:
        assert seen.finish is None, "two items had a finish reason"
        seen.finish = str(data.finish_reason)


def same_usage(seen: Seen, answer: Answer) -> bool:
    """Whether the token counts are the same; the number of cached tokens may differ.

    An engine counts with its last item, which does not come if a stop string ends the answer: then only the prompt's
    tokens are compared.
    """
    counts = ("prompt_tokens",) if answer.finish == "stop" else ("prompt_tokens", "completion_tokens", "total_tokens")
    return [getattr(seen.usage, name, None) for name in counts] == [getattr(answer.usage, name) for name in counts]


async def disturb_later(request: Context[Any], plan: Plan, reader: anyio.CancelScope) -> None:
    assert plan.after_s is not None
    await anyio.sleep(plan.after_s)
    if plan.action == "cancel":
        reader.cancel()
    else:
        disturb(request, plan.action)


def disturb(request: Context[Any], action: str) -> None:
    if action in ("stop", "kill"):
        getattr(request, action)()


async def assert_nothing_is_left(run: Run, streams: OpenStreams) -> None:
    for _ in range(3):
        gc.collect()
        await anyio.sleep(20)
    assert streams.open == []
    run.fleet.assert_idle()
    assert len(run.requests) == 0
    with anyio.fail_after(1):
        for watch in (run.attempts, run.decodes):
            for tracker in list(watch.trackers):
                (await tracker.set_phase(RequestPhase.AGGREGATED)).release()


def task_names() -> Counter[str | None]:
    return Counter(task.name for task in anyio.get_running_tasks())


async def play(count: int, kinds: int, seed: int, pause_s: float = 1.5) -> Run:
    """Send `count` requests of `kinds` kinds; something happens to the workers at least every `pause_s`."""
    logging.disable(logging.CRITICAL)  # most of what happens here logs a warning
    try:
        async with open_fleet(3, seed=seed) as fleet:
            with watch_streams() as streams:
                run = Run(fleet, Random(seed), kinds, pause_s)
                await run.learn()
                await anyio.sleep(1)
                before = task_names()
                await run.send(count)
                await anyio.sleep(20)
                assert not run.wrong, f"{len(run.wrong)} requests, of them {run.wrong[:3]}"
                await assert_nothing_is_left(run, streams)
                assert task_names() == before
    finally:
        logging.disable(logging.NOTSET)
    assert sum(run.outcomes.values()) == count
    return run


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # streams are dropped on purpose
async def test_requests_end_as_they_may_while_workers_die_return_and_fall_silent() -> None:
    run = await play(180, kinds=40, seed=4, pause_s=0.4)
    assert sum(run.moved.values()) > 0
    assert len(run.outcomes) > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_twenty_thousand_requests_end_as_they_may_and_in_every_way() -> None:
    wanted = {"complete", "stopped", "killed", "closed", "dropped", "cancelled", "Cancelled", *FINAL, *BROKEN}
    outcomes: Counter[str] = Counter()
    for seed in (20261121, 20261122, 20261123):
        run = await play(20_000, kinds=300, seed=seed)
        outcomes += run.outcomes
        for ending in ("complete", "stopped", "killed", "closed", "dropped", "cancelled"):
            assert run.moved[ending] > 0, ending
        assert run.outcomes["complete"] > 10_000
        assert run.moved["complete"] > 1_000
        assert {name for name, failures in run.attempts.failures.items() if failures} >= BROKEN | FINAL
        assert min(run.decodes.prefilled[how] for how in ("joins a transfer", "has a result", "nothing")) > 100
        assert len(run.ways) == 2 * len(set(WAYS))
        assert min(run.ways.values()) > 5
        # Some errors reach a client a dozen times and all at once, in an order that trio draws: mostly one run has all.
        if wanted <= outcomes.keys():
            break
    assert wanted <= outcomes.keys()
