"""Ten thousand requests through the graph, disturbed at random: each ends in one allowed way, nothing stays open."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import define, frozen

from engines import EchoEngine, as_engine
from operators import Detokenize, Model, Preprocess, PushRouter
from pipeline import Annotated, Context, PenstockError, ResponseStream, Segment
from pipeline.network import static_workers
from pipeline.protocols import BackendOutput
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from pipeline.testing import Ending, Fault, Faults, Probe, watch_streams

pytestmark = pytest.mark.slow

REQUESTS = 10_000
AT_ONCE = 100
TOKENS = 12
PATIENCE_S = 30.0
"""Seconds after which a reader gives up on a stalled stream and kills it."""

ACTIONS = ("none", "stop", "kill", "close", "drop", "cancel")
FAULTS: tuple[dict[str, Any] | None, ...] = (
    None,
    None,
    {"fail_to_connect": True},
    {"error_after": 0},
    {"error_after": 3},
    {"disconnect_after": 0},
    {"disconnect_after": 5},
    {"stall_after": 4},
    {"malformed_after": 2},
    {"delay_s": 0.05},
)


@frozen
class Plan:
    """What happens to one request, decided beforehand."""

    action: str
    after_items: int
    after_s: float | None
    """Seconds after which another task disturbs the request; None if the reader does, after `after_items`."""
    fault: Fault | None

    @classmethod
    def draw(cls, rng: Random) -> Plan:
        fault = rng.choice(FAULTS)
        after_s = rng.uniform(0, 1) if rng.random() < 0.5 else None
        return cls(rng.choice(ACTIONS), rng.randrange(TOKENS + 2), after_s, None if fault is None else Fault(**fault))


@define
class Outcome:
    """What the reader of one request saw."""

    items: int = 0
    finish: str | None = None
    error: PenstockError | None = None
    """Raised, or carried by the last item."""
    items_after_kill: int = 0
    gave_up: bool = False
    read_to_the_end: bool = False


class Run:
    """All requests of one test through one graph."""

    def __init__(self) -> None:
        self.plans: dict[str, Plan] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.top, self.bottom = Probe().named("top"), Probe().named("bottom")
        model = Model.byte_level("echo")
        self.engines = {1: as_engine(EchoEngine(0.05)), 2: as_engine(EchoEngine()), 3: as_engine(EchoEngine(0.01))}
        self.graph: Segment[Any, Annotated[BackendOutput]] = (
            self.top
            >> Preprocess(model)
            >> Detokenize(model)
            >> Faults(plan=lambda request: self.plans[request.id].fault)
            >> self.bottom
            >> PushRouter(static_workers(self.engines, name="echo"))
        )

    async def one(self, number: int, plan: Plan) -> None:
        message = ChatMessage(role="user", content="x" * TOKENS)
        chat = ChatCompletionRequest(model="echo", messages=[message], max_tokens=TOKENS)
        request = Context(chat, id=str(number))
        self.plans[request.id] = plan
        outcome = self.outcomes[request.id] = Outcome()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._give_up_late, request, outcome)
            if plan.after_s is not None and plan.action in ("stop", "kill", "cancel"):
                tasks.start_soon(self._disturb_later, request, plan, tasks.cancel_scope)
            try:
                await self._read(request, plan, outcome)
            except PenstockError as error:
                outcome.error = error
            tasks.cancel_scope.cancel()

    async def _read(self, request: Context[Any], plan: Plan, outcome: Outcome) -> None:
        stream = await self.graph.generate(request)
        if plan.action == "drop":
            await self._drop(stream, plan, outcome)
            return
        async with stream:
            while plan.action != "close" or outcome.items < plan.after_items:
                if plan.after_s is None and outcome.items == plan.after_items:
                    _disturb(request, plan.action)
                was_killed = request.is_killed
                try:
                    item = await stream.__anext__()
                except StopAsyncIteration:
                    outcome.read_to_the_end = True
                    return
                outcome.items_after_kill += was_killed
                _note(item, outcome)

    async def _drop(self, stream: ResponseStream[Any], plan: Plan, outcome: Outcome) -> None:
        async for item in stream:
            _note(item, outcome)
            if outcome.items >= plan.after_items:
                return  # and out of scope, unclosed
        outcome.read_to_the_end = True

    async def _disturb_later(self, request: Context[Any], plan: Plan, reader: anyio.CancelScope) -> None:
        assert plan.after_s is not None
        await anyio.sleep(plan.after_s)
        if plan.action == "cancel":
            reader.cancel()
        else:
            _disturb(request, plan.action)

    async def _give_up_late(self, request: Context[Any], outcome: Outcome) -> None:
        await anyio.sleep(PATIENCE_S)
        outcome.gave_up = True
        request.kill()


def _disturb(request: Context[Any], action: str) -> None:
    if action == "stop":
        request.stop()
    elif action == "kill":
        request.kill()


def _note(item: Annotated[BackendOutput], outcome: Outcome) -> None:
    assert outcome.error is None, "an item followed an error"
    outcome.items += 1
    outcome.error = item.extract_error()
    if item.data is not None and item.data.finish_reason is not None:
        assert outcome.finish is None, "two items had a finish reason"
        outcome.finish = str(item.data.finish_reason)


def _allowed(plan: Plan, outcome: Outcome) -> bool:
    """Whether a request that was so disturbed may have ended so."""
    fault = plan.fault or Fault()
    disturbed = plan.action != "none" or outcome.gave_up
    if outcome.items_after_kill:
        return False
    if outcome.error is not None:
        expected = {
            "CannotConnect": fault.fail_to_connect,
            "BackendUnknown": fault.error_after is not None,
            "Disconnected": fault.disconnect_after is not None,
            "InvalidArgument": False,
        }
        return expected.get(outcome.error.type_name, fault.malformed_after is not None)
    if outcome.finish in ("stop", "length"):
        return True
    if outcome.finish == "cancelled":
        return plan.action == "stop"
    return disturbed


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # streams are dropped on purpose
async def test_every_request_ends_in_one_allowed_way_and_nothing_stays_open() -> None:
    rng = Random(20261121)
    run = Run()
    gc.collect()
    async with AsyncExitStack() as stack:
        streams = stack.enter_context(watch_streams())
        for engine in run.engines.values():
            await stack.enter_async_context(engine)
        limiter = anyio.CapacityLimiter(AT_ONCE)

        async def limited(number: int, plan: Plan) -> None:
            async with limiter:
                await run.one(number, plan)

        async with anyio.create_task_group() as tasks:
            for number in range(REQUESTS):
                tasks.start_soon(limited, number, Plan.draw(rng))
        gc.collect()
        for _ in range(50):
            await checkpoint()
        assert streams.open == []
    assert (run.top.open, run.bottom.open) == (0, 0)
    assert len(run.top.endings) == run.top.requests == REQUESTS
    assert len(run.bottom.endings) == run.bottom.requests
    wrong = {n: (run.plans[n], o) for n, o in run.outcomes.items() if not _allowed(run.plans[n], o)}
    assert not wrong, f"{len(wrong)} requests, of them {dict(list(wrong.items())[:3])}"
    seen = Counter(run.top.endings)
    assert set(seen) == set(Ending), seen
