"""What the tests of a traced server have recorded, and the server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.http import HttpOptions, app
from tests.serving.tracing.worlds import Recorded, Served, Serving


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """What the tracer of the test has recorded. Nothing of it was ended twice, or written to after its end."""
    complaints: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("opentelemetry")
    log.addHandler(handler)
    try:
        yield Recorded()
    finally:
        log.removeHandler(handler)
    assert not complaints


@pytest.fixture
def serving(recorded: Recorded) -> Serving:
    """A traced app over the standard graph: `async with serving(engine="mocker", ...) as it`."""

    @asynccontextmanager
    async def serve(options: HttpOptions | None = None, **fields: Any) -> AsyncIterator[Served]:
        config = GraphConfig(model_name="m", **{"seed": 1, **fields})
        async with hosted_graph(config, HostOptions(tracer=recorded.tracer)) as opened:
            yield Served(app({"m": opened.graph}, tracer=recorded.tracer, options=options), opened)

    return serve
