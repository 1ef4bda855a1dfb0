"""Prefilled: what a prefill worker's answer comes to, read from its stream.

Source: dynamo lib/llm/src/kv_router/prefill_router/execution.rs, execute_prefill. Other than there an error in a later
item counts too, prefill is complete only with an item that is no error, and events before the answer are passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, frozen

from pipeline import PenstockError, ResponseStream
from pipeline.protocols import LLMEngineOutput, PrefillResult, PromptTokensDetails, TraceLink

from ..kv.router_account import ends_badly
from ..kv.router_dispatch import Output
from .bootstrap import is_up_to
from .errors import NoDisaggregatedParams, PrefillError
from .resolve import PrefillWorker

_U64_MAX, _U32_MAX = 2**64 - 1, 2**32 - 1


@frozen
class Prefilled:
    """What decode gets: the engine's parameters, where prompt tokens came from, the worker's span, the worker."""

    params: Any
    details: PromptTokensDetails | None = None
    link: TraceLink | None = None
    worker: PrefillWorker | None = None

    @property
    def result(self) -> PrefillResult:
        return PrefillResult(self.params, self.details)


async def read_prefill(
    stream: ResponseStream[Output], is_first: Callable[[LLMEngineOutput | None], object]
) -> Prefilled:
    """All of the answer, to its end, so that the worker finishes in order. The caller closes the stream.

    `is_first` hears of the first item that is no error: from then on blocks may be on their way. Raises PrefillError
    where there is none, and for an error, raised or an item; NoDisaggregatedParams, after the end, where the first item
    hands nothing over.
    """
    first = await _first(stream)
    is_first(first.data)
    details = _details(first.data)
    while (item := await _next(stream)) is not None:
        _check(item)
        details = details or _details(item.data)
    return evolve(handed_over(first.data), details=details)


def handed_over(first: LLMEngineOutput | None) -> Prefilled:
    """What the first item hands over. Raises NoDisaggregatedParams if nothing that decode could use."""
    if first is None:
        raise NoDisaggregatedParams("prefill worker's output has no data field")
    params = first.disaggregated_params
    if params is None:
        raise NoDisaggregatedParams("prefill worker's output is missing disaggregated_params")
    if isinstance(params, dict) and _is_context_only(params) and params.get("ctx_request_id") is None:
        raise NoDisaggregatedParams("prefill worker's disaggregated_params have no usable ctx_request_id")
    return Prefilled(params, link=first.worker_trace_link, worker=worker_of(params))


def worker_of(params: Any) -> PrefillWorker | None:
    """The worker the parameters name; None if they do not, or not properly."""
    named = params.get("worker_id") if isinstance(params, dict) else None
    if not isinstance(named, dict) or not is_up_to(named.get("prefill_worker_id"), _U64_MAX):
        return None
    rank = named.get("prefill_dp_rank")
    return PrefillWorker(named["prefill_worker_id"], rank if is_up_to(rank, _U32_MAX) else None)


async def _first(stream: ResponseStream[Output]) -> Output:
    while (item := await _next(stream)) is not None:
        _check(item)
        if item.data is not None or item.event is None:
            return item
    raise PrefillError("prefill worker gave no output (stream ended)")


async def _next(stream: ResponseStream[Output]) -> Output | None:
    """The next item; None at the end. What the read raises becomes a PrefillError."""
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None
    except Exception as error:
        raise PrefillError(f"prefill worker's stream broke: {error}", cause=error) from error


def _check(item: Output) -> None:
    """Raises PrefillError for an item that says the prefill failed or was given up."""
    if not ends_badly(item):
        return
    error = item.extract_error()
    reason = None if item.data is None else item.data.finish_reason
    text = f"prefill worker reported an error in output: {error or reason}"
    raise PrefillError(text, cause=error) if isinstance(error, PenstockError) else PrefillError(text)


def cached_of(data: LLMEngineOutput | None) -> int | None:
    """How many tokens of the prompt the worker had cached, where it says so."""
    details = _details(data)
    return None if details is None else details.cached_tokens


def _details(data: LLMEngineOutput | None) -> PromptTokensDetails | None:
    usage = None if data is None else data.completion_usage
    return None if usage is None else usage.prompt_tokens_details


def _is_context_only(params: dict[str, Any]) -> bool:
    """Whether decode cannot go on without the id the prefill was computed under."""
    return "ctx_request_id" in params or params.get("request_type") == "context_only"
