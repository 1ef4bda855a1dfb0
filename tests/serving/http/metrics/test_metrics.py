"""What `/metrics` shows after requests of every kind."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from operators.kv import RouterMetrics
from pipeline import Annotated, Cancelled, Context, Disconnected, InvalidArgument, ResourceExhausted, Unavailable
from pipeline.protocols import BackendOutput, CompletionUsage, FinishReason, PromptTokensDetails
from pipeline.telemetry import Instrument, Metrics
from pipeline.testing import Fail, ScriptedEngine, Stall, Wait
from serving.http import HttpOptions, Telemetry, app
from serving.http.metrics.request_meter import RequestMeter
from serving.problems import Problem
from tests.serving.worlds import chat, last, request_to, token

Samples = dict[str, float]
CHAT = 'endpoint="chat_completions",model="m"'


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


def samples(telemetry: Telemetry) -> Samples:
    """All samples that are not 0, by name and labels."""
    text = telemetry.text().decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        sample.name.removeprefix("dynamo_frontend_") + _labels(sample.labels): sample.value
        for sample in found
        if sample.value and not sample.name.endswith("_created")
    }


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{labels[name]}"' for name in sorted(labels)) + "}" if labels else ""


async def test_a_successful_request_is_counted_from_start_to_end(telemetry: Telemetry) -> None:
    service = app({"m": ScriptedEngine([Wait(2), token("a"), token("b"), last()])}, telemetry=telemetry)
    await chat(service, stream=True).run()
    seen = samples(telemetry)
    assert seen[f'requests_started_total{{{CHAT},request_type="stream"}}'] == 1
    assert (
        seen[
            'requests_total{endpoint="chat_completions",error_type="",model="m",request_type="stream",status="success"}'
        ]
        == 1
    )
    assert seen['output_tokens_total{model="m"}'] == 2
    assert seen['output_sequence_tokens_count{model="m"}'] == 1
    assert seen['input_sequence_tokens_sum{model="m"}'] == 5
    assert seen['request_duration_seconds_sum{model="m"}'] == pytest.approx(2)
    assert seen['time_to_first_token_seconds_sum{model="m"}'] == pytest.approx(2)
    assert not [name for name in seen if name.startswith(("inflight", "active", "queued", "disconnected"))]


async def test_requests_are_queued_until_they_begin_and_active_until_they_end(telemetry: Telemetry) -> None:
    service = app({"m": ScriptedEngine([Wait(2), token("a"), Wait(2), last()])}, telemetry=telemetry)

    def gauges() -> list[float | None]:
        seen = samples(telemetry)
        return [seen.get(f'{name}_requests{{model="m"}}') for name in ("inflight", "queued", "active")]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(chat(service, stream=True).run)
        await anyio.sleep(1)
        assert gauges() == [1, 1, None]
        await anyio.sleep(2)
        assert gauges() == [1, None, 1]
    assert gauges() == [None] * 3


@pytest.mark.parametrize(
    ("script", "error_type"),
    [
        ([Fail(InvalidArgument("x"))], "validation"),
        ([Fail(ResourceExhausted("x"))], "overload"),
        ([Fail(Unavailable("x"))], "unavailable"),
        ([Fail(Cancelled("x"))], "cancelled"),
        ([Fail(Disconnected("x"))], "internal"),
        ([Stall()], "response_timeout"),
        ([], "internal"),
    ],
)
@pytest.mark.parametrize("begun", [True, False])
async def test_every_failure_has_its_class(
    telemetry: Telemetry, script: list[Any], error_type: str, begun: bool
) -> None:
    steps = [token("a"), Wait(1), *(script or [Fail(RuntimeError())])] if begun else script
    options = HttpOptions(silence_timeout_s=5)
    await chat(app({"m": ScriptedEngine(steps)}, telemetry=telemetry, options=options), stream=True).run()
    labels = f'endpoint="chat_completions",error_type="{error_type}",model="m",request_type="stream",status="error"'
    assert samples(telemetry)[f"requests_total{{{labels}}}"] == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_client_that_leaves_is_counted(telemetry: Telemetry, stream: bool, tokens: int) -> None:
    service = app({"m": ScriptedEngine([*[token("a")] * tokens, Stall()])}, telemetry=telemetry)
    exchange = chat(service, stream=stream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await anyio.sleep(1)
        exchange.leave()
    seen, kind = samples(telemetry), "stream" if stream else "unary"
    labels = f'endpoint="chat_completions",error_type="cancelled",model="m",request_type="{kind}",status="error"'
    assert seen["disconnected_clients"] == 1
    assert seen[f'model_cancellation_total{{{CHAT},request_type="{kind}"}}'] == 1
    assert seen[f"requests_total{{{labels}}}"] == 1


async def test_names_that_are_not_served_never_become_labels(telemetry: Telemetry) -> None:
    service = app({"m": ScriptedEngine([])}, telemetry=telemetry)
    for name in ("nonexistent-model-1", "Foo"):
        await chat(service, model=name).run()
    text = telemetry.text().decode()
    assert "nonexistent" not in text
    assert "Foo" not in text
    labels = 'endpoint="chat_completions",error_type="not_found",model="unknown_model",request_type="unary"'
    assert samples(telemetry)[f'requests_total{{{labels},status="error"}}'] == 2


async def test_cached_tokens_are_recorded_once_a_request(telemetry: Telemetry) -> None:
    usage = CompletionUsage(9, 1, 10, PromptTokensDetails(cached_tokens=4))
    items = [Annotated(BackendOutput([1], ["a"], "a", completion_usage=usage)) for _ in range(2)]
    end = Annotated(BackendOutput([], [], None, finish_reason=FinishReason.STOP))
    await chat(app({"m": ScriptedEngine([*items, end])}, telemetry=telemetry)).run()
    assert samples(telemetry)['cached_tokens_sum{model="m"}'] == 4


async def test_the_first_item_gives_no_gap_even_with_several_tokens(telemetry: Telemetry) -> None:
    with RequestMeter.of(telemetry, "m", "completions", streams=True) as meter:
        meter.add_tokens(5)
    seen = samples(telemetry)
    assert seen['time_to_first_token_seconds_count{model="m"}'] == 1
    assert 'inter_token_latency_seconds_count{model="m"}' not in seen


async def test_the_gap_before_an_item_is_shared_by_its_tokens(telemetry: Telemetry) -> None:
    with RequestMeter.of(telemetry, "m", "completions", streams=True) as meter:
        meter.add_tokens(1)
        await anyio.sleep(0.2)
        meter.add_tokens(4)
        meter.add_tokens(0)
    seen = samples(telemetry)
    assert seen['inter_token_latency_seconds_count{model="m"}'] == 4
    assert seen['inter_token_latency_seconds_sum{model="m"}'] == pytest.approx(0.2)
    assert seen['output_tokens_total{model="m"}'] == 5


async def test_tokens_that_come_alone_are_counted_as_items_of_one(telemetry: Telemetry) -> None:
    with RequestMeter.of(telemetry, "m", "completions", streams=True) as meter:
        for gap_s in (0.3, 0.1, 0.2):
            await anyio.sleep(gap_s)
            meter.add_tokens(1)
    seen = samples(telemetry)
    assert seen['time_to_first_token_seconds_count{model="m"}'] == 1
    assert seen['time_to_first_token_seconds_sum{model="m"}'] == pytest.approx(0.3)
    assert seen['inter_token_latency_seconds_count{model="m"}'] == 2
    assert seen['inter_token_latency_seconds_sum{model="m"}'] == pytest.approx(0.3)
    assert (seen['output_tokens_total{model="m"}'], meter.output_tokens) == (3, 3)


async def test_a_request_without_a_verdict_is_an_internal_error(telemetry: Telemetry) -> None:
    with RequestMeter.of(telemetry, "m", "completions", streams=False):
        pass
    labels = 'endpoint="completions",error_type="internal",model="m",request_type="unary",status="error"'
    assert samples(telemetry)[f"requests_total{{{labels}}}"] == 1


async def test_a_verdict_is_the_kind_of_its_problem(telemetry: Telemetry) -> None:
    with RequestMeter.of(telemetry, "m", "completions", streams=False) as meter:
        meter.finish(Problem(501, "x", "not_implemented"))
    assert any('error_type="not_implemented"' in name for name in samples(telemetry))


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (None, "dynamo_frontend_"),
        ("custom_prefix", "custom_prefix_"),
        ("nv-llm/http service", "nv_llm_http_service_"),
    ],
)
async def test_all_names_have_the_chosen_prefix(prefix: str | None, expected: str) -> None:
    telemetry = Telemetry(prefix=prefix)
    await chat(app({"m": ScriptedEngine([token("a"), token("b"), last()])}, telemetry=telemetry)).run()
    names = {line.split()[2] for line in telemetry.text().decode().splitlines() if line.startswith("# TYPE")}
    assert {f"{expected}requests_total", f"{expected}inter_token_latency_seconds"} <= names
    assert all(name.startswith(expected) for name in names)


async def test_buckets_are_those_of_the_table() -> None:
    telemetry = Telemetry(environment={"DYN_METRICS_INTER_TOKEN_LATENCY_SECONDS_COUNT": "2"})
    await chat(app({"m": ScriptedEngine([token("a"), token("b"), last()])}, telemetry=telemetry)).run()
    lines = telemetry.text().decode().splitlines()

    def bounds(name: str) -> list[float]:
        found = [line for line in lines if line.startswith(f"dynamo_frontend_{name}_bucket")]
        return [float(line.partition('le="')[2].partition('"')[0]) for line in found]

    assert bounds("request_duration_seconds") == [0, 2, 4, 8, 16, 32, 64, 130, 260, 510, float("inf")]
    assert bounds("inter_token_latency_seconds") == [0, 2, float("inf")]


async def test_each_app_shows_its_own_requests_only() -> None:
    first, second = (app({"m": ScriptedEngine([token("a"), last()])}) for _ in range(2))
    await chat(first).run()
    pages = [await request_to(each, "/metrics", method="GET").run() for each in (first, second)]
    assert [b"requests_started_total{" in page.content for page in pages] == [True, False]
    assert pages[0].response_headers["content-type"].startswith("text/plain")


async def test_the_callers_span_goes_with_the_request() -> None:
    engine = ScriptedEngine([token("a"), last()])
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await chat(app({"m": engine}), headers={"traceparent": parent}).run()
    await chat(app({"m": engine})).run()
    seen: list[Context[Any]] = engine.requests
    assert seen[0].trace is not None
    assert seen[1].trace is None


# -- instruments that others bring


def test_what_is_observed_is_shown_as_long_as_it_is_there(telemetry: Telemetry) -> None:
    metrics = Metrics(telemetry.meter, rows=[Instrument("waiting", "observed", "", "Who waits", ("pool",))])
    waiting = {"a": 2, "b": 3}
    forget = metrics.observe("waiting", lambda: [({"pool": pool}, count) for pool, count in waiting.items()])
    assert samples(telemetry) == {'waiting{pool="a"}': 2, 'waiting{pool="b"}': 3}
    del waiting["a"]
    assert samples(telemetry) == {'waiting{pool="b"}': 3}
    forget()
    assert samples(telemetry) == {}


def test_series_that_are_gone_leave_room_for_others(telemetry: Telemetry) -> None:
    """The SDK counts them against its limit of 2000 for one instrument."""
    metrics = Metrics(telemetry.meter, rows=[Instrument("waiting", "observed", "", "Who waits", ("pool",))])
    first = 0
    metrics.observe("waiting", lambda: [({"pool": str(first + number)}, 1) for number in range(1500)])
    for first in (0, 1500):
        seen = samples(telemetry)
        assert (len(seen), f'waiting{{pool="{first}"}}' in seen) == (1500, True)


def test_a_routers_metrics_are_shown_under_the_names_of_the_original(telemetry: Telemetry) -> None:
    """A name is shown as it stands in the table: neither a unit nor `_total` is added to it."""
    metrics = RouterMetrics(telemetry.meter)
    metrics.steps(lambda: 0.0, Context("r")).end()
    names = {line.split()[2] for line in telemetry.text().decode().splitlines() if line.startswith("# TYPE")}
    assert names == {
        "dynamo_component_router_requests_total",
        "dynamo_component_router_requests_started_total",
        "dynamo_component_router_non_max_overlap_selections_total",
        "dynamo_component_kv_cache_events_applied",
        "dynamo_frontend_router_queue_backpressure_total",
        "dynamo_router_overhead_total_ms",
    }
