"""A batcher without a model: KV is a list of tokens, so a wrong block, or one not written, changes what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

from attrs import define, evolve, field

from engines.torch import (
    Batcher,
    Choice,
    Drawn,
    LoadedModel,
    ModelFacts,
    News,
    Order,
    StepPlan,
    TorchEngine,
    TorchSettings,
    order_of,
)
from pipeline.protocols import PreprocessedRequest, SamplingOptions, StopConditions

FACTS = ModelFacts(vocab_size=1000, capacity_tokens=10_000, eos_token_ids=(0,))
BLOCK = 4
SALT = 7


def request_of(
    prompt: Iterable[int], *, max_tokens: int | None = None, min_tokens: int | None = None, **sampling: Any
) -> PreprocessedRequest:
    """Return a request for the prompt with these limits and sampling options."""
    stop = StopConditions(max_tokens=max_tokens, min_tokens=min_tokens)
    return PreprocessedRequest(list(prompt), stop_conditions=stop, sampling_options=SamplingOptions(**sampling))


def order(prompt: Iterable[int], max_tokens: int = 5, **sampling: Any) -> Order:
    """Return the order of such a request, which goes on to its limit."""
    request = request_of(prompt, max_tokens=max_tokens, **sampling)
    request.stop_conditions.ignore_eos = True
    return order_of(request, FACTS, seed=1)


def next_token(tokens: Sequence[int]) -> int:
    """Return what the world's model draws behind these tokens."""
    found = 17
    for token in tokens:
        found = (found * 31 + token + 1) % 65_521
    return found % 1000


def answer_to(prompt: Sequence[int], tokens: int, index: int = 0) -> list[int]:
    """Return the answer of that length, drawn one by one, of the choice with this number."""
    sequence = list(prompt)
    for _ in range(tokens):
        sequence.append((next_token(sequence) + index) % 1000)
    return sequence[len(prompt) :]


class Cells:
    """What computes in the place of a model: for each block the tokens whose KV it holds.

    The choices of one request draw different tokens: that of a number draws so many more.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks: list[list[int | None]] = [[None] * BLOCK for _ in range(blocks)]

    def compute(self, plan: StepPlan) -> list[Drawn | None]:
        """Compute a step through the blocks, as a model would."""
        for load in plan.loads:
            for place in range(load.start, load.kv.tokens):
                self._write(load.block_ids, place, load.kv.data[place])
        for chunk in plan.chunks:
            for place in range(chunk.start, chunk.end):
                self._write(chunk.block_ids, place, chunk.choice.tokens[place])
        return [
            self._draw(chunk.block_ids, chunk.end, chunk.choice.index) if chunk.draws else None for chunk in plan.chunks
        ]

    def _draw(self, blocks: Sequence[int], tokens: int, index: int) -> Drawn:
        seen = [self.blocks[blocks[place // BLOCK]][place % BLOCK] for place in range(tokens)]
        return Drawn((next_token([-1 if token is None else token for token in seen]) + index) % 1000)

    def _write(self, blocks: Sequence[int], place: int, token: int) -> None:
        self.blocks[blocks[place // BLOCK]][place % BLOCK] = token


class CellMachine:
    """The same as the machine of a TorchEngine, which needs no torch then; `before` is called before each step."""

    name = "cells"

    def __init__(self, blocks: int, before: Callable[[StepPlan], object] = lambda plan: None) -> None:
        self.store = SimpleNamespace(blocks=blocks)
        self.facts = ModelFacts(vocab_size=1000, capacity_tokens=blocks * BLOCK)
        self.before = before
        self._cells = Cells(blocks)

    def run(self, plan: StepPlan) -> list[Drawn | None]:
        self.before(plan)
        return self._cells.compute(plan)


class CellEngine(TorchEngine):
    """A TorchEngine with such a machine of 64 blocks, or as many as are given."""

    def __init__(self, machine: CellMachine | None = None, *, handover: Any = None, **settings: Any) -> None:
        sizes: dict[str, Any] = {"block_size_tokens": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 32}
        super().__init__(lambda report: LoadedModel(None, "none"), TorchSettings(**sizes | settings), handover=handover)
        self._cell_machine = machine or CellMachine(64)

    def _make(self) -> Any:
        return self._cell_machine


@define
class World:
    """A batcher and the cache its steps write."""

    batcher: Batcher
    cells: Cells
    answers: dict[int, list[int]] = field(factory=dict)
    """Number of the choice -> the tokens it received."""
    news: list[News] = field(factory=list)
    computed: list[int] = field(factory=list)
    """Tokens computed by each step."""
    _numbers: Any = field(factory=count)

    @classmethod
    def of(cls, blocks: int, *, salt: int = SALT, **settings: Any) -> World:
        made = evolve(TorchSettings(block_size_tokens=BLOCK, max_num_batched_tokens=64), **settings)
        return cls(Batcher(made, blocks, salt=salt), Cells(blocks))

    def add(self, order: Order, **fields: Any) -> Choice:
        """Queue a choice whose news are recorded."""
        number = next(self._numbers)
        self.answers[number] = []

        def receive(news: News) -> None:
            self.news.append(news)
            if news.drawn is not None:
                self.answers[number].append(news.drawn.token_id)

        choice = Choice(order=order, index=fields.pop("index", 0), receive=receive, **fields)
        self.batcher.add(choice)
        return choice

    def begin(self) -> StepPlan | None:
        """Plan a step."""
        return self.batcher.plan()

    def finish(self, plan: StepPlan) -> None:
        """Compute a planned step as a model would, through the blocks, and apply it."""
        self.computed.append(sum(chunk.count for chunk in plan.chunks))
        self.batcher.apply(plan, self.cells.compute(plan))
        self.batcher.pool.check()

    def step(self) -> StepPlan | None:
        """Compute one step; return its plan, None if there was nothing to do."""
        if (plan := self.begin()) is not None:
            self.finish(plan)
        return plan

    def run(self) -> int:
        """Compute until nothing is left to do; return the steps."""
        steps = 0
        while self.step() is not None:
            steps += 1
        return steps
