"""What is known of an engine's undisturbed answers, to compare others with.

Nothing may be concluded from the tokens of an engine that gives another answer each time; of such a one only counts are
checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from attrs import define, field, frozen

from pipeline.protocols import FinishReason, PreprocessedRequest

from .answer import Answer, is_given_up


@frozen
class Said:
    """An answer: the tokens of each choice and why it ended; the number of the chunks does not matter."""

    tokens: tuple[tuple[int, ...], ...]
    reasons: tuple[FinishReason | None, ...]

    @classmethod
    def of(cls, answer: Answer) -> Said:
        return cls(tuple(map(tuple, answer.said)), tuple(answer.reasons))

    @property
    def length(self) -> int:
        """Tokens of the longest choice."""
        return max(map(len, self.tokens), default=0)

    @property
    def is_limited(self) -> bool:
        """Whether a limit ended it, and not the engine by itself."""
        return FinishReason.LENGTH in self.reasons

    def continues(self, said: Sequence[Sequence[int]]) -> bool:
        """Whether each choice begins as this one goes, as far as this one goes."""
        pairs = zip(self.tokens, said, strict=False)
        return all(tuple(new[: len(known)]) == known[: len(new)] for known, new in pairs)

    def __str__(self) -> str:
        return " and ".join(
            f"{list(tokens)} ({reason})" for tokens, reason in zip(self.tokens, self.reasons, strict=True)
        )


def _asks_the_same(one: PreprocessedRequest, other: PreprocessedRequest) -> bool:
    return (one.token_ids, one.stop_conditions) == (other.token_ids, other.stop_conditions)


def has_left_over(first: Said, second: Said) -> bool:
    """Whether the second answer is the first one behind tokens of something else."""
    for before, now in zip(first.tokens, second.tokens, strict=False):
        for at in range(1, len(now)):
            rest = now[at:]
            if (
                len(rest) > 1
                and rest == before[: len(rest)]
                and (len(now) > len(before) or len(rest) > len(before) / 2)
            ):
                return True
    return False


@define
class Known:
    """Answers to the requests that are asked again and again."""

    natural: Said
    """The first one: to the request as it is."""
    plain: Said
    """To the request that is asked again and again: the same one, or limited to fewer tokens."""
    is_steady: bool = False
    """Whether the same request always got the same answer."""
    is_steady_by_chunk: bool = False
    """Whether it came in the same chunks, too."""
    begins: Said | None = None
    """How the answer to the long request begins, if that is always the same."""
    goes_on: bool = False
    """Whether the engine goes on to the limit of a request that wants its end ignored."""
    gap_s: float = 0.0
    """The longest time that a chunk of the first answer took."""
    alone_s: float = 0.0
    """How long the first answer took."""
    answers: list[tuple[PreprocessedRequest, Said | None]] = field(factory=list)
    """Requests with other prompts, too, and what each got alone, if that is always the same."""

    def tokens_in(self, seconds: float) -> float:
        """How many tokens of an answer come in that time, at the pace of the first one."""
        return self.natural.length * seconds / self.alone_s if self.alone_s and self.natural.length else inf

    @classmethod
    def nothing(cls) -> Known:
        """Of an engine whose first answer failed."""
        return cls(Said((), ()), Said((), ()))

    def continues(self, answer: Answer) -> bool:
        """Whether the plain answer and this one begin with the same tokens."""
        return self.plain.continues(answer.said)

    def contradicts(self, request: PreprocessedRequest, answer: Answer) -> bool:
        """Whether the answer, which came to its end, has other tokens than the request got alone."""
        known = next((said for asked, said in self.answers if _asks_the_same(asked, request)), None)
        if known is None or not answer.is_complete or any(map(is_given_up, answer.reasons)):
            return False
        return Said.of(answer).tokens != known.tokens
