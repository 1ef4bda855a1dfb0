"""Where a request went and why is in its answer, for any client that looks, unless the server keeps it to itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anyio import sleep
from attrs import evolve

from operators.kv import KvRouterConfig
from pipeline import Annotated, Disconnected
from pipeline.testing import ScriptedEngine
from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.http import HttpOptions, Telemetry, app
from tests.serving.worlds import chat, complete, last

WORKER, PREFILL, ROUTER = "x-penstock-worker", "x-penstock-prefill-worker", "x-penstock-router"
ALL = (WORKER, PREFILL, ROUTER, "x-penstock-prefill-router", "x-penstock-attempts")
EXTRA_FIELDS = {"extra_fields": ["worker_id", "router_decision"]}
CONFIG = GraphConfig(engine="mocker", model_name="m", workers=2, seed=1)
KV = evolve(CONFIG, router="kv", kv_router=KvRouterConfig(use_kv_events=False))


@asynccontextmanager
async def serving(config: GraphConfig, **options: Any) -> AsyncIterator[Any]:
    async with hosted_graph(config, HostOptions()) as opened:
        yield app(opened.graph, options=HttpOptions(**options)), opened


def choice(header: str) -> dict[str, str]:
    return dict(part.split("=") for part in header.split("; "))


def nvext_of(exchange: Any, stream: bool) -> Any:
    return exchange.chunks[0]["nvext"] if stream else exchange.json["nvext"]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_kv_routers_choice_is_in_headers_and_nvext(stream: bool) -> None:
    async with serving(KV) as (service, opened):
        text: dict[str, Any] = {"messages": [{"role": "user", "content": "hello " * 100}], "max_tokens": 3}
        await chat(service, **text).run()
        exchange = await chat(service, stream=stream, nvext=EXTRA_FIELDS, **text).run()
        headers, nvext = exchange.response_headers, nvext_of(exchange, stream)
        assert headers[WORKER] in [f"{worker.worker_id:x}" for worker in opened.workers]
    assert int(headers[WORKER], 16) == nvext["worker_id"]["decode_worker_id"]
    assert headers["x-penstock-attempts"] == "1"
    assert PREFILL not in headers
    in_header, in_body = choice(headers[ROUTER]), nvext["router_decision"]["worker"]
    assert (in_header["rule"], in_header["candidates"]) == ("cost", "2")
    assert float(in_header["overlap_blocks"]) == in_body["overlap_blocks"] > 0, (
        "the first request left its prompt there"
    )
    assert int(in_header["prompt_blocks"]) == in_body["prompt_blocks"] >= in_body["overlap_blocks"]
    assert nvext["router_decision"]["attempts"] == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
async def test_a_router_without_cost_names_its_mode(stream: bool, router: Any) -> None:
    async with serving(evolve(CONFIG, router=router)) as (service, _):
        exchange = await chat(service, stream=stream, nvext=EXTRA_FIELDS, max_tokens=2).run()
    assert choice(exchange.response_headers[ROUTER]) == {"rule": router.replace("-", "_")}
    assert nvext_of(exchange, stream)["router_decision"]["worker"] == {"rule": router.replace("-", "_")}


async def test_the_prefill_worker_has_headers_of_its_own() -> None:
    async with serving(evolve(KV, prefill_workers=1)) as (service, opened):
        exchange = await chat(service, stream=True, nvext=EXTRA_FIELDS, max_tokens=4).run()
        headers = exchange.response_headers
        assert headers[PREFILL] == f"{opened.prefill_workers[0].worker_id:x}"
        assert headers[WORKER] in [f"{worker.worker_id:x}" for worker in opened.workers]
    assert choice(headers["x-penstock-prefill-router"])["candidates"] == "1"
    assert choice(headers[ROUTER])["candidates"] == "2"
    assert exchange.chunks[-1]["nvext"]["router_decision"].keys() == {"worker", "prefill", "attempts"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_was_sent_again_has_its_attempts(stream: bool) -> None:
    async with serving(CONFIG) as (service, opened):
        first, second = opened.workers

        def failing(self: Any, *_: Any) -> Any:
            raise Disconnected("gone")

        first.engine.generate = failing
        exchanges = [await chat(service, stream=stream, max_tokens=2).run() for _ in range(2)]
    assert [exchange.response_headers[WORKER] for exchange in exchanges] == [f"{second.worker_id:x}"] * 2
    assert sorted(exchange.response_headers["x-penstock-attempts"] for exchange in exchanges) == ["1", "2"]


async def test_a_list_of_prompts_names_every_worker_once() -> None:
    async with serving(CONFIG) as (service, opened):
        exchange = await complete(service, prompt=["a", "b", "c"], max_tokens=2).run()
        shown = exchange.response_headers[WORKER].split(",")
        assert sorted(shown) == sorted(f"{worker.worker_id:x}" for worker in opened.workers)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_hides_its_workers_shows_none_of_it(stream: bool) -> None:
    async with serving(KV, shows_workers=False) as (service, opened):
        nvext = {"extra_fields": ["worker_id", "router_decision", "timing"], "annotations": ["router_decision"]}
        exchange = await chat(service, stream=stream, nvext=nvext, max_tokens=2).run()
        asking = await chat(service, stream=stream, nvext={"annotations": ["query_instance_id:"]}).run()
        shown = exchange.content + asking.content + str(exchange.response_headers).encode()
        for worker in opened.workers:
            assert f"{worker.worker_id}".encode() not in shown
            assert f"{worker.worker_id:x}".encode() not in shown
    assert exchange.status == 200
    assert b"timing" in exchange.content, "the other requested fields are there"
    assert not set(ALL) & exchange.response_headers.keys()
    assert asking.status == 403


async def test_the_environment_can_hide_the_workers() -> None:
    assert HttpOptions.from_environment({}).shows_workers
    assert not HttpOptions.from_environment({"PENSTOCK_HIDE_WORKERS": "1"}).shows_workers


async def test_an_answer_that_began_before_its_worker_was_known_has_no_such_header() -> None:
    class Slow(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            await sleep(5)
            return await super().generate(request)

    service = app({"m": Slow([last()])}, options=HttpOptions(keep_alive_s=1), telemetry=Telemetry())
    exchange = await chat(service, stream=True).run()
    assert exchange.status == 200
    assert not set(ALL) & exchange.response_headers.keys()


async def test_a_graph_without_a_tracker_has_no_such_headers() -> None:
    exchange = await chat(app({"m": ScriptedEngine([Annotated(last().data)])})).run()
    assert not set(ALL) & exchange.response_headers.keys()
