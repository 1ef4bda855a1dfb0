"""Objects: what is put is got whole, by its content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import Unavailable
from pipeline.errors import InvalidMessage
from pipeline.network.files import FileObjects
from pipeline.network.objects import InProcessObjects, ObjectName, Objects, check_content, name_of

CONTENT = b"a tokenizer" * 1000

KINDS: dict[str, Callable[[Path], Objects]] = {
    "memory": lambda _: InProcessObjects(),
    "file": lambda folder: FileObjects(folder / "shared"),
}


@pytest.fixture(params=KINDS)
async def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    made = KINDS[request.param](tmp_path_factory.mktemp("objects"))
    await made.open()
    return made


async def test_the_same_content_has_one_name_and_comes_back_whole(objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(CONTENT)
    (tmp_path / "two").write_bytes(CONTENT)
    name = await objects.put(tmp_path / "one")
    assert name == ObjectName(hashlib.sha256(CONTENT).hexdigest(), len(CONTENT)) == await objects.put(tmp_path / "two")
    await objects.get(name, tmp_path / "three")
    assert (tmp_path / "three").read_bytes() == CONTENT
    assert sorted(os.listdir(tmp_path)) == ["one", "three", "two"]


async def test_an_object_that_was_never_put_leaves_no_file(objects: Objects, tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await objects.get(ObjectName("0" * 64, 1), tmp_path / "target")
    assert not os.listdir(tmp_path)


async def test_a_file_of_many_parts_and_an_empty_one_come_back_whole(objects: Objects, tmp_path: Path) -> None:
    for content in (b"", bytes(range(256)) * 20_000):
        (tmp_path / "one").write_bytes(content)
        await objects.get(await objects.put(tmp_path / "one"), tmp_path / "two")
        assert (tmp_path / "two").read_bytes() == content


async def test_a_target_that_exists_is_replaced(objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(CONTENT)
    (tmp_path / "two").write_bytes(b"old")
    await objects.get(await objects.put(tmp_path / "one"), tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == CONTENT


async def test_a_file_that_cannot_be_read_or_written_is_the_callers_error(objects: Objects, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await objects.put(tmp_path / "missing")
    (tmp_path / "one").write_bytes(CONTENT)
    name = await objects.put(tmp_path / "one")
    with pytest.raises(FileNotFoundError):
        await objects.get(name, tmp_path / "missing" / "target")
    assert os.listdir(tmp_path) == ["one"]


async def test_another_content_than_the_name_states_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(CONTENT)
    name = await name_of(tmp_path / "one")
    await check_content(name, tmp_path / "one")
    (tmp_path / "one").write_bytes(CONTENT[:-1])
    with pytest.raises(InvalidMessage, match="10999 bytes"):
        await check_content(name, tmp_path / "one")
