"""What a request held is let go when it has been answered, without a garbage collection: its prompt may be long."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from pipeline import Annotated, InvalidArgument
from pipeline.protocols import PreprocessedRequest
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.testing import ScriptedEngine
from serving.deployment import GraphConfig, standard_graph
from serving.http import app
from serving.http.body import Body
from tests.serving.worlds import chat, complete, token

HELD = (Body, ChatCompletionRequest, CompletionRequest, PreprocessedRequest)


@pytest.fixture
def held() -> Iterator[Callable[[], list[Any]]]:
    """Return the requests of this test that are in memory. No garbage is collected meanwhile."""
    gc.collect()
    gc.disable()
    others = _requests()
    known = set(map(id, others))

    yield lambda: [each for each in _requests() if id(each) not in known]
    gc.enable()


def nothing_is(held: Callable[[], list[Any]]) -> bool:
    """Return whether no request is held. A thread releases its work a moment after its result, in real time."""
    for _ in range(200):
        if not held():
            return True
        time.sleep(0.01)
    return False


def _requests() -> list[Any]:
    return [each for each in gc.get_objects() if isinstance(each, HELD)]


ENDINGS: dict[str, tuple[dict[str, Any], int]] = {
    "answered": ({"max_tokens": 2}, 200),
    "streamed": ({"max_tokens": 2, "stream": True}, 200),
    "refused before its graph": ({"n": 0}, 400),
    "refused with a long body": ({"stop": "x" * 1_000_000, "n": "one"}, 400),
    "refused by its graph": ({"stop": "x" * 10_000}, 400),
    "with a prompt that is too long": ({"messages": [{"role": "user", "content": "x" * 20_000}]}, 400),
    "of an unknown model": ({"model": "none"}, 404),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_request_is_let_go_with_its_answer(held: Callable[[], list[Any]], ending: str) -> None:
    fields, status = ENDINGS[ending]
    async with standard_graph(
        GraphConfig(engine="mocker", engine_args={"num_gpu_blocks": "64"}, model_name="m")
    ) as graph:
        service = app({"m": graph})
        assert (await chat(service, **fields).run()).status == status
        await anyio.sleep(1)
        assert nothing_is(held)


async def test_a_batch_is_let_go_with_its_answer(held: Callable[[], list[Any]]) -> None:
    async with standard_graph(GraphConfig(engine="echo", model_name="m")) as graph:
        service = app({"m": graph})
        assert (await complete(service, prompt=["a", "b", "c"], max_tokens=2).run()).status == 200
        assert (await complete(service, prompt=["a", "b", "c"], stop="x" * 10_000).run()).status == 400
        await anyio.sleep(1)
        assert nothing_is(held)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_let_go_when_its_client_leaves(held: Callable[[], list[Any]], stream: bool) -> None:
    async with standard_graph(GraphConfig(engine="echo", engine_args={"delay_s": "1"}, model_name="m")) as graph:
        exchange = chat(app({"m": graph}), stream=stream)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await anyio.sleep(1.5)
            assert held()
            exchange.leave()
        del exchange
        await anyio.sleep(10)
        assert nothing_is(held)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_let_go_when_its_engine_fails(held: Callable[[], list[Any]], stream: bool) -> None:
    engine = ScriptedEngine([token("a"), Annotated(None, error=InvalidArgument("no"))])
    assert (await chat(app({"m": engine}), stream=stream).run()).returned
    await anyio.sleep(1)
    engine.requests.clear()
    assert nothing_is(held)
