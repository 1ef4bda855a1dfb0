"""The standard graph as a whole, in one process and in virtual time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from operators import Preprocess, PushRouter
from pipeline import Annotated, AsyncEngine, Context, InvalidArgument, Unavailable
from pipeline.protocols import BackendOutput
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage, CompletionRequest
from pipeline.testing import Probe, ScriptedEngine, watch_streams
from serving.deployment import GraphConfig, HostOptions, hosted_graph, standard_graph


def chat(text: str, **fields: Any) -> Context[ChatCompletionRequest | CompletionRequest]:
    message = ChatMessage(role="user", content=text)
    return Context(ChatCompletionRequest(model="echo", messages=[message], **fields))


async def text_of(graph: AsyncEngine[Any, Any], request: Context[Any]) -> str:
    """The text of the answer."""
    async with await graph.generate(request) as stream:
        items: list[Annotated[BackendOutput]] = [item async for item in stream]
    return "".join(item.data.text or "" for item in items if item.data is not None)


async def test_it_echoes_and_leaves_nothing_open() -> None:
    with watch_streams() as streams:
        async with standard_graph(GraphConfig(workers=2)) as graph:
            assert await text_of(graph, chat("grüße, 世界")) == "grüße, 世界"
    assert streams.open == []


async def test_max_tokens_and_stop_strings_hold() -> None:
    async with standard_graph(GraphConfig()) as graph:
        assert await text_of(graph, chat("abcdef", max_tokens=3)) == "abc"
        assert await text_of(graph, chat("abcdef", stop="cd")) == "ab"


async def test_requests_go_round_the_workers() -> None:
    async with standard_graph(GraphConfig(workers=3)) as graph:
        drawing = graph.draw("text")
        assert drawing.count("dyn://penstock.backend.generate/") == 3
        texts = [await text_of(graph, chat(text)) for text in "abcd"]
    assert texts == list("abcd")


async def test_its_parts_can_be_replaced() -> None:
    probe = Probe()
    async with standard_graph(GraphConfig()) as graph:
        seen = graph.insert_before(PushRouter, probe)
        assert await text_of(seen, chat("hello")) == "hello"
        dead = graph.replace(PushRouter, ScriptedEngine([], fails=Unavailable("gone")))
        with pytest.raises(Unavailable):
            await dead.generate(chat("hello"))
    assert probe.items == 5
    assert probe.open == 0


async def test_a_wrong_request_is_refused_before_any_worker() -> None:
    probe = Probe()
    async with standard_graph(GraphConfig()) as graph:
        with pytest.raises(InvalidArgument, match=r"^Validation: "):
            await graph.insert_after(Preprocess, probe).generate(chat("x", temperature=9))
    assert probe.requests == 0


async def test_concurrent_requests_do_not_mix() -> None:
    texts = [f"request {number} " * 5 for number in range(50)]
    answers: dict[str, str] = {}

    async with standard_graph(GraphConfig(workers=2, engine_args={"delay_s": "0.01"})) as graph:

        async def client(text: str) -> None:
            answers[text] = await text_of(graph, chat(text))

        async with anyio.create_task_group() as tasks:
            for text in texts:
                tasks.start_soon(client, text)
    assert answers == {text: text for text in texts}


async def test_a_kill_ends_a_slow_answer() -> None:
    async with standard_graph(GraphConfig(engine_args={"delay_s": "100"})) as graph:
        request = chat("hello")
        with watch_streams() as streams, anyio.fail_after(1):
            async with await graph.generate(request) as stream:
                request.kill()
                assert [item async for item in stream] == []
        assert streams.open == []


# -- the engines' own metrics


async def test_workers_of_one_engine_share_the_families_of_its_metrics() -> None:
    """A reader refuses a scrape in which a family comes twice."""
    config = GraphConfig(engine="mocker", engine_args={"dp_size": "2"}, workers=3)
    async with hosted_graph(config, HostOptions()) as opened:
        text = opened.native_metrics()
        ids = {f"{worker.worker_id:x}" for worker in opened.workers}
    about = [line for line in text.split("\n") if line.startswith("#")]
    assert len(about) == len(set(about)) > 0
    families = {family.name: family for family in text_string_to_metric_families(text)}
    running = families["vllm:num_requests_running"].samples
    assert {(sample.labels["worker_id"], sample.labels["engine"]) for sample in running} == {
        (worker, rank) for worker in ids for rank in "01"
    }
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
