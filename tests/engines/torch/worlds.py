"""A batcher without a model: KV is a list of tokens, so a wrong block, or one not written, changes what is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from attrs import define, evolve, field

from engines.torch import Batcher, Choice, Drawn, ModelFacts, News, Order, StepPlan, TorchSettings, order_of
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


def answer_to(prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the answer of that length, drawn one by one."""
    sequence = list(prompt)
    for _ in range(tokens):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


@define
class World:
    """A batcher and the cache its steps write: for each block the tokens whose KV it holds."""

    batcher: Batcher
    cells: list[list[int | None]]
    answers: dict[int, list[int]] = field(factory=dict)
    """Number of the choice -> the tokens it received."""
    news: list[News] = field(factory=list)
    computed: list[int] = field(factory=list)
    """Tokens computed by each step."""
    _numbers: Any = field(factory=count)

    @classmethod
    def of(cls, blocks: int, *, salt: int = SALT, **settings: Any) -> World:
        made = evolve(TorchSettings(block_size_tokens=BLOCK, max_num_batched_tokens=64), **settings)
        return cls(Batcher(made, blocks, salt=salt), [[None] * BLOCK for _ in range(blocks)])

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
        for load in plan.loads:
            for place in range(load.start, load.kv.tokens):
                self._write(load.block_ids, place, load.kv.data[place])
        for chunk in plan.chunks:
            for place in range(chunk.start, chunk.end):
                self._write(chunk.block_ids, place, chunk.choice.tokens[place])
        self.computed.append(sum(chunk.count for chunk in plan.chunks))
        drawn = [self._draw(chunk.block_ids, chunk.end) if chunk.draws else None for chunk in plan.chunks]
        self.batcher.apply(plan, drawn)
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

    def _draw(self, blocks: Sequence[int], tokens: int) -> Drawn:
        seen = [self.cells[blocks[place // BLOCK]][place % BLOCK] for place in range(tokens)]
        return Drawn(next_token([-1 if token is None else token for token in seen]))

    def _write(self, blocks: Sequence[int], place: int, token: int) -> None:
        self.cells[blocks[place // BLOCK]][place % BLOCK] = token
