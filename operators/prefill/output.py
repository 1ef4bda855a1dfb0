"""PrefillOutput: what a prefill worker's answer comes to, read from its stream.

Source: dynamo lib/llm/src/kv_router/prefill_router/execution.rs, execute_prefill. Other than there an error in a later
item counts too, prefill is complete only with an item that is no error, and events before the answer are passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, frozen

from pipeline import PenstockError, ResponseStream
from pipeline.protocols import LLMEngineOutput, PromptTokensDetails, TraceLink

from ..kv import ends_badly
from ..pool import Output
from .errors import NoDisaggregatedParams, PrefillError


@frozen
class PrefillOutput:
    """What decode gets of a prefill that is complete."""

    params: Any
    """The engine's own parameters; opaque here."""
    details: PromptTokensDetails | None = None
    """Where the prompt's tokens came from."""
    link: TraceLink | None = None
    """The span of the prefill worker."""


async def read_prefill(
    stream: ResponseStream[Output], on_first: Callable[[LLMEngineOutput | None], object]
) -> PrefillOutput:
    """Read the answer to its end, so that the worker finishes in order. The caller closes the stream.

    `on_first` is called with the first item that is no error: from then on blocks may be on their way. Raise
    PrefillError if there is none, and for an error, raised or an item; NoDisaggregatedParams, after the end, if the
    first item has no parameters for decode.
    """
    while (first := await _next(stream)) is not None and first.data is None and first.event is not None:
        pass
    if first is None:
        raise PrefillError("prefill worker gave no output (stream ended)")
    on_first(first.data)
    details = _details(first.data)
    while (item := await _next(stream)) is not None:
        details = details or _details(item.data)
    return evolve(handed_over(first.data), details=details)


def handed_over(first: LLMEngineOutput | None) -> PrefillOutput:
    """Return what the first item has for decode. Raise NoDisaggregatedParams if it has nothing decode could use."""
    if first is None:
        raise NoDisaggregatedParams("prefill worker's output has no data field")
    params = first.disaggregated_params
    if params is None:
        raise NoDisaggregatedParams("prefill worker's output is missing disaggregated_params")
    if isinstance(params, dict) and _is_context_only(params) and params.get("ctx_request_id") is None:
        raise NoDisaggregatedParams("prefill worker's disaggregated_params have no usable ctx_request_id")
    return PrefillOutput(params, link=first.worker_trace_link)


def cached_tokens(data: LLMEngineOutput | None) -> int | None:
    """Return how many tokens of the prompt the worker had cached; None if it does not report that."""
    details = _details(data)
    return None if details is None else details.cached_tokens


async def _next(stream: ResponseStream[Output]) -> Output | None:
    """Return the next item, None at the end. Raise PrefillError for what the read raises and for a bad end."""
    try:
        item = await anext(stream, None)
    except Exception as error:
        raise PrefillError(f"prefill worker's stream broke: {error}", cause=error) from error
    if item is not None and ends_badly(item):
        found = item.extract_error()
        reason = None if item.data is None else item.data.finish_reason
        cause = found if isinstance(found, PenstockError) else None
        raise PrefillError(f"prefill worker reported an error in output: {found or reason}", cause=cause)
    return item


def _details(data: LLMEngineOutput | None) -> PromptTokensDetails | None:
    usage = None if data is None else data.completion_usage
    return None if usage is None else usage.prompt_tokens_details


def _is_context_only(params: dict[str, Any]) -> bool:
    """Whether decode cannot go on without the id the prefill was computed under."""
    return "ctx_request_id" in params or params.get("request_type") == "context_only"
