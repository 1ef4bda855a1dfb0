"""Workers a request has failed on, in the KV router: it is not sent there again, nor by its session."""

from __future__ import annotations

from typing import Any

import pytest

from operators import KvPushRouter, Migration, PushRouter
from operators.kv import kv_router
from operators.kv.config import KvRouterConfig
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

pytestmark = pytest.mark.anyio

GONE = Disconnected("gone")


class Graph:
    """A Migration above a KvPushRouter over scripted workers; the pool itself leaves nobody out."""

    def __init__(self, engines: dict[int, ScriptedEngine], limit: int = 3) -> None:
        self.engines = engines
        workers: Any = static_workers(engines)
        self.router = kv_router(workers, KvRouterConfig(use_kv_events=False), block_size_tokens=4, session_ttl_s=60)
        push: PushRouter[Any, Any] = PushRouter(workers, cooldown_s=0)
        self.graph = link(Migration(limit), KvPushRouter(self.router), push)

    async def ask(self, **metadata: str) -> int:
        """How many tokens came."""
        request = Context(PreprocessedRequest(list(range(8))), metadata=metadata)
        items = await (await self.graph.generate(request)).collect()
        return sum(len(item.ok().data.token_ids) for item in items)

    @property
    def asked(self) -> list[int]:
        return [len(engine.requests) for engine in self.engines.values()]


def item(token_id: int) -> Annotated[LLMEngineOutput]:
    return Annotated(LLMEngineOutput([token_id]))


@pytest.mark.parametrize("session", [{}, {"X-Dynamo-Session-ID": "s"}])
@pytest.mark.parametrize("healthy", [1, 2, 3])
async def test_the_kv_router_comes_back_to_nobody_a_request_has_failed_on(session: Any, healthy: int) -> None:
    engines = {i: ScriptedEngine([item(9)] if i == healthy else [item(1), Fail(GONE)]) for i in (1, 2, 3)}
    graph = Graph(engines, limit=2)
    for _ in range(4):
        assert await graph.ask(**session) >= 1
    assert len(engines[healthy].requests) == 4
    assert len(graph.router.loads) == 0


@pytest.mark.parametrize(("error", "kind"), [(GONE, Unavailable), (WorkerOverloaded("busy"), ResourceExhausted)])
async def test_where_all_have_failed_the_kv_router_says_so(error: PenstockError, kind: type[PenstockError]) -> None:
    graph = Graph({i: ScriptedEngine([], fails=error) for i in (1, 2)}, limit=5)
    with pytest.raises(kind, match="failed on 1, 2"):
        await graph.ask()
    assert graph.asked == [1, 1]
