"""Supervisor: what is down is tried again, and what comes back is another instance."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import anyio
import pytest

from engines import EchoEngine, EngineConfig, Worker, WorkerConfig, WorkerState
from pipeline import CannotConnect, Disconnected, InvalidArgument, PenstockError, Unknown
from pipeline.errors import EngineShutdown, ResponseTimeout
from pipeline.network import Runtime
from serving.deployment.supervisor import Retry, Supervisor

ENDPOINT = "ns/backend/generate"
RETRY = Retry(first_s=1.0, longest_s=8.0, steady_s=100.0)


class Server:
    """Something that is up or down, and what was made for it."""

    def __init__(self) -> None:
        self.is_down: PenstockError | None = None
        self.engines: list[Engine] = []
        self.tries_s: list[float] = []

    async def leave(self, error: PenstockError) -> None:
        """Go down, with this failure of the engine that serves, and for those who try."""
        self.is_down = error
        self.engines[-1].failed.set()


class Engine(EchoEngine):
    """An engine of the server: it fails when the server goes."""

    def __init__(self, server: Server) -> None:
        super().__init__(delay_s=1.0)
        self.server, self.failed = server, anyio.Event()
        self.is_clean = False

    async def start(self, worker_id: int) -> EngineConfig:
        self.server.tries_s.append(anyio.current_time())
        if self.server.is_down is not None:
            raise self.server.is_down
        return await super().start(worker_id)

    async def background(self) -> None:
        await self.failed.wait()
        assert self.server.is_down is not None
        raise self.server.is_down

    async def cleanup(self) -> None:
        self.is_clean = True


@asynccontextmanager
async def supervised(server: Server, retry: Retry = RETRY) -> AsyncIterator[tuple[Supervisor, Runtime]]:
    runtime, config = Runtime.in_process(), WorkerConfig(namespace="ns", model_name="m")

    @asynccontextmanager
    async def opened() -> AsyncIterator[Worker]:
        server.engines.append(Engine(server))
        async with Worker(server.engines[-1], config, runtime=runtime, environment={}) as worker:
            yield worker

    supervisor = Supervisor("server 1", opened, retry)
    async with runtime, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        yield supervisor, runtime
        tasks.cancel_scope.cancel()
    assert all(engine.is_clean for engine in server.engines if engine.server.tries_s)
    assert supervisor.worker is None


async def test_a_worker_serves_after_the_first_try() -> None:
    async with supervised(Server()) as (supervisor, runtime):
        await supervisor.was_tried.wait()
        assert supervisor.worker is not None
        assert supervisor.problem is None
        workers = runtime.workers(ENDPOINT)
        assert await workers.wait_for_instances() == (supervisor.worker.worker_id,)


async def test_what_is_down_at_the_start_is_left_out_and_comes_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.is_down = CannotConnect("no connection: Connection refused")
    async with supervised(server) as (supervisor, runtime):
        await supervisor.was_tried.wait()
        assert supervisor.worker is None
        assert supervisor.problem is server.is_down
        assert runtime.workers(ENDPOINT).instance_ids() == ()
        await anyio.sleep(20)
        server.is_down = None
        await runtime.workers(ENDPOINT).wait_for_instances()
        assert supervisor.worker is not None
        assert supervisor.problem is None
    gaps_s = [after - before for before, after in zip(server.tries_s, server.tries_s[1:], strict=False)]
    assert gaps_s == pytest.approx([1, 2, 4, 8, 8])
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert said == ["server 1 is left out: CannotConnect: no connection: Connection refused"]


async def test_a_restart_is_another_instance() -> None:
    server = Server()
    async with supervised(server) as (supervisor, runtime):
        workers = runtime.workers(ENDPOINT)
        (first,) = await workers.wait_for_instances()
        await server.leave(EngineShutdown("the server was started again"))
        await anyio.sleep(0.5)
        assert workers.instance_ids() == ()
        assert isinstance(supervisor.problem, EngineShutdown)
        server.is_down = None
        await anyio.sleep(1)
        (second,) = await workers.wait_for_instances()
        assert first != second
        assert [engine.is_clean for engine in server.engines] == [True, False]


async def test_a_worker_that_served_long_is_missed_for_a_short_time_only() -> None:
    server = Server()
    async with supervised(server) as (supervisor, _):
        for served_s, wait_s in ((5, 1), (5, 2), (5, 4), (200, 1)):
            await anyio.sleep(served_s)
            await server.leave(Disconnected("gone"))
            await anyio.sleep(wait_s - 0.1)
            assert supervisor.worker is None
            server.is_down = None
            await anyio.sleep(0.2)
            assert supervisor.worker is not None


async def test_tries_that_take_long_to_fail_are_made_less_and_less_often() -> None:
    tries_s: list[float] = []

    @asynccontextmanager
    async def silent() -> AsyncIterator[Worker]:
        tries_s.append(anyio.current_time())
        await anyio.sleep(200)
        raise ResponseTimeout("the server sent nothing for 200 s")
        yield

    with anyio.move_on_after(900):
        await Supervisor("x", silent, RETRY).run()
    gaps_s = [after - before - 200 for before, after in pairwise(tries_s)]
    assert gaps_s == pytest.approx([1, 2, 4, 8])


async def test_a_mistake_of_the_configuration_is_an_error_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.is_down = InvalidArgument("it has no 'llama'", field="model")
    async with supervised(server) as (supervisor, _):
        await anyio.sleep(0.5)
        (record,) = [record for record in caplog.records if "left out" in record.getMessage()]
        assert record.levelno == logging.ERROR
        assert record.getMessage() == "server 1 is left out: InvalidArgument (model): it has no 'llama'"
        server.is_down = None
        await anyio.sleep(1)
        assert supervisor.worker is not None


async def test_a_cancellation_ends_the_worker_in_service() -> None:
    server = Server()
    async with supervised(server) as (supervisor, _):
        await supervisor.was_tried.wait()
        worker = supervisor.worker
        assert worker is not None
    assert worker.state is WorkerState.STOPPED


async def test_a_fault_of_ours_is_logged_whole_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[Worker]:
        raise LookupError("bug")
        yield

    supervisor = Supervisor("x", broken)
    with anyio.move_on_after(1):
        await supervisor.run()
    assert isinstance(supervisor.problem, Unknown)
    assert "Traceback" in caplog.text
