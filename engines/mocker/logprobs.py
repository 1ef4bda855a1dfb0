"""Log probabilities of tokens nobody has computed: a plain function of the ids.

Source: dynamo components/src/dynamo/mocker, the sample engine's log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.protocols import TopLogprob

TOP_MAX = 20


def log_probability(token_id: int) -> float:
    """-0.1 for each unit of the id's last digit."""
    return -0.1 * (token_id % 10)


def log_probabilities(token_ids: Sequence[int], top: int) -> tuple[list[float], list[list[TopLogprob]]]:
    """For each token its own, and it with so many candidates behind it (at most 20), ranked from 1."""
    candidates = min(top, TOP_MAX)
    own = [log_probability(token_id) for token_id in token_ids]
    ranked = [
        [TopLogprob(rank + 1, token_id + rank, value - 0.1 * rank) for rank in range(candidates + 1)]
        for token_id, value in zip(token_ids, own, strict=True)
    ]
    return own, ranked
