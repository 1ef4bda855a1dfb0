"""The worker that a stage above the pool's router has chosen for a request.

    KvPushRouter, PushPrefill, DirectRouter ──assign_worker──► Mark ──► PushRouter takes it, sends there

The mark is of this dispatch only. A client's own wish, `routing.backend_instance_id`, is part of the request instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pipeline import Annotated, AsyncEngine, Context, InvalidArgument, Operator, ResponseStream
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, RoutingHints

from ..marks import Mark

Output = Annotated[LLMEngineOutput]
Next = AsyncEngine[PreprocessedRequest, Output]


class Assigned(NamedTuple):
    """A worker that was assigned, and whether the stage that assigned it accounts for the request."""

    worker_id: int
    is_accounted: bool


ASSIGNED: Mark[Assigned] = Mark("operators.pool.assigned")
"""What `PushRouter` takes: `assign_worker` puts it."""


def assign_worker(request: Context[Any], worker_id: int, *, is_accounted: bool = False) -> None:
    """Have the PushRouter below send this request to that worker, once, whatever its mode; see `Mark`.

    With `is_accounted` the caller counts the request as load and records the worker and the choice in the request's
    tracker, and PushRouter does neither.
    """
    ASSIGNED.put(request, Assigned(worker_id, is_accounted))


class DirectRouter(Operator[PreprocessedRequest, Output, PreprocessedRequest, Output]):
    """Sends each request to the worker its routing hints name; counts, books and changes nothing.

        request ──► to routing.decode_worker_id, else routing.backend_instance_id ──►
        stream  ◄── unchanged ◄──

    Stands above PushRouter. Raises InvalidArgument for a request that names no worker, and what `PushRouter` raises for
    a worker that cannot be reached. The stream is the next stage's own. No standard graph has it: it is for graphs
    behind a router of one's own.

    Source: dynamo lib/llm/src/kv_router/push_router.rs, DirectRoutingRouter.
    """

    adds_time = False

    async def generate(
        self, request: Context[PreprocessedRequest], next: AsyncEngine[PreprocessedRequest, Output]
    ) -> ResponseStream[Output]:
        assign_worker(request, named_worker(request.payload.routing))
        return await next.generate(request)


def named_worker(hints: RoutingHints | None) -> int:
    """Return the worker the hints name. Raise InvalidArgument if they name none."""
    worker_id = None
    if hints is not None:
        worker_id = hints.backend_instance_id if hints.decode_worker_id is None else hints.decode_worker_id
    if worker_id is None:
        raise InvalidArgument(
            "Worker ID required (--direct-route): the router in front sets decode_worker_id or backend_instance_id, "
            "and this request has neither",
            field="routing.backend_instance_id",
        )
    return worker_id
