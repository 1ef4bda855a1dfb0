"""Sending a request to one worker through the stage below, whatever stands between it and the pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import evolve

from pipeline import Annotated, AsyncEngine, Context, ResponseStream
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, RoutingHints
from pipeline.tracing import OpenSpan, TracedEngine

from ..push_router import PushRouter

Output = Annotated[LLMEngineOutput]
Next = AsyncEngine[PreprocessedRequest, Output]


async def send_to(request: Context[PreprocessedRequest], worker_id: int, next: Next) -> ResponseStream[Output]:
    """The answer of that worker; raises what `PushRouter.direct` raises.

    A PushRouter right below is asked for it directly, in whatever mode. Any other stage gets a copy of the request that
    names the worker in `routing.backend_instance_id`, which a PushRouter in mode `direct` further below goes by.
    """
    if isinstance(next, PushRouter):
        return await next.direct(request, worker_id)
    if isinstance(next, TracedEngine) and isinstance(push := next.stage, PushRouter):
        return await next.asked(request, lambda below: push.direct(below, worker_id))
    hints = request.payload.routing or RoutingHints()
    if hints.backend_instance_id == worker_id:
        return await next.generate(request)
    named = evolve(request.payload, routing=evolve(hints, backend_instance_id=worker_id))
    return await next.generate(request.with_payload(named))


@contextmanager
def span_below(
    request: Context[Any], name: str, tracer: Any, attributes: Mapping[str, Any] | None = None
) -> Iterator[Context[Any]]:
    """A span around the block, if the request is traced; gives the request as it is below it."""
    if request.trace is None:
        yield request
        return
    span = OpenSpan(request, name, tracer=tracer, attributes=attributes)
    try:
        yield span.context
    except BaseException as error:
        span.fails(error)
        raise
    finally:
        span.end()
