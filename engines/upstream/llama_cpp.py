"""llama.cpp's server: its `/completion` takes and gives token ids; the body of a request, and its answer.

Source: llama.cpp tools/server/README.md, POST /completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import InvalidArgument
from pipeline.protocols import (
    FinishReason,
    GuidedDecodingOptions,
    LLMEngineOutput,
    PreprocessedRequest,
    PromptTokensDetails,
    TopLogprob,
)

from .request_rules import check
from .streamed_answer import StreamedAnswer, checked_ids

COMPLETION = "/completion"

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
}
_GUIDED = {"json": "json_schema", "grammar": "grammar"}
_REASONS = {"limit": FinishReason.LENGTH, "eos": FinishReason.STOP, "word": FinishReason.STOP}


def completion_body(request: PreprocessedRequest) -> dict[str, Any]:
    """Return the body. Raise InvalidArgument for what llama.cpp has no option for."""
    _check(request)
    stop, sampling = request.stop_conditions, request.sampling_options
    body: dict[str, Any] = {"prompt": request.token_ids, "stream": True, "return_tokens": True, "cache_prompt": True}
    body["n_predict"] = -1 if stop.max_tokens is None else stop.max_tokens
    body |= {there: value for here, there in _NAMES.items() if (value := getattr(sampling, here)) is not None}
    if stop.ignore_eos:
        body["ignore_eos"] = True
    elif stop.stop:
        body["stop"] = stop.stop
    if (guided := sampling.guided_decoding) is not None:
        body |= _guided(guided)
    if (candidates := request.output_options.logprobs) is not None:
        body["n_probs"] = max(candidates, 1)
    return body


def _guided(guided: GuidedDecodingOptions) -> dict[str, Any]:
    for kind in guided.kinds():
        if kind not in _GUIDED:
            raise InvalidArgument(_ABSENT, field=f"sampling_options.guided_decoding.{kind}")
    return {there: value for here, there in _GUIDED.items() if (value := getattr(guided, here)) is not None}


_ABSENT = "llama.cpp has no option for it"


def _check(request: PreprocessedRequest) -> None:
    stop, sampling, routing = request.stop_conditions, request.sampling_options, request.routing
    absent = {
        "prefill_result": request.prefill_result,
        "stop_conditions.max_thinking_tokens": stop.max_thinking_tokens,
        "stop_conditions.min_tokens": bool(stop.min_tokens) and not stop.ignore_eos,
        "stop_conditions.stop_token_ids": stop.stop_token_ids,
        "sampling_options.n": (sampling.n or 1) > 1,
        "routing.lora_name": None if routing is None else routing.lora_name,
        "routing.cache_salt": None if routing is None else routing.cache_namespace,
    }
    check(request, _ABSENT, absent)
    if stop.ignore_eos and stop.max_tokens is None:
        raise InvalidArgument(
            "without an end of its own the answer needs max_tokens", field="stop_conditions.max_tokens"
        )


class LlamaAnswer(StreamedAnswer):
    """Makes the chunks of one answer of `/completion` while its bytes arrive; the one with `stop` is the last."""

    end_mark = "its last chunk"

    def __init__(self, prompt_tokens: int, *, wants_logprobs: bool = False) -> None:
        super().__init__(prompt_tokens)
        self._wants_logprobs = wants_logprobs

    def _read(self, data: str | bytes, outputs: list[LLMEngineOutput]) -> None:
        if self.is_done:
            return
        chunk = self._object(data)
        try:
            output, last = self._chunks(chunk)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._invalid(data, error) from error
        if output.token_ids or output.text:
            outputs.append(output)
        if last is not None:
            self.is_done = True
            outputs.append(last)

    def _chunks(self, chunk: Mapping[str, Any]) -> tuple[LLMEngineOutput, LLMEngineOutput | None]:
        """Return the tokens of a chunk, and the terminal chunk if it is the last one."""
        ids = checked_ids(chunk.get("tokens") or [])
        if chunk.get("content") and not ids and not chunk.get("stop"):
            raise ValueError("a text without the ids of its tokens")
        self.tokens += len(ids)
        output = LLMEngineOutput(ids)
        if self._wants_logprobs and ids:
            _add_logprobs(output, chunk["completion_probabilities"])
        if not chunk.get("stop"):
            return output, None
        last = LLMEngineOutput([], finish_reason=_REASONS.get(chunk.get("stop_type", ""), FinishReason.STOP))
        last.stop_reason = chunk.get("stopping_word") or None
        if type(cached := (chunk.get("timings") or {}).get("cache_n")) is int:
            self._details = PromptTokensDetails(cached_tokens=cached)
        return output, last.with_usage(self.usage)


def _add_logprobs(output: LLMEngineOutput, entries: list[Mapping[str, Any]]) -> None:
    if len(entries) != len(output.token_ids):
        raise ValueError(f"{len(output.token_ids)} tokens came with {len(entries)} log probabilities")
    output.log_probs = [float(entry["logprob"]) for entry in entries]
    output.top_logprobs = [
        [TopLogprob(place, one["id"], float(one["logprob"])) for place, one in enumerate(entry["top_logprobs"], 1)]
        for entry in entries
    ]
