"""Workers and times as an HTTP client sees them, and each worker's last request as `/metrics` shows it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from attrs import evolve
from prometheus_client.parser import text_string_to_metric_families

from operators import Detokenize, Model, Preprocess, PushRouter
from pipeline.llm import track_request
from pipeline.network import static_workers
from pipeline.protocols import LLMEngineOutput
from pipeline.testing import ScriptedEngine, Stall, Wait, watch_streams
from serving.deployment import GraphConfig, standard_graph
from serving.deployment.stages import wall_ms
from serving.http import Telemetry, app
from serving.http.metrics.telemetry import WorkerGauges
from tests.serving.worlds import chat, complete

BOTH = {"extra_fields": ["timing", "worker_id"]}
QUERY = {"annotations": ["query_instance_id:"]}


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


@asynccontextmanager
async def service(telemetry: Telemetry, router: Any = "kv", **fields: Any) -> AsyncIterator[Any]:
    """The standard graph with two workers that generate a letter a second, over HTTP."""
    config = GraphConfig(workers=2, router=router, engine_args={"delay_s": "1"}, seed=1)
    async with standard_graph(evolve(config, **fields)) as graph:
        yield app({"m": graph}, telemetry=telemetry)


def gauges(telemetry: Telemetry) -> dict[str, dict[tuple[str, ...], float]]:
    """The per-worker gauges: worker, rank and type -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(telemetry.text().decode()):
        name = family.name.removeprefix("dynamo_frontend_worker_last_")
        for sample in family.samples if name != family.name else ():
            labels = tuple(sample.labels[label] for label in ("worker_id", "dp_rank", "worker_type"))
            found.setdefault(name, {})[labels] = sample.value
    return found


def of_chunks(exchange: Any) -> list[Any]:
    return [chunk.get("nvext") for chunk in exchange.chunks]


# -- what a client sees


async def test_a_stream_has_the_workers_first_and_the_times_last(telemetry: Telemetry) -> None:
    async with service(telemetry) as served:
        before_ms = wall_ms()
        messages = [{"role": "user", "content": "four"}]
        first, *between, end = of_chunks(await chat(served, stream=True, messages=messages, nvext=BOTH).run())
    assert list(first) == ["worker_id"]
    assert between == [None, None]
    worker_id = first["worker_id"]["decode_worker_id"]
    assert first["worker_id"] == {
        "prefill_worker_id": worker_id,
        "prefill_dp_rank": 0,
        "decode_worker_id": worker_id,
        "decode_dp_rank": 0,
    }
    assert end["worker_id"] == first["worker_id"]
    timing = end["timing"]
    assert before_ms <= timing.pop("request_received_ms") <= wall_ms()
    assert timing == {
        "prefill_wait_time_ms": 0,
        "prefill_time_ms": 1000,
        "ttft_ms": 1000,
        "total_time_ms": 4000,
        "kv_hit_rate": 0,
        "router_queue_depth": 0,
    }


async def test_a_whole_answer_has_them_once(telemetry: Telemetry) -> None:
    async with service(telemetry) as served:
        nvext = (await chat(served, nvext=BOTH).run()).json["nvext"]
    assert list(nvext) == ["worker_id", "timing"]
    assert (nvext["timing"]["ttft_ms"], nvext["timing"]["total_time_ms"]) == (1000, 2000)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_router_without_cost_reports_its_worker_too(telemetry: Telemetry, stream: bool) -> None:
    async with service(telemetry, "round-robin") as served:
        exchange = await chat(served, stream=stream, nvext=BOTH).run()
    nvext = of_chunks(exchange)[-1] if stream else exchange.json["nvext"]
    assert list(nvext) == ["worker_id", "timing"]
    worker_id = nvext["worker_id"]["decode_worker_id"]
    assert nvext["worker_id"] == {"prefill_worker_id": worker_id, "decode_worker_id": worker_id}
    assert list(nvext["timing"]) == ["request_received_ms", "ttft_ms", "total_time_ms"]
    assert {worker for worker, _, _ in gauges(telemetry)["time_to_first_token_seconds"]} == {f"{worker_id:x}"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("router", ["kv", "round-robin"])
@pytest.mark.parametrize("nvext", [None, {}, {"extra_fields": []}])
async def test_a_request_without_extra_fields_gets_none(
    telemetry: Telemetry, nvext: Any, router: str, stream: bool
) -> None:
    async with service(telemetry, router) as served:
        assert b"nvext" not in (await chat(served, stream=stream, nvext=nvext).run()).content


@pytest.mark.parametrize("stream", [True, False])
async def test_a_query_returns_worker_and_tokens(telemetry: Telemetry, stream: bool) -> None:
    async with service(telemetry) as served:
        exchange = await chat(served, stream=stream, nvext=QUERY).run()
    assert exchange.status == 200
    shown = of_chunks(exchange) if stream else [exchange.json["nvext"]]
    assert len(shown) == 1
    nvext = shown[0]
    assert list(nvext) == ["worker_id", "token_ids"]
    assert nvext["token_ids"] == list(b"hi")
    assert nvext["worker_id"]["decode_worker_id"] == nvext["worker_id"]["prefill_worker_id"]
    assert gauges(telemetry) == {}


async def test_each_prompt_of_a_batch_is_timed_and_the_last_word_holds(telemetry: Telemetry) -> None:
    async with service(telemetry) as served:
        answer = await complete(served, prompt=["a", "abcd"], nvext=BOTH).run()
    assert answer.json["nvext"]["timing"]["total_time_ms"] == 4000


# -- what the metrics show


async def test_the_last_request_of_a_worker_is_shown(telemetry: Telemetry) -> None:
    async with service(telemetry, workers=1) as served:
        seen = []
        for text in ("abc", "abcdef"):
            await chat(served, messages=[{"role": "user", "content": text}]).run()
            seen.append(gauges(telemetry))
    ((labels, _),) = seen[0]["input_sequence_tokens"].items()
    assert labels[1:] == ("0", "decode")
    assert [shown["input_sequence_tokens"] for shown in seen] == [{labels: 3}, {labels: 6}]
    for shown in seen:
        assert shown["time_to_first_token_seconds"] == {labels: pytest.approx(1)}
        assert shown["inter_token_latency_seconds"] == {labels: pytest.approx(1)}


async def test_a_request_that_is_given_up_is_a_workers_last_too(telemetry: Telemetry) -> None:
    async with service(telemetry, workers=1) as served:
        text = "abcdefgh"
        exchange = chat(served, stream=True, messages=[{"role": "user", "content": text}])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await exchange.until(lambda seen: seen.text == "abc")
            assert gauges(telemetry) == {}
            exchange.leave()
    assert list(gauges(telemetry)["input_sequence_tokens"].values()) == [8]


async def test_a_request_without_a_token_is_no_workers_last(telemetry: Telemetry) -> None:
    async with service(telemetry, workers=1) as served:
        exchange = chat(served, stream=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await anyio.sleep(0.5)
            exchange.leave()
    assert gauges(telemetry) == {}


async def test_the_gauges_have_the_prefix_of_all_others() -> None:
    telemetry = Telemetry(prefix="my_front")
    async with service(telemetry) as served:
        await chat(served).run()
    text = telemetry.text().decode()
    assert "my_front_worker_last_time_to_first_token_seconds{" in text
    assert "dynamo_frontend_worker_last" not in text


async def test_the_worker_with_the_latest_request_is_the_last_to_be_dropped(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.http.metrics.telemetry.RANKS_MAX", 5)
    shown = WorkerGauges(telemetry.metrics)

    def request_of(worker_id: int) -> None:
        tracker = track_request(lambda: 0)
        tracker.record_isl(1)
        tracker.record_worker(worker_id)
        tracker.record_first_token()
        shown.record(tracker)

    for worker_id in (0, 1, 2, 3, 4, 0, 5, 6):
        request_of(worker_id)
    assert {labels[0] for labels in gauges(telemetry)["input_sequence_tokens"]} == set("03456")


# -- nothing stays


@pytest.mark.parametrize("nvext", [None, BOTH])
async def test_a_client_that_leaves_closes_everything(telemetry: Telemetry, nvext: Any) -> None:
    output = LLMEngineOutput(list(b"a"))
    model = Model.byte_level("m")
    push = PushRouter(static_workers({1: ScriptedEngine([Wait(1), output, Stall()])}))
    graph = Preprocess(model, wall_ms=wall_ms) >> Detokenize(model) >> push
    with watch_streams() as streams:
        exchange = chat(app({"m": graph}), stream=True, nvext=nvext)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await anyio.sleep(2)
            exchange.leave()
    assert streams.open == []
