"""DirectRouter: the request names its worker, because somebody outside has chosen it.

Sending a request to one worker through the stage below, whatever stands between it and the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import evolve

from pipeline import Annotated, AsyncEngine, Context, InvalidArgument, Operator, ResponseStream
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, RoutingHints
from pipeline.telemetry import OpenSpan, TracedEngine

from .push_router import PushRouter

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


class DirectRouter(Operator[PreprocessedRequest, Output, PreprocessedRequest, Output]):
    """Sends each request to the worker its routing hints name; counts, books and changes nothing.

        request ──► to routing.decode_worker_id, else routing.backend_instance_id ──►
        stream  ◄── unchanged ◄──

    Stands above PushRouter. With another stage between them PushRouter must be in mode `direct`, and the request then
    also names the worker in `routing.backend_instance_id`. Raises InvalidArgument for a request that names none, and
    what `PushRouter.direct` raises. The stream is the next stage's own.

    Source: dynamo lib/llm/src/kv_router/push_router.rs, DirectRoutingRouter.
    """

    adds_time = False

    async def generate(
        self, request: Context[PreprocessedRequest], next: AsyncEngine[PreprocessedRequest, Output]
    ) -> ResponseStream[Output]:
        return await send_to(request, named_worker(request.payload.routing), next)


def named_worker(hints: RoutingHints | None) -> int:
    """The worker the hints name. Raises InvalidArgument if they name none."""
    worker_id = None
    if hints is not None:
        worker_id = hints.backend_instance_id if hints.decode_worker_id is None else hints.decode_worker_id
    if worker_id is None:
        raise InvalidArgument(
            "Worker ID required (--direct-route): whoever routes from outside sets decode_worker_id or "
            "backend_instance_id, and this request has neither",
            field="routing.backend_instance_id",
        )
    return worker_id
