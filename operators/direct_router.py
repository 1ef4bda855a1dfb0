"""DirectRouter: the request names its worker, because somebody outside has chosen it."""

from __future__ import annotations

from pipeline import AsyncEngine, Context, InvalidArgument, Operator, ResponseStream
from pipeline.protocols import PreprocessedRequest, RoutingHints

from .kv.router_dispatch import Output, send_to


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
