"""Runtimes over NATS: processes find each other, and a broker that is away ends nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline import AsyncEngine, CannotConnect, Context, InvalidArgument
from pipeline.network import Runtime, Scope
from pipeline.network.tcp import TcpOptions
from pipeline.testing import ScriptedEngine, Wait
from tests.pipeline.network.nats.worlds import own_server
from tests.pipeline.network.worlds import WHERE, card, eventually

TTL_S = 2.0
TCP = TcpOptions(token="shared")


@asynccontextmanager
async def runtime(url: str) -> AsyncIterator[Runtime]:
    async with Runtime.at(url, tcp=TCP, lease_ttl_s=TTL_S, graceful_timeout_s=0.5) as opened:
        yield opened


def endless() -> AsyncEngine[Any, Any]:
    """Return an engine that answers with one number after another, 50 ms apart."""
    return ScriptedEngine([step for number in range(1000) for step in (number, Wait(0.05))])


async def read(runtime: Runtime, items: int) -> list[Any]:
    """Send a request to the endpoint and return the first items of its answer."""
    workers = runtime.workers(WHERE)
    (instance_id,) = await workers.wait_for_instances()
    received: list[Any] = []
    async with await workers.engine(instance_id).generate(Context("request")) as stream:
        async for item in stream:
            received.append(item)
            if len(received) == items:
                break
    workers.close()
    return received


async def test_processes_find_and_reach_each_other_and_share_events_and_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").write_bytes(b"content")
    async with own_server(tmp_path) as server, runtime(server.url) as worker, runtime(server.url) as front_end:
        served = await worker.serve(WHERE, endless(), card=card("model"))
        assert await read(front_end, 3) == [0, 1, 2]
        assert [model.card.display_name for model in await front_end.discovery.models()] == ["model"]
        await front_end.objects.get(await worker.objects.put(tmp_path / "tokenizer"), tmp_path / "copy")
        received: list[Any] = []
        worker.events.subscribe(Scope("ns"), "load", int).subscribe(received.append)
        publisher = front_end.events.publisher(Scope("ns"), "load")
        with anyio.fail_after(10):
            while not received:  # what is published before the subscription is at the server is lost
                publisher.publish(7)
                await anyio.sleep(0.05)
        assert received[0].payload == 7
        seen: list[Any] = []
        front_end.discovery.watch().subscribe(seen.append)
        await eventually(lambda: len(seen) == 1)
        await served.close()
        await eventually(lambda: len(seen) == 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "suspended"])
async def test_without_its_broker_streams_and_new_requests_go_on(tmp_path: Path, how: str) -> None:
    async with own_server(tmp_path) as server, runtime(server.url) as worker, runtime(server.url) as front_end:
        await worker.serve(WHERE, endless())
        workers = front_end.workers(WHERE)
        (instance_id,) = await workers.wait_for_instances()
        async with await workers.engine(instance_id).generate(Context("request")) as stream:
            assert await stream.__anext__() == 0
            if how == "killed":
                await server.kill()
            else:
                server.pause()
            assert [await stream.__anext__() for _ in range(30)] == list(range(1, 31))
            async with await workers.engine(instance_id).generate(Context("new")) as second:
                assert await second.__anext__() == 0
            if how == "killed":
                await server.start()
            else:
                server.resume()
            assert [await stream.__anext__() for _ in range(20)] == list(range(31, 51))
            with anyio.fail_after(5):  # until the worker has connected again, too
                while not await front_end.discovery.instances():  # noqa: ASYNC110
                    await anyio.sleep(0.1)
            assert workers.instance_ids() == (instance_id,)
            assert workers.incarnation(instance_id) == 0
        workers.close()


@pytest.mark.slow
async def test_a_runtime_whose_broker_is_not_there_is_not_entered(tmp_path: Path) -> None:
    with anyio.fail_after(10), pytest.raises(CannotConnect, match=r"nats://127\.0\.0\.1:1"):
        async with runtime("nats://secret@127.0.0.1:1"):
            pass


async def test_a_runtime_is_left_in_time_while_its_broker_is_away(tmp_path: Path) -> None:
    async with own_server(tmp_path) as server:
        async with runtime(server.url) as worker:
            for number in range(20):
                await worker.serve(f"ns/comp/ep{number}", endless(), card=card("model"))
            await server.kill()
            await anyio.sleep(0.1)
            begun_s = anyio.current_time()
        assert anyio.current_time() - begun_s < 3.0


@pytest.mark.parametrize("url", ["nats://", "tls://secret@"])
def test_what_is_no_server_is_refused_without_its_text(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Runtime.at(url)
    assert refused.value.field == "url"
    assert "secret" not in str(refused.value)
