"""A server whose workers are all busy refuses with a status and the time to try again, until they are not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from operators import AllBusy, AllCoolingDown, BusyThresholds
from pipeline import Annotated, PenstockError, ResourceExhausted
from pipeline.testing import OpenStreams, ScriptedEngine
from pipeline.wire.errors import error_from_plain, error_to_plain
from serving.deployment import GraphConfig, HostOptions, OpenGraph, hosted_graph
from serving.deployment.routing import busy_thresholds
from serving.http import HttpOptions, app
from tests.serving.worlds import chat

CACHE = {"num_gpu_blocks": "40", "block_size": "4", "enable_prefix_caching": "false"}
QUARTER = {"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.25"}


@asynccontextmanager
async def serving(environment: Mapping[str, str], **fields: Any) -> AsyncIterator[tuple[OpenGraph, Any]]:
    """A graph over two mock workers with 40 blocks of 4 tokens each, and its app."""
    config = GraphConfig(engine="mocker", engine_args=CACHE, workers=2, model_name="m", **fields)
    async with hosted_graph(config, HostOptions(environment)) as opened:
        yield opened, app(opened.graph, options=HttpOptions.from_environment(environment))


async def fill(tasks: Any, make: Any, application: Any) -> list[Any]:
    """Two answers that take more than a quarter of the blocks of a worker each, and are far from their end."""
    running = [make(application, stream=True, max_tokens=140, ignore_eos=True) for _ in range(2)]
    for one in running:
        tasks.start_soon(one.run)
    for one in running:
        await one.until(lambda exchange: len(exchange.data) > 50)
    return running


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("variables", "status"), [({}, 529), ({"DYN_HTTP_OVERLOAD_STATUS_CODE": "503"}, 503)], ids=["529", "503"]
)
async def test_when_all_workers_are_busy_requests_are_refused_until_the_load_falls(
    stream: bool, variables: dict[str, str], status: int, open_streams: OpenStreams
) -> None:
    async with serving(QUARTER | variables) as (_, application), anyio.create_task_group() as tasks:
        assert (await chat(application, stream=stream, max_tokens=2).run()).status == 200
        running = await fill(tasks, chat, application)
        refused = await chat(application, stream=stream).run()
        assert (refused.status, refused.response_headers["retry-after"]) == (status, "1")
        assert refused.response_headers["content-type"] == "application/json"
        assert refused.json["message"] == "Service temporarily overloaded"
        running[0].leave()
        await running[0].until(lambda exchange: exchange.returned)
        await anyio.sleep(0.05)  # until its worker has reported it
        again = await chat(application, stream=stream, max_tokens=2).run()
        assert (again.status, "retry-after" in again.response_headers) == (200, False)


async def test_one_that_is_not_busy_gets_all(open_streams: OpenStreams) -> None:
    async with serving(QUARTER) as (opened, application), anyio.create_task_group() as tasks:
        busy, other = await fill(tasks, chat, application)
        other.leave()
        await other.until(lambda exchange: exchange.returned)
        await anyio.sleep(0.05)  # until its worker has reported it
        answers = [await chat(application, max_tokens=1).run() for _ in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        assert not busy.returned
        assert str(opened.graph).startswith("Rejection("), "a refusal comes before all work"


async def test_without_a_threshold_no_request_is_refused(open_streams: OpenStreams) -> None:
    async with serving({}) as (opened, application), anyio.create_task_group() as tasks:
        await fill(tasks, chat, application)
        assert (await chat(application, max_tokens=1).run()).status == 200
        assert "Rejection" not in str(opened.graph)


async def test_a_threshold_of_the_config_goes_before_that_of_the_environment(open_streams: OpenStreams) -> None:
    lax = BusyThresholds(active_decode_blocks_threshold=1.0)
    async with serving(QUARTER, busy=lax) as (_, application), anyio.create_task_group() as tasks:
        await fill(tasks, chat, application)
        assert (await chat(application, max_tokens=1).run()).status == 200


@pytest.mark.parametrize(
    ("value", "fraction", "tokens", "batches"),
    [
        ("0", 0.0, 0, 0.0),
        (" 1 ", 1.0, 1, 1.0),
        ("0.25", 0.25, None, 0.25),
        ("2", None, 2, 2.0),
        ("-1", None, None, None),
        ("nan", None, None, None),
        ("inf", None, None, None),
        ("many", None, None, None),
        ("", None, None, None),
    ],
)
def test_a_threshold_that_cannot_be_is_not_set(value: str, fraction: Any, tokens: Any, batches: Any) -> None:
    names = ("DECODE_BLOCKS_THRESHOLD", "PREFILL_TOKENS_THRESHOLD", "PREFILL_TOKENS_THRESHOLD_FRAC")
    environment = {f"DYN_ACTIVE_{name}": value for name in names}
    assert busy_thresholds(environment) == BusyThresholds(fraction, tokens, batches)


# -- the header


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("is_item", [True, False], ids=["first item", "raised"])
@pytest.mark.parametrize(
    ("error", "status", "header"),
    [
        (AllBusy("x", retry_after_s=2.0), 529, "2"),
        (AllBusy("x", retry_after_s=2.01, status=503), 503, "3"),
        (AllBusy("x", retry_after_s=0), 529, "0"),
        (AllBusy("x"), 529, None),
        (AllBusy("x", retry_after_s=float("nan"), status=700), 529, None),
        (AllBusy("x", retry_after_s=-1.0, status=7), 529, None),
        (AllCoolingDown("x", retry_after_s=0.2), 503, "1"),
        (ResourceExhausted("x", cause=AllBusy("y", retry_after_s=4.0)), 529, "4"),
        (ResourceExhausted("x", cause=AllCoolingDown("y", retry_after_s=4.0)), 529, None),
    ],
)
async def test_retry_after_is_in_whole_seconds_and_never_too_early(
    error: PenstockError, status: int, header: str | None, is_item: bool, stream: bool
) -> None:
    engine = ScriptedEngine([Annotated[Any].from_error(error)]) if is_item else ScriptedEngine([], fails=error)
    answer = await chat(app({"m": engine}), stream=stream).run()
    assert (answer.status, answer.response_headers.get("retry-after")) == (status, header)


@pytest.mark.parametrize(
    "error",
    [AllBusy("full", retry_after_s=2.5, status=503), AllBusy("full"), AllCoolingDown("gone", retry_after_s=0.5)],
)
def test_a_refusal_keeps_its_content_on_the_wire(error: Any) -> None:
    again: Any = error_from_plain(error_to_plain(error))
    assert (type(again), again.message, again.facts) == (type(error), error.message, error.facts)
    assert again.retry_after_s == error.retry_after_s
