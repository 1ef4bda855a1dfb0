"""What SglangUpstream finds out about its server, and how it finds out that it is another one."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from engines.upstream import SglangUpstream
from pipeline import InvalidArgument
from pipeline.errors import (
    EngineShutdown,
)
from tests.engines.upstream.sglang_worlds import FakeSglang, fake_sglang, started_sglang
from tests.engines.upstream.wire import Line, Received

KV_EVENTS = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv",
    "block_size": 32,
    "dp_size": 2,
    "replay_endpoint_port_base": 5600,
    "load_endpoint_port_base": 5700,
    "load_topic": "load",
}


async def test_what_the_server_has_is_found_at_its_start() -> None:
    info = {"kv_events": KV_EVENTS, "max_running_requests": 64}
    async with fake_sglang(info=info, adapters=("poet",)) as fake, started_sglang(fake) as engine:
        facts, config = engine.known, await engine.start(2)
    assert (facts.model, facts.adapters, facts.context_length) == ("tiny", ("poet",), 4096)
    assert (facts.block_size_tokens, facts.total_blocks, facts.max_num_seqs) == (32, 256, 64)
    assert [*facts.ranks] == [0, 1]
    assert facts.event_sources[1].endpoint == "tcp://gpu-1:5558"
    assert facts.event_sources[1].replay_endpoint == "tcp://gpu-1:5601"
    assert facts.event_sources[1].topic == "kv"
    assert facts.load_sources == {0: "tcp://gpu-1:5700", 1: "tcp://gpu-1:5701"}
    assert facts.bootstrap_host is None
    assert (config.kv_cache_block_size, config.data_parallel_size) == (32, 2)


@pytest.mark.parametrize(
    ("kv_events", "endpoints"),
    [
        (None, []),
        ("broken", []),
        ({"publisher": "null", "endpoint_port_base": 5557}, []),
        ({"publisher": "zmq", "endpoint_port_base": "5557"}, []),
        ({"publisher": "zmq", "endpoint_port_base": 5557}, ["tcp://gpu-1:5557"]),
        ({"publisher": "zmq", "endpoint_port_base": 5557, "endpoint_host": "0.0.0.0"}, ["tcp://gpu-1:5557"]),
        ({"publisher": "zmq", "endpoint_port_base": 5557, "endpoint_host": "10.0.0.9"}, ["tcp://10.0.0.9:5557"]),
    ],
)
async def test_the_events_come_from_the_servers_own_host_unless_it_names_one(
    kv_events: Any, endpoints: list[str]
) -> None:
    async with fake_sglang(info={"kv_events": kv_events}) as fake, started_sglang(fake) as engine:
        sources = engine.known.event_sources
    assert [source.endpoint for source in sources.values()] == endpoints


async def test_an_older_server_has_another_name_for_the_page() -> None:
    class Older(FakeSglang):
        async def answer(self, line: Line, received: Received) -> None:
            if received.path == "/server_info":
                await line.whole(404, {"detail": "Not Found"})
                return
            if received.path == "/get_server_info":
                received.path = "/server_info"
            await super().answer(line, received)

    async with fake_sglang() as fake:
        older = Older(fake.tasks)
        async with started_sglang(older) as engine:
            assert engine.known.block_size_tokens == 16
        await anyio.sleep(0.1)
        assert older.open == 0


@pytest.mark.parametrize("model", ["other", "poet"])
async def test_a_model_that_the_server_does_not_have_is_refused(model: str) -> None:
    async with fake_sglang(adapters=("poet",)) as fake:
        with pytest.raises(InvalidArgument, match="has no model"):
            async with started_sglang(fake, model=model):
                pass


async def watched(engine: SglangUpstream, fake: FakeSglang, *, is_another: bool) -> None:
    """Break the connections of a server that is being watched, with or without another process behind it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.background)
        await anyio.sleep(5.5)
        fake.kill()
        if is_another:
            fake.restart()
        fake.is_up = True
        await anyio.sleep(30)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("same", [{}, {"random_seed": 42}, {"startup_time": None}], ids=["", "seed", "no times"])
async def test_a_server_that_was_started_again_ends_the_engine(same: dict[str, Any]) -> None:
    async with fake_sglang(info=same) as fake, started_sglang(fake) as engine:
        with pytest.raises(BaseExceptionGroup) as ended:
            await watched(engine, fake, is_another=True)
    assert [type(error) for error in ended.value.exceptions] == [EngineShutdown]


async def test_the_same_server_behind_a_broken_connection_does_not() -> None:
    async with fake_sglang() as fake, started_sglang(fake) as engine:
        await watched(engine, fake, is_another=False)
