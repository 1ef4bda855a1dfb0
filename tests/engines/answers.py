"""What a caller has of an answer in the end, however its tokens were bundled."""

from __future__ import annotations

from typing import Any

from pipeline.protocols import LLMEngineOutput


def shown(chunks: list[LLMEngineOutput]) -> dict[int, tuple[Any, ...]]:
    """Return what each choice has, by its index: lists by token, the sum of log probabilities, and its ends."""
    found: dict[int, tuple[Any, ...]] = {}
    for index in {chunk.index or 0 for chunk in chunks}:
        own = [chunk for chunk in chunks if (chunk.index or 0) == index]
        found[index] = (
            [token for chunk in own for token in chunk.token_ids],
            [logprob for chunk in own for logprob in chunk.log_probs or ()],
            [top for chunk in own for top in chunk.top_logprobs or ()],
            own[-1].cum_log_probs,
            [(chunk.finish_reason, chunk.stop_reason) for chunk in own if chunk.finish_reason is not None],
        )
    return found
