"""What the span of a request shows: attributes by OpenTelemetry's semantic conventions, and ours beside them.

Those of HTTP are stable. Those of generative AI (`gen_ai.*`) are not: the names here are of revision 1.41.1, the last
that has them beside the others. Nothing of a prompt or an answer is among them, stop sequences included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..openai import UsageCount
from .problems import Problem
from .prompts import OpenAIRequest

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"
"""The revision of the semantic conventions that spans are made by."""

PROVIDER = "penstock"
ROUTE = "http.route"
STATUS_CODE = "http.response.status_code"
ERROR_TYPE = "error.type"
PROBLEM = "penstock.problem"
"""Class of what kept a request from a whole answer, as in the metrics; also where the client is to blame."""
PROMPTS = "penstock.prompts"
LIMIT = "penstock.limit"

_TEXT_MAX = 256
"""Characters kept of what a client has written."""

_OPERATIONS = {"chat_completions": "chat", "completions": "text_completion"}
_ASKED = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")

Attributes = dict[str, Any]


def of_connection(scope: Mapping[str, Any], headers: Mapping[str, str], route: str) -> Attributes:
    """What is known before the request has been read. `headers` by names in lower case."""
    said: Attributes = {
        "http.request.method": scope["method"],
        ROUTE: route,
        "url.path": scope["path"][:_TEXT_MAX],
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    for names, address in (
        (("server.address", "server.port"), "server"),
        (("client.address", "client.port"), "client"),
    ):
        if (known := scope.get(address)) is not None:
            said |= {name: value for name, value in zip(names, known, strict=False) if value is not None}
    if (agent := headers.get("user-agent")) is not None:
        said["user_agent.original"] = agent[:_TEXT_MAX]
    return said


def of_request(request: OpenAIRequest, endpoint: str, prompts: int) -> Attributes:
    """What a request asks for; `endpoint` is its API's name in the metrics."""
    said: Attributes = {
        "gen_ai.operation.name": _OPERATIONS[endpoint],
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model[:_TEXT_MAX],
        "gen_ai.request.stream": bool(request.stream),
        PROMPTS: prompts,
    }
    if (choices := getattr(request, "n", None) or 1) != 1:
        said["gen_ai.request.choice.count"] = choices
    for name in _ASKED:
        if isinstance(value := getattr(request, name, None), int | float):
            said[f"gen_ai.request.{name}"] = value
    newer = getattr(request, "max_completion_tokens", None)
    return said if newer is None else said | {"gen_ai.request.max_tokens": newer}


def of_answer(
    answer_id: str, model: str, usage: UsageCount, finish_reasons: list[str], first_chunk_s: float | None
) -> Attributes:
    """What came of it; `first_chunk_s` is the time to the first tokens, None if there were none."""
    said: Attributes = {
        "gen_ai.response.id": answer_id,
        "gen_ai.response.model": model[:_TEXT_MAX],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    if finish_reasons:
        said["gen_ai.response.finish_reasons"] = finish_reasons
    if first_chunk_s is not None:
        said["gen_ai.response.time_to_first_chunk"] = first_chunk_s
    if (cached := usage.cached_tokens) is not None:
        said["gen_ai.usage.cache_read.input_tokens"] = cached
    return said


def of_problem(problem: Problem) -> Attributes:
    """Why there was no whole answer. It is an error of the server's for a status of 500 and more only."""
    said: Attributes = {PROBLEM: problem.kind}
    if problem.status >= 500:
        said[ERROR_TYPE] = problem.kind
    if (exceeded := problem.exceeded) is not None:
        said |= {LIMIT: exceeded.name, f"{LIMIT}.value": exceeded.value, f"{LIMIT}.threshold": exceeded.threshold}
    return said
