"""What a process of a deployment answers about itself, over the request plane.

penstock status ──► endpoint `status` of a worker's component, or of all front ends ──► ProcessStatus
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from attrs import evolve, field, frozen

from pipeline import function_engine
from pipeline.network import EndpointId, Runtime
from pipeline.protocols.field_rules import U64

STATUS_ENDPOINT = "status"
"""Name of the endpoint, in a worker's component."""
FRONTENDS_AT = EndpointId("_penstock", "frontend", STATUS_ENDPOINT)
"""The endpoint of all front ends."""


@frozen
class ProcessStatus:
    """A process at one moment."""

    streams: U64
    """Requests that run."""
    models: list[str] = field(factory=list)
    """Of a front end: the models that it serves."""
    url: str = ""
    """Of a front end: its address for clients."""


def status_endpoint(endpoint: EndpointId) -> EndpointId:
    """Return where the workers at an endpoint answer about themselves."""
    return evolve(endpoint, endpoint=STATUS_ENDPOINT)


@asynccontextmanager
async def serving_status(
    runtime: Runtime, endpoint: EndpointId, status: Callable[[], ProcessStatus], instance_id: int | None = None
) -> AsyncIterator[None]:
    """Answer `status` at the endpoint until the block ends. Raise as `Runtime.serve`."""

    async def answer(_: Any) -> AsyncIterator[ProcessStatus]:
        yield status()

    served = await runtime.serve(endpoint, function_engine(answer), instance_id=instance_id)
    try:
        yield
    finally:
        await served.close(0)
