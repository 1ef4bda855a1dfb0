"""Files in an object store of NATS: the contract of all objects, and what a server adds."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from nats.js.errors import NotFoundError

from pipeline import Unavailable
from pipeline.errors import InvalidMessage
from pipeline.network.nats import NatsObjects
from pipeline.network.objects import ObjectName, name_of
from tests.pipeline.network.nats.worlds import QUICK, NatsWorld, own_server
from tests.pipeline.network.test_objects import (  # noqa: F401  # run here, with the fixture below
    CONTENT,
    test_a_file_of_many_parts_and_an_empty_one_come_back_whole,
    test_a_file_that_cannot_be_read_or_written_is_the_callers_error,
    test_a_target_that_exists_is_replaced,
    test_an_object_that_was_never_put_leaves_no_file,
    test_the_same_content_has_one_name_and_comes_back_whole,
)
from tests.pipeline.network.worlds import eventually


@pytest.fixture
async def objects(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsObjects]:
    async with NatsWorld(server_url, tmp_path_factory.mktemp("objects")).objects() as opened:
        yield opened


async def messages(objects: NatsObjects) -> int:
    """Return how many messages the bucket holds."""
    session = objects._connection.session_now()
    try:
        return (await session.streams._api.stream_info(objects._stream)).state.messages
    except NotFoundError:
        return 0


async def test_one_process_puts_what_another_gets_and_a_second_put_sends_nothing(
    world: NatsWorld, tmp_path: Path
) -> None:
    (tmp_path / "one").write_bytes(bytes(range(256)) * 4000)
    async with world.objects() as first, world.objects() as second:
        name = await first.put(tmp_path / "one")
        stored = await messages(first)
        assert await second.put(tmp_path / "one") == name
        assert await messages(first) == stored == 1 + 8
        await second.get(name, tmp_path / "two")
        assert await name_of(tmp_path / "two") == name


async def test_processes_that_put_a_file_at_once_do_not_disturb_each_other(world: NatsWorld, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(os.urandom(500_000))
    async with world.objects() as first, world.objects() as second:
        async with anyio.create_task_group() as tasks:
            for objects in (first, second, first, second):
                tasks.start_soon(objects.put, tmp_path / "one")
        assert await messages(first) == 1 + 4
        await first.get(await name_of(tmp_path / "one"), tmp_path / "two")
        assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()


async def record_of(objects: NatsObjects, name: ObjectName, data: bytes) -> None:
    """Put that in the place of the object's record."""
    session = objects._connection.session_now()
    await session.streams.store(objects._record_subject(name), data, {})


async def damage(objects: NatsObjects, name: ObjectName, how: str) -> None:
    """Make of the stored object what it should not be."""
    record, _ = await objects._record(name)
    assert record is not None
    session, subject = objects._connection.session_now(), objects._chunks_subject(record.nuid)
    chunk = await session.streams.last(objects._stream, subject)
    assert chunk is not None
    await session.streams.purge(objects._stream, subject)
    content = {"changed": b"A" + chunk.data[1:], "short": chunk.data[:-1], "long": chunk.data + b"more"}.get(how)
    if content is not None:
        await session.streams.store(subject, content, {})


@pytest.mark.parametrize("how", ["changed", "short", "long", "removed"])
async def test_a_damaged_object_is_refused_and_leaves_no_file(world: NatsWorld, tmp_path: Path, how: str) -> None:
    (tmp_path / "one").write_bytes(CONTENT)
    async with world.objects() as objects:
        name = await objects.put(tmp_path / "one")
        await damage(objects, name, how)
        with pytest.raises(InvalidMessage):
            await objects.get(name, tmp_path / "two")
        assert os.listdir(tmp_path) == ["one"]


async def test_an_object_whose_content_was_removed_is_put_again(world: NatsWorld, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(CONTENT)
    async with world.objects() as objects:
        name = await objects.put(tmp_path / "one")
        await damage(objects, name, "removed")
        assert await objects.put(tmp_path / "one") == name
        await objects.get(name, tmp_path / "two")


@pytest.mark.parametrize(
    "record", [b"", b"{}", b"garbage", b'{"nuid": ">", "name": "", "bucket": ""}', b"[1]", b"\xff"]
)
async def test_a_record_that_is_none_counts_as_no_object(world: NatsWorld, tmp_path: Path, record: bytes) -> None:
    (tmp_path / "one").write_bytes(CONTENT)
    async with world.objects() as objects:
        name = await name_of(tmp_path / "one")
        with pytest.raises(Unavailable):
            await objects.get(name, tmp_path / "two")
        await record_of(objects, name, record)
        with pytest.raises(Unavailable):
            await objects.get(name, tmp_path / "two")
        await objects.put(tmp_path / "one")
        await objects.get(name, tmp_path / "two")


async def test_a_file_that_changes_while_it_is_put_is_no_object(
    world: NatsWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").write_bytes(CONTENT)

    async def name_before(path: Path) -> ObjectName:
        name = await name_of(path)
        await anyio.Path(path).write_bytes(CONTENT[::-1])
        return name

    monkeypatch.setattr("pipeline.network.nats.object_bucket.name_of", name_before)
    async with world.objects() as objects:
        with pytest.raises(Unavailable, match="has changed"):
            await objects.put(tmp_path / "one")
        assert await messages(objects) == 0


@pytest.mark.parametrize("way", ["up", "down"])
async def test_an_upload_or_a_download_that_is_cut_off_leaves_nothing(
    world: NatsWorld, tmp_path: Path, way: str
) -> None:
    outcomes: list[str] = []
    (tmp_path / "one").write_bytes(os.urandom(3_000_000))
    async with world.objects() as objects:
        name = await (name_of if way == "up" else objects.put)(tmp_path / "one")

        async def transfer() -> None:
            with suppress(Unavailable):  # of the call that was under way, if there was one
                await (objects.put(tmp_path / "one") if way == "up" else objects.get(name, tmp_path / "two"))
                outcomes.append("done")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(transfer)
            await eventually(lambda: len(os.listdir(tmp_path)) == 2) if way == "down" else await begun(objects)
            objects._connection.session_now().lose("cut")
        assert sorted(os.listdir(tmp_path)) == (["one", "two"] if outcomes and way == "down" else ["one"])
        await eventually(lambda: objects._connection.is_connected)
        assert await objects.put(tmp_path / "one") == name
        assert await messages(objects) == 1 + 23
        await objects.get(name, tmp_path / "two")


async def begun(objects: NatsObjects) -> None:
    """Return once some of an object is stored."""
    while await messages(objects) < 2:
        await anyio.lowlevel.checkpoint()


async def test_a_cancelled_upload_or_download_leaves_nothing(world: NatsWorld, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(os.urandom(3_000_000))
    async with world.objects() as objects:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(objects.put, tmp_path / "one")
            await begun(objects)
            tasks.cancel_scope.cancel()
        assert await messages(objects) == 0
        name = await objects.put(tmp_path / "one")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(objects.get, name, tmp_path / "two")
            while len(os.listdir(tmp_path)) < 2:  # looked at in each turn of the loop: it takes many
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert os.listdir(tmp_path) == ["one"]


async def test_what_an_empty_server_has_lost_is_put_again_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.network.nats.object_bucket._RESTORE_SPREAD_S", 0.1)
    for name in ("one", "changed", "removed"):
        (tmp_path / name).write_bytes(CONTENT + name.encode())
    async with own_server(tmp_path / "s") as server:
        world = NatsWorld(server.url, tmp_path)
        async with world.objects() as first, world.objects() as second:
            names = [await first.put(tmp_path / name) for name in ("one", "changed", "removed")]
            await second.put(tmp_path / "one")
            (tmp_path / "changed").write_bytes(CONTENT)
            (tmp_path / "removed").unlink()
            await server.kill()
            shutil.rmtree(server.folder / "jetstream")
            await server.start()
            await eventually(lambda: first._connection.is_connected and len(first._own) == 1)
            await eventually(lambda: second._connection.is_connected)
            await second.get(names[0], tmp_path / "two")
            for lost in names[1:]:
                with pytest.raises(Unavailable):
                    await second.get(lost, tmp_path / "three")
            assert await messages(second) == 2


async def test_without_a_server_calls_end_in_time(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(CONTENT)
    async with own_server(tmp_path / "s") as server, NatsWorld(server.url, tmp_path).objects() as objects:
        name = await objects.put(tmp_path / "one")
        await server.kill()
        with anyio.fail_after(QUICK.call_timeout_s + 2.5), pytest.raises(Unavailable):
            await objects.get(name, tmp_path / "two")
        await server.start()
        await eventually(lambda: objects._connection.is_connected)
        await objects.get(name, tmp_path / "two")
