"""What the placement rules of the KV router make of many loads, in virtual time, as a table.

    python -m benchmarks.placement conversation_trace.jsonl --seeds 4
    python -m benchmarks.placement conversation_trace.jsonl --load agents --load bursts --rule marginal_delay

Every load is replayed through the graph that `penstock replay` runs, by each rule. A row has the mean and p99 time to
the first token, the mean time per token and the mean time of a whole answer: means of all seeds, which are those of the
load and of the router. Those of other rules than cost and expected delay also show each figure by the better of these
two. The conversation trace is that of Mooncake; the other loads are made from random numbers alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from math import log
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, get_args
from unittest.mock import patch

from attrs import evolve, frozen

from engines.mocker import rank
from engines.mocker.build import make_scheduler
from operators.kv import KvRouterConfig, PlacementRule
from pipeline.testing import run_in_virtual_time
from serving.deployment import GraphConfig
from serving.replay import Report, Trace, first_requests, read_trace, run_config

Row = dict[str, Any]
"""A line of a trace."""

BLOCK_TOKENS = 64
RULES: tuple[PlacementRule, ...] = get_args(PlacementRule)
BASES: tuple[PlacementRule, PlacementRule] = ("cost", "expected_delay")
"""Other rules are compared with the better of these."""


@frozen
class Load:
    """Requests, and the workers that get them."""

    workers: int
    rows: Callable[[Random], list[Row]] | None = None
    """Makes them; None: the conversation trace."""
    requests: int | None = None
    """So many of the trace; None: all."""
    speed_up: float = 1.0
    prefill_workers: int = 0
    is_uneven: bool = False
    """Whether every second worker is twice as fast as the others."""


@frozen
class Figures:
    """Milliseconds, each a mean."""

    first_token: float
    p99_first_token: float
    per_token: float
    answer: float

    @classmethod
    def of(cls, report: Mapping[str, float]) -> Figures:
        """Return those of a report."""
        names = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_e2e_latency_ms")
        return cls(*(report[name] for name in names))

    def __iter__(self) -> Iterator[float]:
        return iter((self.first_token, self.p99_first_token, self.per_token, self.answer))


class Names:
    """Hash ids that no other prompt has."""

    def __init__(self) -> None:
        self._next = count()

    def take(self, tokens: int) -> list[int]:
        """Return new ids for so many tokens, the last one perhaps for a part of a block."""
        return [next(self._next) for _ in range(-(-tokens // BLOCK_TOKENS))]


def agents(rng: Random, *, sessions_per_s: float, seconds: float) -> list[Row]:
    """Return sessions of many short turns that begin with one of 20 long prompts."""
    names, rows, at_s, session = Names(), list[Row](), 0.0, 0
    systems = [names.take(tokens) for tokens in (rng.randint(4000, 16_000) for _ in range(20))]
    while at_s < seconds:
        at_s, session = at_s + rng.expovariate(sessions_per_s), session + 1
        held = list(rng.choice(systems))
        length = len(held) * BLOCK_TOKENS
        for turn in range(rng.randint(10, 40)):
            length += min(20_000, max(1, int(rng.lognormvariate(log(600), 1))))
            answer = rng.randint(50, 300)
            held += names.take(max(0, length // BLOCK_TOKENS - len(held)) * BLOCK_TOKENS)
            due = {"delay": round(rng.expovariate(1) * 1000, 3)} if turn else {"timestamp": round(at_s * 1000, 3)}
            ids = held + names.take(length % BLOCK_TOKENS)
            rows.append(due | _request(length, answer, ids) | {"session_id": f"session {session}"})
            length += answer
    return rows


def bursts(rng: Random, *, seconds: float) -> list[Row]:
    """Return prompts that have nothing in common, many of them within two seconds, four times a minute."""
    names, arrivals, at_s = Names(), list[tuple[float, int, int]](), 0.0
    while at_s < seconds:
        at_s += rng.expovariate(1 / 15)
        for _ in range(rng.randint(20, 120)):
            prompt = min(60_000, max(16, int(rng.lognormvariate(log(1500), 1))))
            arrivals.append((at_s + 2 * rng.random(), prompt, max(1, int(rng.lognormvariate(log(200), 1)))))
    return [
        {"timestamp": round(due_s * 1000, 3)} | _request(prompt, answer, names.take(prompt))
        for due_s, prompt, answer in sorted(arrivals)
    ]


def unshared(rng: Random, *, per_s: float, seconds: float) -> list[Row]:
    """Return short prompts that have nothing in common, with long answers."""
    names, rows, at_s = Names(), list[Row](), 0.0
    while at_s < seconds:
        at_s += rng.expovariate(per_s)
        prompt, answer = (max(1, int(rng.expovariate(1 / mean))) for mean in (300, 1000))
        rows.append({"timestamp": round(at_s * 1000, 3)} | _request(prompt, answer, names.take(prompt)))
    return rows


def _request(prompt_tokens: int, answer_tokens: int, hash_ids: Sequence[int]) -> Row:
    return {"input_length": prompt_tokens, "output_length": answer_tokens, "hash_ids": list(hash_ids)}


LOADS = {
    "conversations, 4 workers": Load(4),
    "conversations, 8 workers": Load(8),
    "conversations, 32 workers": Load(32),
    "conversations twice as fast, 4 workers": Load(4, speed_up=2),
    "conversations twice as fast, 8 workers": Load(8, speed_up=2),
    "conversations twice as fast, 32 workers": Load(32, speed_up=2),
    "1,000 conversations, 8 uneven workers": Load(8, requests=1000, is_uneven=True),
    "agents, 8 uneven workers": Load(8, lambda rng: agents(rng, sessions_per_s=0.5, seconds=100), is_uneven=True),
    "unshared, 80 a second, 4 uneven workers": Load(4, lambda rng: unshared(rng, per_s=80, seconds=50), is_uneven=True),
    "1,000 conversations, 4 workers behind 4 prefill workers": Load(4, requests=1000, prefill_workers=4),
    "agents, 8 workers": Load(8, lambda rng: agents(rng, sessions_per_s=0.5, seconds=100)),
    "agents, 32 workers": Load(32, lambda rng: agents(rng, sessions_per_s=1.2, seconds=80)),
    "bursts, 4 workers": Load(4, lambda rng: bursts(rng, seconds=300)),
    "unshared, 40 a second, 4 workers": Load(4, lambda rng: unshared(rng, per_s=40, seconds=50)),
    "unshared, 60 a second, 4 workers": Load(4, lambda rng: unshared(rng, per_s=60, seconds=50)),
}


def trace_of(load: Load, conversations: Path, seed: int) -> Trace:
    """Return the requests of a load, made or read."""
    if load.rows is None:
        trace = read_trace(conversations)
        return trace if load.requests is None else first_requests(trace, load.requests)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "load.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in load.rows(Random(seed))), encoding="utf-8")
        return read_trace(file, trace_block_size=BLOCK_TOKENS)


def replay(load: Load, trace: Trace, rule: PlacementRule, seed: int) -> Figures:
    """Return what the requests of a load took by a rule."""
    config = GraphConfig(
        engine="mocker",
        engine_args={"block_size": str(BLOCK_TOKENS)},
        workers=load.workers,
        prefill_workers=load.prefill_workers,
        router="kv",
        kv_router=KvRouterConfig(router_placement=rule),
        seed=seed,
    )

    async def run() -> Report:
        return await run_config(config, trace, speed_up=load.speed_up)

    with uneven() if load.is_uneven else nullcontext():
        report = run_in_virtual_time(run, backend="asyncio")
    return Figures.of(json.loads(report.to_json()))


def uneven() -> AbstractContextManager[object]:
    """Make every second mock worker twice as fast as the others, until the block ends."""
    made = count()

    def make_uneven(args: Any, **more: Any) -> Any:
        return make_scheduler(evolve(args, speedup_ratio=2.0 if next(made) % 2 else 1.0), **more)

    return patch.object(rank, "make_scheduler", make_uneven)


def mean_of(figures: Sequence[Figures]) -> Figures:
    """Return the mean of each figure."""
    return Figures(*map(fmean, zip(*figures, strict=True)))


def by_the_better(figures: Figures, bases: Sequence[Figures]) -> list[float]:
    """Return each figure by the least that one of the others has; 1 where that is 0."""
    least = [min(column) for column in zip(*bases, strict=True)]
    return [own / best if best else 1.0 for own, best in zip(figures, least, strict=True)]


def row_text(rule: str, figures: Figures, ratios: Sequence[float]) -> str:
    """Return a line of the table."""
    first, p99, each, answer = figures
    behind = "   " + " ".join(f"{ratio:6.3f}" for ratio in ratios) if ratios else ""
    return f"  {rule:16}{first:9,.1f}{p99:10,.1f}{each:8.2f}{answer:10,.0f}{behind}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.placement", description="Placement rules on the same loads."
    )
    parser.add_argument("trace", type=Path, help="the conversation trace")
    parser.add_argument("--load", action="append", default=[], help="loads whose name begins so; repeatable")
    parser.add_argument("--rule", action="append", default=[], choices=RULES, help="beside the two compared with")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    rules = dict.fromkeys((*BASES, *(arguments.rule or RULES)))
    print(f"  {'ms':16}{'first':>9}{'p99':>10}{'each':>8}{'answer':>10}   by the better")
    for name, load in LOADS.items():
        if arguments.load and not name.startswith(tuple(arguments.load)):
            continue
        print(name, flush=True)
        traces = [trace_of(load, arguments.trace, seed) for seed in range(arguments.seeds)]
        found: dict[str, Figures] = {}
        for rule in rules:
            found[rule] = mean_of([replay(load, trace, rule, seed) for seed, trace in enumerate(traces)])
            ratios = [] if rule in BASES else by_the_better(found[rule], [found[base] for base in BASES])
            print(row_text(rule, found[rule], ratios), flush=True)


if __name__ == "__main__":
    main()
