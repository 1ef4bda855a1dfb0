"""The adapters of a server behind a worker of a runtime."""

from __future__ import annotations

import anyio
import pytest

from engines import DisaggregationMode, ShutdownTimes, Worker, WorkerConfig
from pipeline import Unavailable
from pipeline.network import Runtime
from serving.deployment import UpstreamConfig
from serving.deployment.announced_adapters import announced_adapters
from tests.serving.upstream_worlds import ONE, Site

TIMES = ShutdownTimes(grace_s=0, timeout_s=1)


async def announced(runtime: Runtime) -> list[str]:
    return sorted(one.suffix for one in await runtime.discovery.models() if one.suffix is not None)


async def hosted(site: Site, runtime: Runtime) -> Worker:
    upstream = UpstreamConfig(urls=(ONE,))
    transport = site.servers[ONE].transport
    engine = await upstream.engine(ONE, DisaggregationMode.AGGREGATED, upstream.new_connector(), transport)
    await engine.discover()
    return Worker(engine, WorkerConfig(namespace="ns"), runtime=runtime, environment={}, times=TIMES)


async def test_adapters_of_a_server_are_announced_as_they_change(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = site.server(ONE, adapters=("french",))
    async with Runtime.in_process() as runtime:
        worker = await hosted(site, runtime)
        async with worker, announced_adapters(worker, worker.engine):  # type: ignore[arg-type]  # an Upstream
            await anyio.sleep(0.1)
            assert await announced(runtime) == ["french"]
            server.adapters = ("french", "german")
            await anyio.sleep(3)
            assert await announced(runtime) == ["french", "german"]
            register, is_away = runtime.discovery.register_model, True

            async def away(*arguments: object) -> object:
                if is_away:
                    raise Unavailable("the broker is away")
                return await register(*arguments)  # type: ignore[arg-type]

            monkeypatch.setattr(runtime.discovery, "register_model", away)
            server.adapters = ("german", "greek")
            await anyio.sleep(3)
            assert await announced(runtime) == ["german"]
            assert caplog.text.count("not announced yet: the broker is away") == 1
            is_away = False
            await anyio.sleep(5)
            assert await announced(runtime) == ["german", "greek"]
        assert await runtime.discovery.models() == []


async def test_an_error_of_the_block_is_raised_as_it_is(site: Site) -> None:
    site.server(ONE)
    async with Runtime.in_process() as runtime:
        worker = await hosted(site, runtime)
        with pytest.raises(LookupError, match="own"):
            async with worker, announced_adapters(worker, worker.engine):  # type: ignore[arg-type]  # an Upstream
                raise LookupError("own")
