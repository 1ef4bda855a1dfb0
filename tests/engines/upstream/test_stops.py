"""What stops, kills and readers that pause or leave do to a request at its server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from engines import DisaggregationMode
from engines.adapter import RequestAdapter
from engines.upstream import VllmUpstream
from engines.upstream.upstream import ABORT_S
from engines.upstream.vllm import ABORT
from pipeline import Context
from pipeline.protocols import FinishReason, PrefillResult, SamplingOptions
from tests.engines.upstream.vllm_worlds import FakeVllm, fake_vllm, started
from tests.engines.upstream.wire import Line, Received, as_event
from tests.engines.upstream.worlds import continued, prompt, running, sends

ROUTES = pytest.mark.parametrize("generates", [True, False], ids=["generate", "completions"])


@asynccontextmanager
async def adapted(server: FakeVllm) -> AsyncIterator[tuple[RequestAdapter, VllmUpstream]]:
    """An adapter that calls `abort`, as a worker's does."""
    async with started(server) as engine, anyio.create_task_group() as tasks:
        yield RequestAdapter(engine, spawn=tasks.start_soon), engine


@ROUTES
async def test_a_stop_ends_the_wait_and_the_request_at_the_server(generates: bool) -> None:
    async with fake_vllm(generates=generates, token_s=10.0) as server, adapted(server) as (adapter, engine):
        context = Context(prompt(50))
        found = []
        async with await adapter.generate(context) as stream, anyio.create_task_group() as tasks:
            found.append(await anext(stream))
            begun_s = anyio.current_time()
            tasks.start_soon(_later, context.stop)
            found.append(await anext(stream))
            assert anyio.current_time() - begun_s < 0.2
        last = found[-1].data
        assert last is not None
        assert last.finish_reason == FinishReason.CANCELLED
        assert last.completion_usage is not None
        assert last.completion_usage.completion_tokens == 1
        await anyio.sleep(0.1)
        assert (server.running, engine.in_flight) == ({}, 0)
        assert server.aborted == []  # the closed connection was enough


async def _later(call: object) -> None:
    await anyio.sleep(0.1)
    assert callable(call)
    call()


@ROUTES
async def test_a_stop_while_no_read_waits_frees_the_server_and_ends_the_stream_as_cancelled(generates: bool) -> None:
    async with fake_vllm(generates=generates) as server, adapted(server) as (adapter, engine):
        context = Context(prompt(4000))
        async with await adapter.generate(context) as stream:
            await anext(stream)
            context.stop()
            await anyio.sleep(0.1)
            assert server.running == {}
            rest = [item.data async for item in stream]
            assert [data.finish_reason for data in rest if data is not None] == [FinishReason.CANCELLED]
        assert engine.in_flight == 0


async def test_what_came_before_a_stop_is_not_delivered_after_it() -> None:
    chunks = [{"choices": [{"index": index, "token_ids": [7], "finish_reason": None}]} for index in (0, 1, 0)]
    together = sends(b"".join(map(as_event, chunks)))
    async with fake_vllm(faults={0: together}) as server, started(server) as engine:
        context = Context(prompt(50, sampling_options=SamplingOptions(n=2)))
        async with await RequestAdapter(engine).generate(context) as stream:
            first = await anext(stream)
            context.stop()
            rest = [item.data async for item in stream]
    assert first.data is not None
    assert first.data.token_ids == [7]
    assert [(one.token_ids, one.finish_reason) for one in rest if one is not None] == [([], FinishReason.CANCELLED)]


async def test_an_abort_names_the_request_as_the_server_does() -> None:
    """A proxy may hold the connection to the server open: the route ends the request all the same."""
    async with fake_vllm(ignores_hang_ups=True, token_s=10.0) as server, adapted(server) as (adapter, _):
        context = Context(prompt(4000), id="r1")
        async with await adapter.generate(context) as stream:
            await anext(stream)
            (name,) = server.running
            assert name.startswith("generate-tokens-r1-")
            context.stop()
            await anyio.sleep(0.1)
            assert (server.aborted, server.running) == ([name], {})


async def test_an_abort_that_is_not_answered_is_given_up() -> None:
    class Silent(FakeVllm):
        async def answer(self, line: Line, received: Received) -> None:
            if received.path == ABORT:
                await anyio.sleep(1000.0)
            await super().answer(line, received)

    async with running(Silent, token_s=10.0) as server, adapted(server) as (adapter, engine):
        context = Context(prompt(4000))
        async with await adapter.generate(context) as stream:
            await anext(stream)
            context.stop()
            await anyio.sleep(ABORT_S + 0.1)
            assert len(server.requests(ABORT)) == 1
            assert engine.in_flight == 1, "the request itself, whose reader stands"


@ROUTES
@pytest.mark.parametrize("ending", ["kill", "close"])
async def test_a_killed_or_closed_stream_frees_the_server(generates: bool, ending: str) -> None:
    async with fake_vllm(generates=generates) as server, adapted(server) as (adapter, engine):
        context = Context(prompt(4000))
        stream = await adapter.generate(context)
        await anext(stream)
        if ending == "kill":
            context.kill()
            assert [item async for item in stream] == []
        await stream.aclose()
        await anyio.sleep(0.1)
        assert (server.running, engine.in_flight) == ({}, 0)


async def test_a_slow_reader_gets_every_token_and_holds_up_no_one_else() -> None:
    async with fake_vllm() as server, started(server) as engine:
        adapter = RequestAdapter(engine)
        tokens: list[int] = []
        async with await adapter.generate(Context(prompt(20))) as slow:
            async for item in slow:
                assert item.data is not None
                tokens += item.data.token_ids
                if len(tokens) == 1:
                    begun_s = anyio.current_time()
                    async with await adapter.generate(Context(prompt(20))) as fast:
                        assert len([item async for item in fast]) == 21
                    assert anyio.current_time() - begun_s < 1.0
                    await anyio.sleep(30.0)
        assert tokens == continued([5, 6, 7], 20)


async def test_connections_are_shared_by_requests_that_follow_each_other() -> None:
    async with fake_vllm() as server, started(server) as engine:
        adapter = RequestAdapter(engine)
        for _ in range(5):
            async with await adapter.generate(Context(prompt(3))) as stream:
                assert len([item async for item in stream]) == 4
        assert len(server.lines) == 1


async def test_one_id_twice_is_two_requests() -> None:
    async with fake_vllm() as server, started(server) as engine:
        adapter = RequestAdapter(engine)
        async with await adapter.generate(Context(prompt(9), id="same")) as one:
            await anext(one)
            async with await adapter.generate(Context(prompt(9), id="same")) as other:
                await anext(other)
                assert len(server.running) == 2


async def test_a_decode_that_is_stopped_before_its_first_token_is_ended_at_once() -> None:
    """vLLM keeps the blocks of a transfer that is under way until it is over, so nothing has to wait for it here."""
    async with fake_vllm(token_s=10.0) as server, started(server) as engine, anyio.create_task_group() as tasks:
        adapter = RequestAdapter(engine, mode=DisaggregationMode.DECODE, spawn=tasks.start_soon)
        params = {"kv_transfer_params": {"do_remote_prefill": True}}
        context = Context(prompt(9, prefill_result=PrefillResult(params)))
        async with await adapter.generate(context) as stream, anyio.create_task_group() as stopping:
            stopping.start_soon(_later, context.stop)
            assert len([item async for item in stream]) == 1
        await anyio.sleep(0.1)
        assert server.running == {}
