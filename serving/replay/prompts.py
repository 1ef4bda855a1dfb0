"""Prompt: the tokens of a traced request, made when somebody asks for them.

Source: dynamo lib/mocker/src/loadgen/trace.rs, synthesize_tokens.
"""

from __future__ import annotations

from array import array

from attrs import frozen

from pipeline import InvalidArgument

from .spelling import spell

BLOCK_TOKENS = 512
"""A block of a trace, unless somebody says otherwise."""


@frozen
class Prompt:
    """`tokens` tokens: each hash id stands for a block of `block_size_tokens` copies of itself, the last one cut.

    With a `vocabulary` a block is spelled in the token ids of that range instead.
    """

    hash_ids: array[int]
    tokens: int
    block_size_tokens: int
    vocabulary: range | None = None

    @classmethod
    def of(cls, hash_ids: array[int], block_size_tokens: int, input_tokens: int | None = None) -> Prompt:
        """A prompt of the length a trace says, but no longer than its hash ids cover; without a length all of it."""
        covered = len(hash_ids) * block_size_tokens
        tokens = covered if input_tokens is None else min(input_tokens, covered)
        return cls(hash_ids[: -(-tokens // block_size_tokens)], tokens, block_size_tokens)

    def token_ids(self) -> list[int]:
        """The tokens, new each time."""
        made: list[int] = []
        for hash_id in self.hash_ids:
            if self.vocabulary is None:
                made += [hash_id] * self.block_size_tokens
            else:
                made += spell(hash_id, self.block_size_tokens, self.vocabulary)
        del made[self.tokens :]
        return made


def check_block_size(block_size_tokens: int) -> None:
    """Raises InvalidArgument for blocks of no tokens."""
    if block_size_tokens < 1:
        raise InvalidArgument(f"a block has at least one token, not {block_size_tokens}", field="trace_block_size")
