"""The KV router sends a request to no worker that it has failed on, not even for its session."""

from __future__ import annotations

from typing import Any

import pytest

from operators import KvPushRouter, Migration, PushRouter
from operators.kv import KvRouterConfig, kv_router
from pipeline import (
    Annotated,
    Context,
    Disconnected,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    WorkerOverloaded,
    link,
)
from pipeline.network import static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.testing import Fail, ScriptedEngine

GONE = Disconnected("gone")


class Graph:
    """A Migration above a KvPushRouter over scripted workers; the pool itself has no cooldowns."""

    def __init__(self, engines: dict[int, ScriptedEngine], limit: int = 3) -> None:
        self.engines = engines
        workers = static_workers(engines)
        self.router = kv_router(workers, KvRouterConfig(use_kv_events=False), block_size_tokens=4, session_ttl_s=60)
        push: PushRouter[Any, Any] = PushRouter(workers, cooldown_s=0)
        self.graph = link(Migration(limit), KvPushRouter(self.router), push)

    async def collect(self, **metadata: str) -> int:
        """Send a request with this metadata and return the number of tokens of its answer."""
        request = Context(PreprocessedRequest(list(range(8))), metadata=metadata)
        items = await (await self.graph.generate(request)).collect()
        return sum(len(item.ok().data.token_ids) for item in items)

    @property
    def attempts(self) -> list[int]:
        """How many requests each worker has got."""
        return [len(engine.requests) for engine in self.engines.values()]


def item(token_id: int) -> Annotated[LLMEngineOutput]:
    return Annotated(LLMEngineOutput([token_id]))


@pytest.mark.parametrize("session", [{}, {"X-Dynamo-Session-ID": "s"}])
@pytest.mark.parametrize("healthy", [1, 2, 3])
async def test_the_kv_router_returns_to_no_worker_a_request_has_failed_on(
    session: dict[str, str], healthy: int
) -> None:
    engines = {i: ScriptedEngine([item(9)] if i == healthy else [item(1), Fail(GONE)]) for i in (1, 2, 3)}
    graph = Graph(engines, limit=2)
    for _ in range(4):
        assert await graph.collect(**session) >= 1
    assert len(engines[healthy].requests) == 4
    assert len(graph.router.loads) == 0


@pytest.mark.parametrize(("error", "kind"), [(GONE, Unavailable), (WorkerOverloaded("busy"), ResourceExhausted)])
async def test_the_kv_router_names_the_workers_if_all_have_failed(
    error: PenstockError, kind: type[PenstockError]
) -> None:
    graph = Graph({i: ScriptedEngine([], fails=error) for i in (1, 2)}, limit=5)
    with pytest.raises(kind, match="failed on 1, 2"):
        await graph.collect()
    assert graph.attempts == [1, 1]
