"""Requests in tokens as an OpenAI-compatible server gets them: the body of a completion, and headers.

Source: the OpenAI API, completions; min_tokens, ignore_eos, stop_token_ids and the sampling options beyond it are those
of vllm/entrypoints/openai/completion/protocol.py, `nvext` is that of dynamo lib/llm/src/protocols/openai/nvext.rs.
"""

from __future__ import annotations

import re
from typing import Any

from pipeline import AnyContext, InvalidArgument
from pipeline.protocols import PreprocessedRequest

from .request_rules import given
from .upstream import header_value

EXTRA_FIELDS = ("worker_id", "timing", "completion_token_ids")
"""Fields of the answer that are requested of a server with `nvext`, beside the text."""

_STOP = ("max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids")
_SAMPLING = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("use_beam_search", "length_penalty", "seed", "include_stop_str_in_output"),
)
_SESSION = "x-dynamo-session-id"
_METADATA = "x-dynamo-meta-"
_NO_NAME = re.compile(r"[^A-Za-z0-9!#$%&'*+.^_`|~-]+")


def completion(request: PreprocessedRequest, model: str, *, nvext: bool) -> dict[str, Any]:
    """Return the body, for the request's adapter or else the model.

    Raise InvalidArgument for a field that a completion in token ids does not have.
    """
    _check(request, nvext=nvext)
    stop, sampling = request.stop_conditions, request.sampling_options
    adapter = None if request.routing is None else request.routing.lora_name
    body: dict[str, Any] = {"model": adapter or model, "prompt": request.token_ids, "stream": True}
    body |= given(stop, _STOP) | given(sampling, _SAMPLING)
    # Without ids, running totals show how many tokens a chunk holds.
    body["stream_options"] = {"include_usage": True} | ({} if nvext else {"continuous_usage_stats": True})
    if nvext:
        body["nvext"] = {"extra_fields": list(EXTRA_FIELDS)} | _extras(request)
    return body


def headers_of(context: AnyContext) -> dict[str, str]:
    """Return the headers of one request: its id, session and metadata."""
    headers = {"x-request-id": header_value(context.id)}
    for name, value in context.metadata.items():
        name = _NO_NAME.sub("-", name.lower())
        headers[name if name == _SESSION else _METADATA + name] = header_value(value)
    return headers


def _check(request: PreprocessedRequest, *, nvext: bool) -> None:
    """Raise InvalidArgument for a field without which the server would answer another request."""
    best_of, salt = (
        request.sampling_options.best_of,
        None if request.routing is None else request.routing.cache_namespace,
    )
    not_sent = {
        "prompt_embeds": request.prompt_embeds,
        "multi_modal_data": request.multi_modal_data,
        "encoder_result": request.encoder_result,
        "prefill_result": request.prefill_result,
        "routing.cache_salt": None if nvext else salt,
        "stop_conditions.max_thinking_tokens": None if nvext else request.stop_conditions.max_thinking_tokens,
        "sampling_options.best_of": best_of not in (None, 1),
        "sampling_options.guided_decoding": request.sampling_options.guided_decoding,
        "sampling_options.n": (request.sampling_options.n or 1) > 1,
        "output_options.logprobs": request.output_options.logprobs,
        "output_options.prompt_logprobs": request.output_options.prompt_logprobs,
    }
    for name, value in not_sent.items():
        if value is not None and value is not False:
            raise InvalidArgument("a server of completions in text does not take it", field=name)


def _extras(request: PreprocessedRequest) -> dict[str, Any]:
    """Return the other fields of `nvext`: annotations, the limit of reasoning, tenant and priority."""
    extras: dict[str, Any] = {"annotations": request.annotations} if request.annotations else {}
    if request.stop_conditions.max_thinking_tokens is not None:
        extras["max_thinking_tokens"] = request.stop_conditions.max_thinking_tokens
    if (routing := request.routing) is not None:
        if routing.cache_namespace:
            extras["cache_salt"] = routing.cache_namespace
        known = {"priority": routing.priority, "strict_priority": routing.strict_priority}
        hints = {name: value for name, value in known.items() if value is not None}
        extras |= {"agent_hints": hints} if hints else {}
    return extras
