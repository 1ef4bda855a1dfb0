"""A trace against a server: the same counts as through the graph that it serves, and what only a server brings."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from pipeline import InvalidArgument
from pipeline.errors import Disconnected, InvalidMessage, StatusError, Unavailable
from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.http import app
from serving.live import Address, find_server, live_graph
from serving.live.engine import LiveServer
from serving.replay import Report, SyntheticLoad, Trace, report_text, run, run_config
from tests.engines.upstream.wire import Line, Received
from tests.serving.live.worlds import mount, serve

URL = "http://far:8000"


def load(count: int = 24, output_tokens: int = 12, **more: Any) -> Trace:
    given: dict[str, Any] = {"shared_prefix_ratio": 0.5, "num_prefix_groups": 3, "trace_block_size": 64}
    given |= {"arrival_interval_ms": 5_000.0} | more
    made = SyntheticLoad(input_tokens=256, output_tokens=output_tokens, request_count=count, **given).make()
    return made.with_vocabulary(range(1000, 32_000))


def counts(report: Report) -> dict[str, Any]:
    names = ("completed_requests", "total_input_tokens", "total_output_tokens", "prefix_cache_reused_ratio")
    return {name: report.value(name) for name in names} | {
        "workers": sorted((one.requests, one.input_tokens, one.cached_tokens) for one in report.workers)
    }


@pytest.mark.parametrize("router", ["kv", "round-robin"])
@pytest.mark.parametrize("more", [{}, {"turns": 3, "inter_turn_delay_ms": 22_000.0}], ids=["", "in turns"])
async def test_a_server_and_the_graph_it_serves_count_the_same(router: Any, more: dict[str, Any]) -> None:
    """Tokens, what was cached, and which worker had how much, over the whole way through HTTP."""
    trace, config = load(8, **more), GraphConfig(engine="mocker", workers=2, router=router, seed=7)
    async with hosted_graph(config, HostOptions()) as opened, serve(mount(app({"echo": opened.graph}))) as server:
        server.models = {"echo": "penstock"}
        live = await run(live_graph(URL, transport=server.transport), trace, per_request=True)
    through = await run_config(config, trace, per_request=True)
    assert counts(live) == counts(through)
    assert live.prefix_cache_reused_ratio > 0.1
    assert live.per_request is not None
    assert through.per_request is not None
    for there, here in zip(live.per_request, through.per_request, strict=True):
        assert (there.name, there.output_length) == (here.name, here.output_length)
        assert there.e2e_latency_ms == pytest.approx(here.e2e_latency_ms, abs=5.0)
        assert there.ttft_ms == pytest.approx(here.ttft_ms, abs=5.0)
        assert (there.queue_wait_ms, there.prefill_time_ms is None) == (None, here.prefill_time_ms is None)


async def test_a_prefill_worker_named_in_an_answer_has_its_prompt() -> None:
    config = GraphConfig(engine="mocker", workers=2, prefill_workers=1, seed=7)
    async with hosted_graph(config, HostOptions()) as opened, serve(mount(app({"echo": opened.graph}))) as server:
        server.models = {"echo": "nvidia"}
        report = await run(live_graph(URL, transport=server.transport), load(6))
    assert [(one.role, one.requests, one.input_tokens) for one in report.workers] == [
        ("decode", 3, 0),
        ("decode", 3, 0),
        ("prefill", 6, 6 * 256),
    ]
    assert report.migrations == 0
    assert all(one.mean_running > 0 for one in report.workers)


async def one_token_a_second(line: Line, received: Received) -> None:
    await line.begin()
    for _ in range(received.json["max_tokens"]):
        await anyio.sleep(1.0)
        await line.event({"choices": [{"text": "a", "finish_reason": None}]})
    await line.event({"choices": [{"text": "", "finish_reason": "length"}]})
    await line.event("[DONE]")
    await line.end()


async def test_a_replay_that_is_ended_early_reports_what_was_done() -> None:
    async def enough() -> None:
        await anyio.sleep(12.5)

    noted: list[Any] = []
    trace = load(6, 3, turns=2)
    async with serve(one_token_a_second) as server:
        graph = live_graph(LiveServer(Address.parse(URL), "m"), transport=server.transport)
        report = await run(graph, trace, stop_when=enough, on_request=noted.append, settings={"by": "hand"})
    assert report.is_interrupted
    assert report.settings == {"by": "hand", "interrupted": True}
    # those of 0 and 5 s have two turns of 3 s each behind them, that of 10 s is in its first
    assert (report.completed_requests, report.unfinished_requests, report.failed_requests) == (4, 1, 0)
    assert (report.num_requests, report.unsent_requests) == (5, 7)
    assert report.duration_ms == pytest.approx(12_500.0)
    assert "INTERRUPTED" in report_text(report)
    assert Report.from_json(report.to_json()).is_interrupted
    assert [json.loads(one.to_json())["status"] for one in noted] == ["completed"] * 4 + ["unfinished"]


async def test_a_replay_that_ends_by_itself_was_not_interrupted() -> None:
    async with serve(one_token_a_second) as server:
        report = await run(live_graph(URL, transport=server.transport), load(2, 3), stop_when=anyio.sleep_forever)
    assert (report.completed_requests, report.settings, report.is_interrupted) == (2, {}, False)


async def test_errors_are_counted_by_type_with_the_message_of_the_first() -> None:
    async def script(line: Line, received: Received) -> None:
        if len(server.received) <= 3:
            await line.whole(503 if len(server.received) < 3 else 500, {"message": f"no {len(server.received)}"})
        else:
            await one_token_a_second(line, received)

    async with serve(script) as server:
        report = await run(live_graph(URL, transport=server.transport), load(5, 2), per_request=True)
    assert (report.completed_requests, report.rejected_requests, report.failed_requests) == (2, 2, 1)
    assert [(one.type, one.requests, one.example) for one in report.errors] == [
        ("WorkerOverloaded", 2, "HTTP 503: no 1"),
        ("BackendUnknown", 1, "HTTP 500: no 3"),
    ]
    assert report.per_request is not None
    assert [one.error for one in report.per_request][2:] == ["BackendUnknown: HTTP 500: no 3", None, None]
    assert "2 WorkerOverloaded, first: HTTP 503: no 1" in report_text(report)
    assert Report.from_json(report.to_json()) == report
    older = report.to_json().replace(b'"errors"', b'"older"')
    assert Report.from_json(older).errors == []


async def test_an_answer_that_went_on_elsewhere_is_a_migration() -> None:
    """Between servers of our own kind: the worker that answered last has the request, and its tokens."""

    async def script(line: Line, received: Received) -> None:
        await line.begin()
        for worker, ids in ((7, [1]), (None, [2]), (9, [3])):
            await anyio.sleep(1.0)
            known = {} if worker is None else {"worker_id": {"prefill_worker_id": worker, "decode_worker_id": worker}}
            await line.event({"choices": [{"text": ""}], "nvext": {"completion_token_ids": ids, **known}})
        await line.event({"choices": [{"text": "", "finish_reason": "length"}]})
        await line.event("[DONE]")
        await line.end()

    async with serve(script) as server:
        report = await run(live_graph(URL, transport=server.transport), load(1, 3))
    assert (report.migrations, report.migrated_requests) == (1, 1)
    assert [(one.worker, one.requests, one.output_tokens) for one in report.workers] == [(7, 0, 0), (9, 1, 3)]


# -- finding the server


async def test_the_first_model_is_used_unless_one_is_named() -> None:
    async with serve(one_token_a_second, models={"a": "nvidia", "b": "vllm"}) as server:
        assert await find_server(f"{URL}/v1", transport=server.transport) == LiveServer(
            Address.parse(URL), "a", nvext=True
        )
        assert await find_server(URL, model="b", transport=server.transport) == LiveServer(Address.parse(URL), "b")
        with pytest.raises(InvalidArgument, match="has no 'c'; it has a, b") as caught:
            await find_server(URL, model="c", transport=server.transport)
        assert caught.value.field == "model"


async def test_a_server_without_models_gets_no_requests() -> None:
    async with serve(one_token_a_second, models={}) as server:
        with pytest.raises(Unavailable, match="no model now"):
            await find_server(URL, transport=server.transport)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [(401, {"message": "no key"}, StatusError), (200, b"<html>", InvalidMessage), (200, {"data": 3}, InvalidMessage)],
)
async def test_a_list_of_models_that_is_none_is_named_with_its_url(
    status: int, body: Any, kind: type[Exception]
) -> None:
    async with serve(one_token_a_second, page=(status, body)) as server:
        with pytest.raises(kind, match=URL):
            await find_server(URL, transport=server.transport)


async def test_one_that_closes_the_connection_is_named_too() -> None:
    async with serve(one_token_a_second) as server:
        with pytest.raises(Disconnected, match=f"^{URL}: the connection was closed"):
            await find_server(URL, transport=server.closing)


async def test_a_server_that_has_no_list_is_taken_at_its_users_word() -> None:
    async with serve(one_token_a_second, page=(404, {"message": "x"})) as server:
        assert (await find_server(URL, model="m", transport=server.transport)).model == "m"
        with pytest.raises(InvalidArgument, match="name one"):
            await find_server(URL, transport=server.transport)
