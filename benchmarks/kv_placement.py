"""What the choice of a worker costs by rule and number of workers, in CPU time, without the look at the index.

    python -m benchmarks.kv_placement [--workers 8 64 256 1000]

Each worker has cached a system prompt that all have, and a conversation of its own; each request is the next turn of
one. `idle`: nothing is in flight. `busy`: 1 to 11 requests on each worker, a tenth of them with prompts to compute.
`uneven`: busy, and every second worker takes twice as long. There are 100 requests a second, by the router's clock.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from random import Random
from time import process_time
from typing import get_args

from attrs import define, field

from operators.kv import KvRouter, KvRouterConfig, PlacementRule, PromptBlocks, RouteRequest, WorkerRank, kv_router
from operators.kv.load import SequenceLoad
from operators.kv.pace import PaceMeter
from operators.kv.reservation import LoadBook
from pipeline.network import static_workers
from pipeline.testing import ScriptedEngine

BLOCK_TOKENS, SYSTEM_BLOCKS, OWN_BLOCKS, NEW_BLOCKS = 16, 16, 44, 4
REQUESTS, PASSES, WARM_S = 100, 7, 40
STATES = ("idle", "busy", "uneven")


@define
class Fleet:
    """A router over workers that do nothing, and its clock."""

    workers: int
    rule: PlacementRule
    state: str
    rng: Random = field(factory=lambda: Random(1))
    now_s: float = 0.0
    router: KvRouter = field(init=False)

    def __attrs_post_init__(self) -> None:
        config = KvRouterConfig(use_kv_events=False, router_ttl_secs=1e6, router_placement=self.rule)
        pool = static_workers({worker_id: ScriptedEngine([]) for worker_id in range(self.workers)})
        self.router = kv_router(pool, config, block_size_tokens=BLOCK_TOKENS, rng=Random(1))
        loads: LoadBook = self.router.loads
        loads.clock = loads.now_s = lambda: self.now_s
        for worker in range(self.workers):
            self.router.lookup.record(WorkerRank(worker), PromptBlocks(conversation(worker), BLOCK_TOKENS), 0.0)
        if self.state != "idle":
            self._book()
        if (meter := loads._meter) is not None:
            self._observe(meter)
        for _ in range(WARM_S):
            self.now_s += 1.0
            loads.pace(self.now_s)

    def _book(self) -> None:
        rng, sequences = self.rng, self.router.loads.sequences
        for worker in range(self.workers):
            for number in range(rng.randrange(1, 12)):
                hashes = [rng.getrandbits(60) for _ in range(rng.randrange(5, 300))]
                load = SequenceLoad(hashes, rng.randrange(5000) if rng.random() < 0.1 else 0)
                sequences.book(f"{worker}, {number}", WorkerRank(worker), load, 0.0)

    def _observe(self, meter: PaceMeter) -> None:
        """Answer requests of sessions that come back, so that the figures are those of a fleet at work."""
        rng = self.rng
        for number in range(40 * self.workers):
            if not number % 512:
                self.now_s += 1.0
                meter.pace(self.now_s)
            rank, tokens = WorkerRank(number % self.workers), rng.randrange(500, 20_000)
            slow = 2 if self.state == "uneven" and rank.worker_id % 2 else 1
            meter.booked(rng.randrange(4000), 1000, 4000)
            meter.answered(rank, tokens, slow * (0.016 + 1.5e-5 * tokens) * rng.uniform(0.9, 1.1))
            meter.ended(rng.randrange(100, 400), 3.0)

    def choice_us(self) -> float:
        """Return the CPU microseconds of a choice in the fastest pass."""
        prompts = [PromptBlocks(self._turn(number), BLOCK_TOKENS) for number in range(REQUESTS)]
        choices = [self._prepared(blocks) for blocks in prompts]
        took = []
        gc.collect()
        gc.disable()
        for _ in range(PASSES):
            begun_s = process_time()
            for choose in choices:
                self.now_s += 0.01
                choose()
            took.append(process_time() - begun_s)
        gc.enable()
        return 1e6 * min(took) / REQUESTS

    def _turn(self, number: int) -> list[int]:
        begin = 2**24 + number * NEW_BLOCKS * BLOCK_TOKENS
        return [*conversation(self.rng.randrange(self.workers)), *range(begin, begin + NEW_BLOCKS * BLOCK_TOKENS)]

    def _prepared(self, blocks: PromptBlocks) -> Callable[[], object]:
        router, request = self.router, RouteRequest(blocks=blocks)
        candidates, settings = router.pool.candidates(request), router.selector.settings(None)
        overlap, hashes = router.lookup.find(blocks, self.now_s), blocks.sequence_hashes
        return lambda: router._select(request, candidates, overlap, settings, hashes, self.now_s)


def conversation(number: int) -> list[int]:
    """Return the tokens of a conversation: the system prompt and more that only this one has."""
    begin = 2**20 + number * 2**12
    return [*range(SYSTEM_BLOCKS * BLOCK_TOKENS), *range(begin, begin + OWN_BLOCKS * BLOCK_TOKENS)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_placement", description="Choices, by rule.")
    parser.add_argument("--workers", nargs="+", type=int, default=[8, 64, 256, 1000])
    arguments = parser.parse_args()
    print(f"  {'µs of CPU':16}" + "".join(f"{workers:>9}" for workers in arguments.workers))
    for state in STATES:
        print(state, flush=True)
        for rule in get_args(PlacementRule):
            figures = [Fleet(workers, rule, state).choice_us() for workers in arguments.workers]
            print(f"  {rule:16}" + "".join(f"{figure:9.1f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
