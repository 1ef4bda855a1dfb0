"""Log probabilities in the chunks of vLLM's two routes: by token ids, and as texts that name token ids.

Source: vllm/entrypoints/scale_out/token_in_token_out/protocol.py, GenerateLogProbs, and
vllm/entrypoints/openai/completion/protocol.py, CompletionLogProbs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import InvalidMessage
from pipeline.protocols import LLMEngineOutput, TopLogprob

_TOKEN_ID = "token_id:"


def of_generate(choice: Mapping[str, Any], token_ids: list[int]) -> LLMEngineOutput:
    """Return the chunk of a choice of `/inference/v1/generate`. Raise KeyError or TypeError for one of another form."""
    content: Sequence[Mapping[str, Any]] = choice["logprobs"]["content"]
    _check(len(content), token_ids)
    top = [
        _ranked((one["token_id"], one["logprob"], one.get("rank")) for one in entry["top_logprobs"])
        for entry in content
    ]
    return _chunk(token_ids, [float(entry["logprob"]) for entry in content], top)


def of_completion(choice: Mapping[str, Any], token_ids: list[int]) -> LLMEngineOutput:
    """Return the chunk of a choice of `/v1/completions` whose tokens are named by id. Raise as `of_generate`."""
    logprobs = choice["logprobs"]
    values: Sequence[float] = logprobs["token_logprobs"]
    _check(len(values), token_ids)
    candidates = logprobs.get("top_logprobs") or [{} for _ in values]
    top = [_ranked((_id(name), value, None) for name, value in (entry or {}).items()) for entry in candidates]
    return _chunk(token_ids, [float(value) for value in values], top)


def _chunk(token_ids: list[int], values: list[float], top: list[list[TopLogprob]]) -> LLMEngineOutput:
    return LLMEngineOutput(token_ids, log_probs=values, top_logprobs=top if any(top) else None)


def _check(found: int, token_ids: list[int]) -> None:
    if found != len(token_ids):
        raise InvalidMessage(f"{len(token_ids)} tokens came with {found} log probabilities")


def _ranked(candidates: Any) -> list[TopLogprob]:
    """Return the candidates, the most likely first; one without a rank gets its place."""
    ordered = sorted(candidates, key=lambda one: -one[1])
    return [
        TopLogprob(place if rank is None else rank, id_, float(value))
        for place, (id_, value, rank) in enumerate(ordered, 1)
    ]


def _id(name: str) -> int:
    if not name.startswith(_TOKEN_ID):
        raise ValueError(f"expected {_TOKEN_ID} and a number, got {name!r}")
    return int(name.removeprefix(_TOKEN_ID))
