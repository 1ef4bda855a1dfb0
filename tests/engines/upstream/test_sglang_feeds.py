"""KV events and load of an SGLang server, over real sockets of this machine, as those of the worker in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import zmq

from engines import ShutdownTimes, Worker
from engines.upstream import SglangUpstream
from pipeline.network import Event, Runtime, Scope
from pipeline.protocols.kv import (
    KV_EVENTS_TOPIC,
    KV_METRICS_TOPIC,
    ActiveLoad,
    KvCleared,
    KvRemoved,
    KvStored,
    RouterEvent,
)
from pipeline.wire import to_msgpack
from tests.engines.upstream.sglang_worlds import FakeSglang
from tests.pipeline.llm.kv_events.kv_source import BLOCK_TOKENS, FakeKvSource

URL = "http://127.0.0.1:30000"
TIMES = ShutdownTimes(grace_s=0.0, timeout_s=5.0)
WAIT_S = 10.0


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """In real time: sockets know no other."""
    backend: str = request.param
    return backend


@pytest.fixture
def source() -> Iterator[FakeKvSource]:
    with FakeKvSource.opened() as opened:
        yield opened


@pytest.fixture
def load() -> Iterator[zmq.Socket[bytes]]:
    """Where the server publishes its load."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.bind("tcp://127.0.0.1:*")
    yield socket
    context.destroy(linger=0)


def page(name: int, first: int, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    """A store of one page, as SGLang sends it: a signed hash, and no name of an adapter."""
    tokens = list(range(first, first + BLOCK_TOKENS))
    head = {"type": "BlockStored", "block_hashes": [name], "parent_block_hash": parent, "token_ids": tokens}
    return {**head, "block_size": BLOCK_TOKENS, "lora_id": None, **fields}


def port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S * 200)):
        if condition():
            return
        await anyio.sleep(0.005)
    raise AssertionError("it never came")


async def test_its_pages_and_its_load_reach_the_routers(source: FakeKvSource, load: zmq.Socket[bytes]) -> None:
    info = {
        "publisher": "zmq",
        "endpoint_host": "127.0.0.1",
        "endpoint_port_base": port(source.endpoint),
        "replay_endpoint_port_base": port(source.replay_endpoint),
        "load_endpoint_port_base": port(load.getsockopt_string(zmq.LAST_ENDPOINT)),
        "topic": "",
        "block_size": BLOCK_TOKENS,
        "dp_size": 1,
    }
    source.publish(page(-5, 100), page(7, 104, -5), page(8, 108, 7, medium="GPU"))
    source.publish({"type": "BlockRemoved", "block_hashes": [8]}, page(8, 108, 7, medium="CPU_PINNED"))
    events: list[Event[RouterEvent]] = []
    loads: list[Event[ActiveLoad]] = []
    async with anyio.create_task_group() as tasks:
        server = FakeSglang(tasks, page_size=BLOCK_TOKENS, info={"kv_events": info})
        async with Runtime.in_process() as runtime:
            where = Scope("dynamo", "backend")
            runtime.events.subscribe(where, KV_EVENTS_TOPIC, RouterEvent).subscribe(events.append)
            runtime.events.subscribe(where, KV_METRICS_TOPIC, ActiveLoad).subscribe(loads.append)
            engine = SglangUpstream(URL, transport=server.transport)
            async with Worker(engine, runtime=runtime, worker_id=7, environment={}, times=TIMES):
                await until(lambda: len(events) == 3)
                source.publish({"type": "AllBlocksCleared"})
                for _ in range(int(WAIT_S * 20)):
                    load.send_multipart([b"load", bytes(8), to_msgpack(["LoadStat", 1, 2, 9, 4096, 0, 33, 40])])
                    await anyio.sleep(0.05)
                    if loads:
                        break
                await until(lambda: len(events) == 4)
        tasks.cancel_scope.cancel()
    first, gone, lower, cleared = [event.payload for event in events]
    assert isinstance(first.event.data, KvStored)
    assert [block.block_hash for block in first.event.data.blocks] == [2**64 - 5, 7, 8]
    assert gone.event.data == KvRemoved([8])
    assert (lower.storage_tier, isinstance(lower.event.data, KvStored)) == ("host_pinned", True)
    assert cleared.event.data == KvCleared()
    assert loads[0].payload == ActiveLoad(7, 0, active_decode_blocks=3, active_prefill_tokens=33, kv_used_blocks=3)
