"""LoraAdapter: the requests of one graph go to a LoRA adapter of its model, where that is loaded."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from pipeline import AsyncEngine, Context, Operator, ResponseStream, Unavailable
from pipeline.protocols import PreprocessedRequest, RoutingHints

from .records import shallow_copy

U = TypeVar("U")


class LoraAdapter(Operator[PreprocessedRequest, Any, PreprocessedRequest, Any]):
    """Names an adapter in each request, and the workers that have it.

        request ──► with `routing.lora_name`, and these workers in `routing.allowed_worker_ids`
        stream  ◄── unchanged

    Stands below Migration, so that each attempt goes by the workers of that moment, and above PrefillRouter and the
    routers. `workers` returns the ids of those that have the adapter now, of prefill and of decode. A request that
    allows some workers only goes to none other. Raises Unavailable if no worker has the adapter.
    """

    declares = (PreprocessedRequest, U, PreprocessedRequest, U)
    shown_texts = ("name",)
    adds_time = False

    def __init__(self, name: str, workers: Callable[[], AbstractSet[int]]) -> None:
        self.adapter = name
        self._workers = workers

    async def generate(
        self, request: Context[PreprocessedRequest], next: AsyncEngine[PreprocessedRequest, Any]
    ) -> ResponseStream[Any]:
        own = request.payload.routing
        workers = set(self._workers())
        if own is not None and own.allowed_worker_ids is not None:
            workers &= own.allowed_worker_ids
        if not workers:
            raise Unavailable(f"no worker has the adapter {self.adapter!r} now")
        hints = RoutingHints() if own is None else shallow_copy(own)
        hints.lora_name, hints.allowed_worker_ids = self.adapter, workers
        payload = shallow_copy(request.payload)
        payload.routing = hints
        return await next.generate(request.with_payload(payload))
