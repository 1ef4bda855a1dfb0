"""The state of a deployment: what is gathered of it, and how it is shown. Virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from engines import DisaggregationMode, EchoEngine, Worker, WorkerConfig
from operators.pool import load_reports
from pipeline import Unavailable, function_engine
from pipeline.network import EndpointId, Instance, Runtime, Scope
from pipeline.protocols.kv import ActiveLoad
from serving.status import (
    FRONTENDS_AT,
    FrontendRow,
    Gatherer,
    Overview,
    ProcessStatus,
    WorkerRow,
    serving_status,
    show_status,
    status_endpoint,
)
from serving.status.overview_table import overview_text

BACKEND = EndpointId("ns", "backend", "generate")
PREFILL = EndpointId("ns", "prefill", "generate")


@asynccontextmanager
async def deployed() -> AsyncIterator[Runtime]:
    """A worker for prompts and one for answers, which runs three requests, and a front end."""
    async with Runtime.in_process() as runtime, AsyncExitStack() as stack:
        for number, mode in ((1, DisaggregationMode.DECODE), (2, DisaggregationMode.PREFILL)):
            config = WorkerConfig(namespace="ns", disaggregation_mode=mode, model_name="m")
            worker = Worker(EchoEngine(), config, runtime=runtime, worker_id=number, environment={})
            await stack.enter_async_context(worker)
            at = status_endpoint(worker.endpoint)
            await stack.enter_async_context(serving_status(runtime, at, lambda: ProcessStatus(3), number))
        status = ProcessStatus(4, ["m"], "http://127.0.0.1:8000")
        await stack.enter_async_context(serving_status(runtime, FRONTENDS_AT, lambda: status, 9))
        yield runtime


async def test_workers_and_front_ends_are_found_with_their_streams() -> None:
    async with deployed() as runtime:
        with Gatherer(runtime) as gatherer:
            overview = await gatherer.gather()
    decode, prefill = overview.workers
    assert (decode.role, decode.instance, decode.endpoint, decode.model) == ("decode", "1", BACKEND.path, "echo")
    assert (prefill.role, prefill.instance, prefill.endpoint) == ("prefill", "2", PREFILL.path)
    assert [each.streams for each in overview.workers] == [3, 3]
    assert overview.frontends == [FrontendRow("9", "http://127.0.0.1:8000", 4, ["m"])]


async def test_loads_are_those_reported_last_summed_over_the_ranks() -> None:
    async with deployed() as runtime:
        publisher = runtime.events.publisher(Scope("ns", "backend"), "kv_metrics")
        assert load_reports(runtime.events, BACKEND) is not None
        with Gatherer(runtime) as gatherer:
            assert (await gatherer.gather()).workers[0].kv_used_blocks is None
            publisher.publish(ActiveLoad(1, 0, active_decode_blocks=90, kv_used_blocks=90))
            publisher.publish(ActiveLoad(1, 0, active_decode_blocks=1, kv_used_blocks=10))
            publisher.publish(ActiveLoad(1, 1, active_decode_blocks=2))
            await anyio.sleep(0.1)
            worker = (await gatherer.gather()).workers[0]
    assert (worker.decode_blocks, worker.prefill_tokens, worker.kv_used_blocks) == (3, None, 10)


async def test_loads_are_collected_once_however_often_it_is_looked_at_and_forgotten_with_their_worker() -> None:
    async with deployed() as runtime:
        publisher = runtime.events.publisher(Scope("ns", "backend"), "kv_metrics")
        with Gatherer(runtime) as gatherer:
            for _ in range(5):
                await gatherer.gather()
            assert len(gatherer._subscriptions.disposable) == 2, "one for each component"
            for worker_id in (1, 77):
                publisher.publish(ActiveLoad(worker_id, 0, kv_used_blocks=1))
            await anyio.sleep(0.1)
            await gatherer.gather()
            assert {worker_id for worker_id, _ in gatherer._loads} == {1}


async def test_a_worker_that_does_not_answer_is_shown_all_the_same() -> None:
    async with Runtime.in_process() as runtime:
        config = WorkerConfig(namespace="ns", model_name="m")
        async with Worker(EchoEngine(), config, runtime=runtime, worker_id=1, environment={}):

            async def hang(_: object) -> AsyncIterator[ProcessStatus]:
                await anyio.sleep_forever()
                yield ProcessStatus(0)

            await runtime.serve(status_endpoint(BACKEND), function_engine(hang), instance_id=1)
            begun_s = anyio.current_time()
            with Gatherer(runtime) as gatherer:
                (worker,) = (await gatherer.gather()).workers
            assert anyio.current_time() - begun_s == pytest.approx(2)
            assert worker.streams is None
            assert "no answer" in overview_text(Overview([worker]), 120)


async def test_a_process_that_is_gone_is_not_shown_any_more() -> None:
    async with Runtime.in_process() as runtime:
        with Gatherer(runtime) as gatherer:
            async with serving_status(runtime, FRONTENDS_AT, lambda: ProcessStatus(0)):
                assert len((await gatherer.gather()).frontends) == 1
            assert await gatherer.gather() == Overview()


def test_the_table_has_what_is_known_and_no_control_characters() -> None:
    worker = WorkerRow("1f", "ns/backend/generate", "decode", "a\x1b[2J", "10.0.0.1:4000", 3, 7, None, 1024, 4096)
    text = overview_text(Overview([worker], [FrontendRow("2e", "http://h:1", 5, ["a", "b"])]), 120)
    lines = text.splitlines()
    assert next(line for line in lines if "1f" in line).split() == [
        *("decode", r"a\x1b[2J", "1f", "10.0.0.1:4000", "3", "7", "-", "25%", "4,096")
    ]
    assert next(line for line in lines if "2e" in line).split() == ["http://h:1", "a,", "b", "2e", "5"]
    assert "no process is registered" in overview_text(Overview(), 120)


@pytest.mark.parametrize("width", [20, 60, 200])
def test_a_narrow_terminal_is_not_exceeded(width: int) -> None:
    worker = WorkerRow("1f" * 6, "ns/backend/generate", "decode", "model" * 5, "10.0.0.1:4000", 3)
    assert max(map(len, overview_text(Overview([worker]), width).splitlines())) <= width


async def test_as_json_it_is_one_object_with_what_is_unknown_as_null(capsys: pytest.CaptureFixture[str]) -> None:
    await show_status(Runtime.in_process(), watch=False, as_json=True, wait_s=1.0)
    assert json.loads(capsys.readouterr().out) == {"workers": [], "frontends": []}


async def test_as_json_it_is_read_again_whatever_a_name_holds(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x7f\x85\u200e\U0001f600"
    runtime = Runtime.in_process()
    with anyio.move_on_after(5):
        async with anyio.create_task_group() as tasks:

            async def show() -> None:
                await show_status(runtime, watch=True, as_json=True, wait_s=0.5)

            tasks.start_soon(show)
            await anyio.sleep(0.1)
            async with serving_status(runtime, FRONTENDS_AT, lambda: ProcessStatus(1, [name]), 7):
                await anyio.sleep(1)
                tasks.cancel_scope.cancel()
    out = capsys.readouterr().out
    assert out.isprintable() or out.removesuffix("\n").isprintable()
    assert json.loads(out)["frontends"][0]["models"] == [name]


async def test_a_watch_goes_on_when_discovery_was_away(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime.in_process()

    async def away() -> list[Instance]:
        raise Unavailable("the broker is away")

    async with anyio.create_task_group() as tasks:

        async def show() -> None:
            await show_status(runtime, watch=True, as_json=True, wait_s=0.0)

        tasks.start_soon(show)
        await anyio.sleep(5)
        with monkeypatch.context() as patched:
            patched.setattr(runtime.discovery, "instances", away)
            await anyio.sleep(5)
        async with serving_status(runtime, FRONTENDS_AT, lambda: ProcessStatus(1), 7):
            await anyio.sleep(5)
        tasks.cancel_scope.cancel()
    shown = [json.loads(line)["frontends"] for line in capsys.readouterr().out.splitlines()]
    assert [len(each) for each in shown[:2]] == [0, 1]
    assert caplog.text.count("no longer up to date: the broker is away") == 1


async def test_it_is_shown_again_when_it_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    runtime = Runtime.in_process()
    async with anyio.create_task_group() as tasks:

        async def show() -> None:
            await show_status(runtime, watch=True, as_json=True, wait_s=0.0)

        tasks.start_soon(show)
        await anyio.sleep(5)
        async with serving_status(runtime, FRONTENDS_AT, lambda: ProcessStatus(1), 7):
            await anyio.sleep(5)
        await anyio.sleep(5)
        tasks.cancel_scope.cancel()
    shown = [json.loads(line)["frontends"] for line in capsys.readouterr().out.splitlines()]
    assert shown[:2] == [[], [{"instance": "7", "url": "", "streams": 1, "models": []}]]
    assert shown[-1] == []
    assert len(shown) <= 4  # it may be seen while it ends
