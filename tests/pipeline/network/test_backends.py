"""Runtimes by the URL of their deployment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline import CannotConnect, Context, InvalidArgument
from pipeline.network import Runtime
from pipeline.network.tcp import TcpOptions
from tests.pipeline.network.worlds import WHERE, engine_of


@pytest.mark.parametrize("url", ["", "file:", "file://", "http://there", "nats", "redis://user:secret@host"])
def test_what_is_no_runtime_is_refused_without_its_text(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Runtime.at(url)
    assert refused.value.field == "url"
    assert "secret" not in str(refused.value)


async def test_memory_is_a_deployment_of_its_own() -> None:
    async with Runtime.at("memory") as one, Runtime.at("memory") as other:
        await one.serve(WHERE, engine_of("a"))
        assert len(await one.discovery.instances()) == 1
        assert await other.discovery.instances() == []


@pytest.mark.parametrize("form", ["file:{}", "file://{}"])
async def test_processes_of_a_folder_reach_each_other(form: str, tmp_path: Path) -> None:
    url, tcp = form.format(tmp_path / "site"), TcpOptions(token="shared")
    async with Runtime.at(url, tcp=tcp) as worker, Runtime.at(url, tcp=tcp) as front_end:
        await worker.serve(WHERE, engine_of("a", "b"))
        workers = front_end.workers(WHERE)
        (instance_id,) = await workers.wait_for_instances()
        stream = await workers.engine(instance_id).generate(Context("request"))
        assert [item async for item in stream] == ["a", "b"]
        workers.close()


async def test_a_process_that_only_looks_makes_no_folder(tmp_path: Path) -> None:
    url, typo = f"file:{tmp_path / 'site'}", tmp_path / "sight"
    with pytest.raises(CannotConnect, match=f"^there is no folder {typo}$"):
        async with Runtime.at(f"file:{typo}", may_make=False):
            pass
    assert os.listdir(tmp_path) == []
    typo.mkdir()
    with pytest.raises(CannotConnect, match=f"^no deployment is in the folder {typo}$"):
        async with Runtime.at(f"file:{typo}", may_make=False):
            pass
    assert os.listdir(typo) == []
    async with Runtime.at(url) as worker, Runtime.at(url, may_make=False) as reader:
        await worker.serve(WHERE, engine_of("a"))
        assert len(await reader.discovery.instances()) == 1
