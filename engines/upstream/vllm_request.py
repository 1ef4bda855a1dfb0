"""Requests in tokens as vLLM gets them: bodies for its two routes, and headers.

Source: vllm/sampling_params.py, SamplingParams; dynamo components/src/dynamo/vllm/handlers.py, build_sampling_params,
and engine_generate.py, the prefix of cache salts. Other than there, an option that vLLM does not have is refused.
"""

from __future__ import annotations

from typing import Any

from pipeline import InvalidArgument
from pipeline.protocols import GuidedDecodingOptions, PreprocessedRequest

from ..llm import GenerateContext
from .facts import ServerFacts
from .request_rules import check, given, stop_ids

CACHE_SALT_PREFIX = "dynamo-cache-salt:"
"""Marks a salt among other texts in the keys of a KV event."""

_SALT_CHARACTERS = 128
_NOT_IN_SALT = "@/\\\0"

_STOP = ("max_tokens", "min_tokens", "ignore_eos")
_SAMPLING = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "include_stop_str_in_output"),
)
_ABSENT = "a vLLM server does not have it beside a stream of tokens"
_GUIDED = ("json", "regex", "choice", "grammar", "whitespace_pattern", "structural_tag")


def generate_body(
    request: PreprocessedRequest, facts: ServerFacts, request_id: str, *, has_tokenizer: bool, prioritizes: bool
) -> dict[str, Any]:
    """Return the body of `/inference/v1/generate`.

    Without a tokenizer at the server, stop strings are left to the stages here. Raise InvalidArgument for a request
    that it cannot answer.
    """
    sampling = _sampled(request)
    stop = request.stop_conditions.stop if has_tokenizer else None
    sampling |= {"stop": stop} if stop else {"detokenize": False}
    if (candidates := request.output_options.logprobs) is not None:
        sampling["logprobs"] = candidates
    return {"token_ids": request.token_ids, "sampling_params": sampling} | _around(
        request, facts, request_id, prioritizes=prioritizes
    )


def completion_body(
    request: PreprocessedRequest, facts: ServerFacts, request_id: str, *, prioritizes: bool
) -> dict[str, Any]:
    """Return the body of `/v1/completions`, for tokens in and out. Raise InvalidArgument as `generate_body`."""
    body: dict[str, Any] = {"prompt": request.token_ids, "return_token_ids": True} | _sampled(request)
    if stop := request.stop_conditions.stop:
        body["stop"] = stop
    if (candidates := request.output_options.logprobs) is not None:
        body |= {"logprobs": candidates, "return_tokens_as_token_ids": True}
    return body | _around(request, facts, request_id, prioritizes=prioritizes)


def headers_of(request: PreprocessedRequest, context: GenerateContext, request_id: str) -> dict[str, str]:
    """Return the headers: the id, the data-parallel rank and the session."""
    headers = {"x-request-id": request_id}
    if (routing := request.routing) is not None and routing.dp_rank is not None:
        headers["x-data-parallel-rank"] = str(routing.dp_rank)
    if (session := session_of(request, context)) is not None:
        headers["x-session-id"] = session
    return headers


def session_of(request: PreprocessedRequest, context: GenerateContext) -> str | None:
    """Return the id of the session that the request belongs to."""
    if request.agent_context is not None:
        return request.agent_context.session_id
    return context.metadata.get(SESSION)


SESSION = "x-dynamo-session-id"
"""Key of the session in the metadata of a request."""


def _around(request: PreprocessedRequest, facts: ServerFacts, request_id: str, *, prioritizes: bool) -> dict[str, Any]:
    """Return the fields that both routes have."""
    routing = request.routing
    adapter = None if routing is None else routing.lora_name
    body: dict[str, Any] = {
        "request_id": request_id,
        "model": adapter or facts.model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if routing is not None and routing.cache_namespace:
        body["cache_salt"] = _salt(routing.cache_namespace)
    if routing is not None and routing.priority and prioritizes:
        body["priority"] = -routing.priority  # at the server the lower one is first
    if (params := transfer_params(request)) is not None:
        body["kv_transfer_params"] = params
    return body


def transfer_params(request: PreprocessedRequest) -> dict[str, Any] | None:
    """Return the parameters of the KV transfer: of the prefill's result, with what a router has added."""
    params: dict[str, Any] = {}
    if isinstance(request.extra_args, dict) and isinstance(hint := request.extra_args.get("kv_transfer_params"), dict):
        params |= hint
    if request.prefill_result is not None:
        found = request.prefill_result.disaggregated_params
        if not isinstance(found, dict) or not isinstance(given := found.get("kv_transfer_params"), dict | None):
            raise InvalidArgument("expected an object with kv_transfer_params", field="prefill_result")
        params |= given or {}
    return params or None


def _sampled(request: PreprocessedRequest) -> dict[str, Any]:
    """Return the sampling parameters that both routes have. Raise InvalidArgument for what vLLM does not have."""
    stop, sampling = request.stop_conditions, request.sampling_options
    guided = sampling.guided_decoding
    backend = None if guided is None else guided.backend
    check(request, _ABSENT, {"sampling_options.guided_decoding.backend": backend})
    params = given(stop, _STOP) | given(sampling, _SAMPLING)
    if ids := stop_ids(stop):
        params["stop_token_ids"] = ids
    if stop.max_thinking_tokens is not None:
        params["thinking_token_budget"] = stop.max_thinking_tokens
    if guided is not None:
        params["structured_outputs"] = _guided(guided)
    return params


def _guided(guided: GuidedDecodingOptions) -> dict[str, Any]:
    return {name: value for name in _GUIDED if (value := getattr(guided, name)) not in (None, [])}


def _salt(namespace: str) -> str:
    salt = CACHE_SALT_PREFIX + namespace
    if len(salt) > _SALT_CHARACTERS or any(character in salt for character in _NOT_IN_SALT):
        most = _SALT_CHARACTERS - len(CACHE_SALT_PREFIX)
        raise InvalidArgument(
            f"vLLM takes at most {most} characters, and none of @ / \\ NUL", field="routing.cache_salt"
        )
    return salt
