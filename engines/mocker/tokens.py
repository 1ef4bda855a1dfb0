"""The tokens of a simulated model, and their log probabilities: the same wherever and however often they are computed.

Source: dynamo components/src/dynamo/mocker, the sample engine's log probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import floor
from typing import Protocol

from attrs import frozen

from pipeline.protocols import TopLogprob

TOKEN_IDS = range(1000, 2000)
"""The default range of made-up output tokens."""

# A prime that fits one digit of a Python integer, which is what makes this quick, and three numbers below it that have
# nothing to do with each other: near positions and tokens then lead to far apart results. Requests differ by a
# factor: with a summand, one of as many requests as there are tokens would get the same output as another.
_PRIME = 998_244_353
_AT, _LAST, _FIRST = 592_821_211, 735_632_797, 411_208_127


class Thinking(Protocol):
    """How much of an output is thinking, and the tokens around it."""

    @property
    def start_thinking_token_id(self) -> int: ...
    @property
    def end_thinking_token_id(self) -> int: ...
    @property
    def thinking_ratio(self) -> float: ...


def thinking_tokens(output_tokens: int, ratio: float) -> int:
    """Return how many tokens of an output of that length are thinking, its first and last token included."""
    wanted = floor(output_tokens * ratio)
    return 0 if output_tokens < 2 or wanted == 0 else min(max(wanted, 2), output_tokens)


@frozen
class Output:
    """The output of one request, token by token.

    `planned` lists all tokens beforehand; otherwise they are made up, and `thinking` (index -> token) replaces some.
    """

    seed: int = 0
    planned: Sequence[int] | None = None
    thinking: tuple[tuple[int, int], ...] = ()
    token_ids: range = TOKEN_IDS
    """The range of made-up tokens."""

    @classmethod
    def thought(
        cls,
        thinking: Thinking,
        max_output_tokens: int,
        *,
        emitted_before_tokens: int = 0,
        seed: int = 0,
        token_ids: range = TOKEN_IDS,
    ) -> Output:
        """Return an output that begins with thinking; of a migrated request, only the rest of it."""
        count = thinking_tokens(emitted_before_tokens + max_output_tokens, thinking.thinking_ratio)
        if not count:
            return cls(seed, token_ids=token_ids)
        borders = ((0, thinking.start_thinking_token_id), (count - 1, thinking.end_thinking_token_id))
        marks = tuple((at - emitted_before_tokens, token) for at, token in borders if at >= emitted_before_tokens)
        return cls(seed, thinking=marks, token_ids=token_ids)

    def output_source(self, *, prompt_tokens: int, first: int, last: int) -> Iterator[int]:
        """Return an iterator over the tokens; made-up ones never end.

        A made-up token follows from its position in the whole sequence, the token before it (`last`, before the first
        one), the first token of the prompt and the seed alone. So a migrated request, with its tokens so far at the
        end of its prompt, continues with the same tokens.
        """
        if self.planned is not None:
            return iter(self.planned)
        return self._made_up(prompt_tokens, first, last)

    def _made_up(self, prompt_tokens: int, first: int, last: int) -> Iterator[int]:
        marks = {prompt_tokens + index: token for index, token in self.thinking}
        low, step, count = self.token_ids.start, self.token_ids.step, len(self.token_ids)
        factor = 1 + (first * _FIRST + self.seed) % (_PRIME - 1)
        # (at * _AT + last * _LAST) * factor, with the factors multiplied beforehand.
        by_place, by_last = _AT * factor % _PRIME, _LAST * factor % _PRIME
        summands = itertools.count(prompt_tokens * by_place, by_place)
        if not marks:
            for summand in summands:
                last = low + (summand + last * by_last) % _PRIME % count * step
                yield last
        for at, summand in enumerate(summands, prompt_tokens):
            last = marks[at] if at in marks else low + (summand + last * by_last) % _PRIME % count * step
            yield last


TOP_MAX = 20


def log_probability(token_id: int) -> float:
    """Return -0.1 for each unit of the id's last digit."""
    return -0.1 * (token_id % 10)


def log_probabilities(token_ids: Sequence[int], top: int) -> tuple[list[float], list[list[TopLogprob]]]:
    """Return the log probability of each token, and its candidates (at most 20 besides itself), ranked from 1."""
    candidates = min(top, TOP_MAX)
    own = [log_probability(token_id) for token_id in token_ids]
    ranked = [
        [TopLogprob(rank + 1, token_id + rank, value - 0.1 * rank) for rank in range(candidates + 1)]
        for token_id, value in zip(token_ids, own, strict=True)
    ]
    return own, ranked
