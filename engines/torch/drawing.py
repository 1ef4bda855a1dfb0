"""Drawing: logits to tokens, by the sampling options of each choice. In the compute thread.

    logits ──► penalties ──► ids that may not come ──► temperature ──► min_p, top_k, top_p ──► draw
       └──► log probabilities: of the model itself, before any of that

Source: vllm/v1/sample/sampler.py, Sampler.forward, for the order. Other than there the draw is a given number between 0
and 1, looked up in the summed probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.errors import BackendUnknown

from .library import torch
from .sampling import Sampling
from .slots import Choice, Drawn


def draw(logits: Any, choices: Sequence[Choice]) -> list[Drawn]:
    """Return the next token of each choice, from its row of logits, `[choices, vocabulary]`.

    Raise BackendUnknown if the model computed something that is no number.
    """
    best, ids = logits.max(dim=-1)
    if bool(best.isnan().any()):
        raise BackendUnknown("the model computed logits that are no numbers")
    return [
        Drawn(best_id) if _is_plain(choice) else _drawn(logits[row].float(), choice)
        for row, (choice, best_id) in enumerate(zip(choices, ids.tolist(), strict=True))
    ]


def _is_plain(choice: Choice) -> bool:
    """Whether the most likely token is the answer, and nothing else is wanted."""
    sampling = choice.order.sampling
    if not sampling.is_greedy or sampling.has_penalties or sampling.logprobs is not None:
        return False
    return not choice.order.limits.forbidden(choice.generated_tokens)


def _drawn(raw: Any, choice: Choice) -> Drawn:
    sampling = choice.order.sampling
    logits = raw
    if sampling.has_penalties:
        logits = _penalized(logits.clone(), choice)
    if forbidden := choice.order.limits.forbidden(choice.generated_tokens):
        known = [token_id for token_id in forbidden if token_id < logits.shape[-1]]
        logits = logits.index_fill(0, _ids(known, logits), float("-inf"))
    if sampling.is_greedy:
        token_id = int(logits.argmax())
    else:
        token_id = sampled(logits, sampling, sampling.uniform(choice.index, len(choice.tokens)))
    return Drawn(token_id) if sampling.logprobs is None else _with_logprobs(raw, token_id, sampling.logprobs)


def _penalized(logits: Any, choice: Choice) -> Any:
    """Change the logits of tokens that are there already."""
    sampling, tokens = choice.order.sampling, choice.tokens
    if sampling.repetition_penalty != 1.0:
        ids = _ids(sorted(set(tokens)), logits)
        found = logits[ids]
        penalty = sampling.repetition_penalty
        logits[ids] = torch.where(found > 0, found / penalty, found * penalty)
    counts = Counter(tokens[len(choice.order.prompt) :])
    if counts:
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[_ids(list(counts), logits)] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return logits


def sampled(logits: Any, sampling: Sampling, uniform: float) -> int:
    """Return the token that a draw from 0 to below 1 gives."""
    values, ids = logits.double() / sampling.temperature, None
    if sampling.top_k:
        values, ids = torch.topk(values, min(sampling.top_k, values.shape[-1]))
    elif sampling.top_p < 1:
        values, ids = torch.sort(values, descending=True)
    shares = torch.softmax(values, dim=-1)
    if sampling.min_p:
        shares = torch.where(shares >= sampling.min_p * shares.max(), shares, 0.0)
        shares = shares / shares.sum()
    if sampling.top_p < 1:
        before = shares.cumsum(-1) - shares
        before[0] = -1.0  # the most likely one always stays
        shares = torch.where(before < sampling.top_p, shares, 0.0)
    sums = shares.cumsum(-1)
    place = int(torch.searchsorted(sums, sums[-1:] * uniform, right=True))
    place = min(place, int(torch.nonzero(shares)[-1]))  # a draw so near to 1 that it was rounded up
    return place if ids is None else int(ids[place])


def _with_logprobs(raw: Any, token_id: int, count: int) -> Drawn:
    shares = torch.log_softmax(raw, dim=-1)
    own = shares[token_id]
    rank = int((shares > own).sum()) + 1
    if not count:
        return Drawn(token_id, float(own), rank)
    values, ids = torch.topk(shares, min(count, shares.shape[-1]))
    return Drawn(token_id, float(own), rank, tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _ids(ids: list[int], logits: Any) -> Any:
    return torch.tensor(ids, dtype=torch.long, device=logits.device)
