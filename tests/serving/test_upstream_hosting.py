"""Servers as workers of a runtime: front ends elsewhere serve their models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import evolve

from engines import ShutdownTimes, Worker
from pipeline import InvalidArgument, Unavailable
from pipeline.network import Runtime
from pipeline.network.discovery import Lease
from serving.deployment import GraphConfig, HostOptions, UpstreamConfig, announced_graph, upstream_workers
from serving.http import served
from tests.engines.upstream.sglang_worlds import FakeSglang
from tests.engines.upstream.vllm_worlds import Tokenizing
from tests.serving.upstream_worlds import RETRY, Site, generated, request, tokens

A, B = "http://a:1", "http://b:1"


@asynccontextmanager
async def deployment(
    site: Site, folder: Path, cache: Path, beside: list[str] | None = None, **fields: Any
) -> AsyncIterator[tuple[Any, Runtime]]:
    """The site's servers as workers, and a front end; `beside` notes each worker that is in service."""
    transports = {url: server.transport for url, server in site.servers.items()}
    times = ShutdownTimes(grace_s=2.0, timeout_s=10.0)
    hosting = HostOptions({"XDG_CACHE_HOME": str(cache)}, transports=transports, times=times)
    settings: dict[str, Any] = {"model_path": folder, "upstream": UpstreamConfig(urls=tuple(site.servers))} | fields
    config = GraphConfig(**settings)
    notes = [] if beside is None else beside

    @asynccontextmanager
    async def noted(worker: Worker) -> AsyncIterator[None]:
        notes.append(f"+{worker.endpoint.path}")
        try:
            yield
        finally:
            notes.append("-")

    async with Runtime.in_process() as runtime:
        front = announced_graph(GraphConfig(is_announced=True), evolve(hosting, transports={}), runtime)
        async with upstream_workers(config, hosting, runtime, noted, retry=RETRY):
            await anyio.sleep(1)
            async with front as opened:
                yield opened, runtime


async def test_the_model_of_a_server_is_served_by_front_ends_of_the_runtime(
    site: Site, folder: Path, tmp_path: Path
) -> None:
    one, other = site.server(A), site.server(B)
    notes: list[str] = []
    async with deployment(site, folder, tmp_path, notes) as (opened, runtime):
        assert list(served(opened.graph)) == ["tiny"]
        for _ in range(4):
            assert len(await tokens(opened, request())) == 5
        assert generated(one) == generated(other) == 2
        assert len(await runtime.discovery.models()) == 2
        assert len(notes) == 2
    assert notes[2:] == ["-", "-"]


async def test_adapters_of_servers_are_models_of_the_front_ends_elsewhere(
    site: Site, folder: Path, tmp_path: Path
) -> None:
    plain, other = site.server(A), site.server(B, adapters=("french",))
    async with deployment(site, folder, tmp_path) as (opened, _):
        assert sorted(served(opened.graph)) == ["french", "tiny"]
        for _ in range(3):
            assert len(await tokens(opened, request(model="french"))) == 5
        assert (generated(plain), generated(other)) == (0, 3)
        plain.adapters, other.adapters = ("french", "german"), ()
        await anyio.sleep(3)
        assert sorted(served(opened.graph)) == ["french", "german", "tiny"]
        assert len(await tokens(opened, request(model="french"))) == 5
        assert generated(plain) == 1


async def test_a_server_that_is_down_is_a_worker_once_it_is_back(site: Site, folder: Path, tmp_path: Path) -> None:
    one = site.server(A)
    one.kill()
    async with deployment(site, folder, tmp_path) as (opened, runtime):
        assert await runtime.discovery.models() == []
        one.restart()
        await anyio.sleep(10)
        assert len(await tokens(opened, request())) == 5


async def test_the_end_lets_other_processes_see_it_before_requests_are_refused(
    site: Site, folder: Path, tmp_path: Path
) -> None:
    site.server(A)
    async with deployment(site, folder, tmp_path):
        begun_s = anyio.current_time()
    assert anyio.current_time() - begun_s >= 2


async def test_requests_end_in_order_also_while_discovery_is_away(
    site: Site, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(_: object) -> None:
        raise Unavailable("the broker is away")

    site.server(A)
    hosting = HostOptions(
        {"XDG_CACHE_HOME": str(tmp_path)},
        transports={A: site.servers[A].transport},
        times=ShutdownTimes(grace_s=2.0, timeout_s=10.0),
    )
    config = GraphConfig(model_path=folder, upstream=UpstreamConfig(urls=(A,)))
    async with Runtime.in_process() as runtime:
        async with upstream_workers(config, hosting, runtime, lambda _: nullcontext(), retry=RETRY):
            await anyio.sleep(1)
            monkeypatch.setattr(Lease, "release", away)
            begun_s = anyio.current_time()
        assert anyio.current_time() - begun_s >= 2
    assert "could not be unregistered, its lease runs out: the broker is away" in caplog.text


async def test_a_model_without_a_tokenizer_here_is_not_served(
    site: Site, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site.server(A)
    async with deployment(site, folder, tmp_path, model_path=None) as (_, runtime):
        assert await runtime.discovery.models() == []
    assert "the tokenizer of 'tiny' is not on this machine" in caplog.text
    assert "--model-path FOLDER, or --upstream-model-path tiny=FOLDER" in caplog.text
    (level,) = {each.levelname for each in caplog.records if "tokenizer" in each.message}
    assert level == "ERROR"


async def test_a_server_of_another_kind_gives_no_texts_to_workers(
    site: Site, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site.add(A, Tokenizing, root="org/tiny")
    site.add(B, FakeSglang)
    async with deployment(site, folder, tmp_path, model_path=None) as (opened, runtime):
        await anyio.sleep(5)  # B was tried once the model was known from A
        (card,) = [one.card for one in await runtime.discovery.models()]
        assert card.tokenizes
        assert len(await tokens(opened, request())) == 5
    assert f"{B} is left out: InvalidArgument (model_path): the tokenizer of 'tiny'" in caplog.text


async def test_a_folder_that_is_not_there_is_an_error_at_once(site: Site, folder: Path, tmp_path: Path) -> None:
    site.server(A)
    with pytest.raises(InvalidArgument, match="does not exist") as refused:
        async with deployment(site, folder, tmp_path, model_path=tmp_path / "none"):
            pass
    assert refused.value.field == "model_path"
