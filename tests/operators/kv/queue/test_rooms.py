"""Looking at a queue by bits places the same requests, in the same order, as asking for each whether it may go."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.kv import KvRouterConfig, kv_router
from operators.kv.prompt import PromptBlocks
from operators.kv.queue import AdmissionController, PolicyClass, PolicyProfile, QueuedRequest, Waiting
from operators.kv.request import RouteRequest
from operators.kv.reservation import Reservation
from pipeline import Control
from pipeline.network import static_workers
from pipeline.protocols import RoutingConstraints
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.testing import ScriptedEngine

from ..worlds import GivenHealth

BLOCK = 4
IDS = (1, 2, 3, 4, 5)
CLASSES = (
    PolicyClass(name="absolute", quantum=8, prefill_busy_threshold=8),
    PolicyClass(name="share", quantum=24, prefill_busy_threshold_frac=0.5, queue_policy="wspt"),
    PolicyClass(name="both", quantum=4, prefill_busy_threshold=20, prefill_busy_threshold_frac=1.0),
)
PROFILE = PolicyProfile(CLASSES, "absolute", {one.name: [index] for index, one in enumerate(CLASSES)})


class PlainAdmission(AdmissionController):
    """Checks for each head of a partition whether all its workers are busy, at each look."""

    def _next(self) -> Any:
        def may_go(waiting: Waiting[QueuedRequest]) -> bool:
            is_full = self._is_full(waiting.class_index, waiting.item)
            waiting.item.candidates = None  # it is placed later than a request that never waited
            return not is_full

        return self._queue.pop(may_go)


class World:
    """One router and what it depends on; `log` has the placings in order, `ended` how each request ended."""

    def __init__(self, plain: bool, seed: int) -> None:
        self.random = Random(seed)
        self.overloaded: set[int] = set()
        self.left_out: set[int] = set()
        self.health = GivenHealth(*IDS)
        configs = {i: ModelRuntimeConfig(max_num_batched_tokens=16 * i, data_parallel_size=1 + i % 2) for i in IDS}
        self.health.publish(configs, {"a": {1, 2}})
        self.router = kv_router(
            static_workers({worker_id: ScriptedEngine([]) for worker_id in IDS}),
            KvRouterConfig(use_kv_events=False),
            block_size_tokens=BLOCK,
            health=self.health,
            rng=Random(1),
            profile=PROFILE,
        )
        admission = self.router.queue
        if plain:
            admission.__class__ = PlainAdmission
        self._place = self.router._place
        recorded: Any = self.router
        recorded._place = self.place
        self.log: list[Any] = []
        self.ended: dict[str, str] = {}
        self.placed: dict[str, Reservation] = {}
        self.controls: list[Control] = []

    def place(self, applicant: Any, must_refresh: bool) -> Reservation:
        self.log.append(applicant.request_id)
        placement = self._place(applicant, must_refresh)
        self.log.append(placement.rank)
        return placement

    async def send(self, request_id: str, request: RouteRequest, control: Control) -> None:
        try:
            placement = await self.router.reserve(request, request_id=request_id, control=control)
        except Exception as error:
            self.ended[request_id] = f"{type(error).__name__}: {error}"
        else:
            self.ended[request_id] = str(placement.rank)
            self.placed[request_id] = placement

    def request(self) -> RouteRequest:
        random = self.random
        rules: list[dict[str, Any]] = [
            {},
            {},
            {"allowed_worker_ids": frozenset(random.sample(IDS, random.randint(1, 3)))},
            {"worker_id": random.choice(IDS), "dp_rank": random.choice([None, 0, 1])},
            {"constraints": RoutingConstraints(required_taints={"fast"})},
            {"constraints": RoutingConstraints(preferred_taints={"fast": random.choice([0.5, float("nan")])})},
            {"failed_worker_ids": frozenset(random.sample(IDS, random.randint(1, 5)))},
        ]
        tokens = [random.randint(0, 3) for _ in range(random.randint(1, 24))]
        blocks = PromptBlocks(tokens, BLOCK, lora_name=random.choice([None, None, "a", "b"]))
        return RouteRequest(
            blocks=blocks,
            policy_class=random.choice([one.name for one in CLASSES]),
            strict_priority=random.choice([0, 0, 1]),
            **random.choice(rules),
        )

    def change(self) -> None:
        """Something the queue is looked at for, or something that only shows at the next look."""
        random = self.random

        def reload() -> None:
            worker_id = random.choice(IDS)
            taints = random.choice([set[str](), {"fast"}])
            cards = self.health.view.cards
            assert cards.configs is not None
            config = evolve(cards.configs[worker_id], taints=taints, max_num_batched_tokens=random.choice([8, 64]))
            self.health.publish({**cards.configs, worker_id: config}, cards.adapters)

        def come_or_go() -> None:
            self.left_out ^= {random.choice(IDS)}
            self.health.left_out(*self.left_out)

        def fill_or_empty() -> None:
            self.overloaded ^= {random.choice(IDS)}
            self.health.overloaded(*self.overloaded)

        changes: list[Callable[[], object]] = [
            reload,
            come_or_go,
            fill_or_empty,
            lambda: self.health.publish(
                self.health.view.cards.configs, {"a": {random.choice(IDS)}, "b": {random.choice(IDS)}}
            ),
            lambda: random.choice(self.controls).stop() if self.controls else None,
        ]
        ends: list[Callable[[], object]] = []
        if self.placed:
            some = random.choice(sorted(self.placed))
            ends.append(lambda: self.placed.pop(some).release())
            ends.append(lambda: self.placed[some].mark_prefill_completed())
        random.choice(changes + ends * 4)()

    async def live(self, steps: int) -> tuple[list[Any], dict[str, str]]:
        async with anyio.create_task_group() as tasks:
            for step in range(steps):
                if self.random.random() < 0.6:
                    self.controls.append(Control())
                    tasks.start_soon(self.send, f"r{step}", self.request(), self.controls[-1])
                else:
                    self.change()
                for _ in range(5):
                    await checkpoint()
                self.log.append(len(self.router.queue))
            self.router.close()
        return self.log, self.ended


@settings(max_examples=settings().max_examples // 3)
@given(st.integers(0, 2**32))
async def test_the_same_requests_go_in_the_same_order_as_by_a_plain_scan(seed: int) -> None:
    expected = await World(plain=True, seed=seed).live(120)
    assert await World(plain=False, seed=seed).live(120) == expected


async def test_a_blocked_queue_is_not_looked_through_for_workers_that_no_request_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(plain=False, seed=1)
    looked: list[str] = []

    async def send(number: int, worker_id: int) -> None:
        blocks = PromptBlocks([number] * 12, BLOCK)
        await world.send(f"r{number}", RouteRequest(blocks=blocks, worker_id=worker_id, dp_rank=0), Control())

    for worker_id in (1, 2):
        await send(worker_id, worker_id)
    async with anyio.create_task_group() as tasks:
        for number in (3, 4, 5):
            tasks.start_soon(send, number, 1)
        while len(world.router.queue) < 3:
            await checkpoint()
        pop = world.router.queue._queue.pop

        def counted(may_go: Any) -> Any:
            looked.append("")
            return pop(may_go)

        monkeypatch.setattr(world.router.queue._queue, "pop", counted)
        world.placed["r2"].release()
        assert (looked, len(world.router.queue)) == ([], 3)
        world.placed["r1"].release()
        assert (len(looked), len(world.router.queue)) == (2, 2), "one goes, and then nobody"
        world.router.close()
