"""Log probabilities as engines give them, as a chunk carries them.

Source: dynamo components/src/dynamo/common, extract_logprobs. Other than there a position whose own token has no log
probability leaves the chunk without any, instead of shifting those behind it or taking another token's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.protocols import TopLogprob


def extract_logprobs(
    positions: Sequence[Any] | None, token_ids: Sequence[int], said_tokens: int = 0
) -> tuple[list[float] | None, list[list[TopLogprob]] | None]:
    """`log_probs` and `top_logprobs` of the tokens behind the first `said_tokens`, one entry for each, or None.

    `positions` has one entry for each of `token_ids`: a plain number (there are no candidates then), or a mapping from
    token id to something with `logprob`, and maybe `rank` and `decoded_token`. Where a rank is not given candidates
    are ranked by likelihood. Both are None unless every token has its own log probability.
    """
    new, tokens = list((positions or ())[said_tokens:]), token_ids[said_tokens:]
    if not new or len(new) != len(tokens):
        return None, None
    if all(isinstance(entry, int | float) for entry in new):
        return [float(entry) for entry in new], None
    if not all(isinstance(entry, Mapping) and token in entry for entry, token in zip(new, tokens, strict=True)):
        return None, None
    chosen = [float(entry[token].logprob) for entry, token in zip(new, tokens, strict=True)]
    return chosen, [_candidates(entry) for entry in new]


def _candidates(entry: Mapping[int, Any]) -> list[TopLogprob]:
    """The candidates of one position, the most likely first."""
    ordered = sorted(entry.items(), key=lambda item: -item[1].logprob)
    return [
        TopLogprob(
            rank if (rank := getattr(info, "rank", None)) is not None else place,
            token_id,
            float(info.logprob),
            getattr(info, "decoded_token", None),
        )
        for place, (token_id, info) in enumerate(ordered, 1)
    ]
