"""Models from the files of cards: what is fetched, checked, cached and refused."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import evolve

from engines import EngineConfig, WorkerConfig
from engines.worker.registration import card_of, with_objects
from operators import Model
from operators.text import WHOLE_CHAT
from pipeline import InvalidArgument, Unavailable
from pipeline.errors import CodecError
from pipeline.network import ObjectName
from pipeline.network.objects import InProcessObjects
from pipeline.protocols.card import ByteLevel, ModelDeploymentCard, ModelRuntimeConfig, TokenizerFile
from serving.deployment.card_files import CardFiles, cache_folder, objects_of


class CountedObjects(InProcessObjects):
    """Objects that record what is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[ObjectName] = []

    async def get(self, name: ObjectName, target: Path) -> None:
        self.fetched.append(name)
        await super().get(name, target)


@pytest.fixture
def objects() -> CountedObjects:
    return CountedObjects()


@pytest.fixture
async def files(objects: CountedObjects, tmp_path: Path) -> AsyncIterator[CardFiles]:
    async with CardFiles(objects, {"XDG_CACHE_HOME": str(tmp_path)}) as opened:
        yield opened
    assert loads(tmp_path) == []


def cached(root: Path) -> list[Path]:
    return sorted(path for path in (root / "penstock/objects").iterdir() if path.is_file())


def loads(root: Path) -> list[Path]:
    return sorted((root / "penstock/objects").glob("load-*"))


async def card(folder: Path, objects: InProcessObjects, **worker: Any) -> ModelDeploymentCard:
    made = card_of(WorkerConfig(model_name=str(folder), **worker), EngineConfig(model="m", served_model_name="m"))
    return await with_objects(made, objects)


async def test_the_model_is_that_of_the_workers_folder(files: CardFiles, objects: CountedObjects, folder: Path) -> None:
    model, here = await files.model(await card(folder, objects)), Model.from_folder(folder, "m")
    assert (model.name, model.eos_token_ids, model.context_length) == ("m", here.eos_token_ids, here.context_length)
    assert model.tokenizer.encode("hello </s>") == here.tokenizer.encode("hello </s>")
    assert model.chat_template is not None
    assert here.chat_template is not None
    assert model.chat_template.source == here.chat_template.source


async def test_files_are_fetched_once(files: CardFiles, objects: CountedObjects, folder: Path, tmp_path: Path) -> None:
    made = await card(folder, objects)
    await files.model(made)
    assert len(objects.fetched) == 3
    assert [path.name for path in cached(tmp_path)] == sorted(name.sha256 for name in objects.fetched)
    await files.model(made)
    async with CardFiles(objects, {"XDG_CACHE_HOME": str(tmp_path)}) as others:
        await others.model(made)
    assert len(objects.fetched) == 3


@pytest.mark.parametrize("damage", [b"", b"{}", None])
async def test_a_damaged_file_of_the_cache_is_fetched_again(
    files: CardFiles, objects: CountedObjects, folder: Path, tmp_path: Path, damage: bytes | None
) -> None:
    made = await card(folder, objects)
    await files.model(made)
    (damaged,) = [path for path in cached(tmp_path) if path.name == objects_of(made)["tokenizer.json"].sha256]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + b"?" if damage is None else damage)
    await files.model(made)
    assert len(objects.fetched) == 4
    assert damaged.read_bytes() == whole


async def test_many_loads_at_once_do_not_disturb_each_other(
    objects: CountedObjects, folder: Path, tmp_path: Path
) -> None:
    made = await card(folder, objects)
    models: list[Model] = []

    async def load() -> None:
        async with CardFiles(objects, {"XDG_CACHE_HOME": str(tmp_path)}) as own:
            models.append(await own.model(made))

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(load)
    assert len(models) == 8
    assert len(cached(tmp_path)) == 3


async def test_the_oldest_files_make_room(objects: CountedObjects, folder: Path, tmp_path: Path) -> None:
    made = await card(folder, objects)
    largest = max(name.size_bytes for name in objects_of(made).values())
    async with CardFiles(objects, {"XDG_CACHE_HOME": str(tmp_path)}, cache_bytes_max=largest) as small:
        await small.model(made)
        assert sum(path.stat().st_size for path in cached(tmp_path)) <= largest
        await small.model(made)


async def test_a_file_that_is_used_stays_longer(objects: CountedObjects, folder: Path, tmp_path: Path) -> None:
    made = await card(folder, objects)
    async with CardFiles(objects, {"XDG_CACHE_HOME": str(tmp_path)}) as opened:
        await opened.model(made)
        for path in cached(tmp_path):
            os.utime(path, (1, 1))
        await opened.model(made)
        assert min(path.stat().st_mtime for path in cached(tmp_path)) > 1


async def test_another_program_may_make_room_at_the_same_time(
    objects: CountedObjects, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    made = await card(folder, objects)
    is_file = Path.is_file

    def is_file_then_gone(path: Path) -> bool:
        found = is_file(path)
        if path.name == "another":
            path.unlink(missing_ok=True)
        return found

    async with CardFiles(objects, {"XDG_CACHE_HOME": str(tmp_path)}, cache_bytes_max=1) as small:
        (tmp_path / "penstock/objects/another").write_text("old")
        monkeypatch.setattr(Path, "is_file", is_file_then_gone)
        await small.model(made)
    assert caplog.text == ""
    assert len(cached(tmp_path)) == 1


async def test_a_folder_that_a_dead_process_left_is_removed(
    objects: CountedObjects, folder: Path, tmp_path: Path
) -> None:
    left, young = tmp_path / "penstock/objects/load-left", tmp_path / "penstock/objects/load-young"
    for path in (left, young):
        path.mkdir(parents=True)
    day_before_s = young.stat().st_mtime - 48 * 3600
    os.utime(left, (day_before_s, day_before_s))
    async with CardFiles(objects, {"XDG_CACHE_HOME": str(tmp_path)}):
        assert loads(tmp_path) == [young]


async def test_without_a_place_for_the_cache_it_is_temporary(
    objects: CountedObjects, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "penstock").write_text("in the way")
    made = await card(folder, objects)
    for environment in ({"XDG_CACHE_HOME": str(tmp_path)}, {}):
        async with CardFiles(objects, environment) as opened:
            await opened.model(made)
            place = opened._folder
            assert place.is_dir()
        assert not place.exists()
    assert "temporary folder" in caplog.text


def test_the_cache_is_where_the_environment_has_it() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/penstock/objects")
    assert cache_folder({"HOME": "/h"}) == Path("/h/.cache/penstock/objects")
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": ""}) is None


# -- the built-in model, templates and lengths


async def test_the_built_in_model_needs_no_files(files: CardFiles, objects: CountedObjects) -> None:
    here = evolve(Model.byte_level("b", chat_template=WHOLE_CHAT), checks_token_ids=False)
    made = card_of(WorkerConfig(byte_level=here.byte_level_parts), EngineConfig(model="b", context_length=64))
    model = await files.model(made)
    assert (model.name, model.checks_token_ids, model.context_length) == ("b", False, 64)
    assert model.byte_level_parts == here.byte_level_parts
    assert objects.fetched == []


async def test_a_model_whose_workers_tokenize_needs_no_files(files: CardFiles, objects: CountedObjects) -> None:
    made = card_of(WorkerConfig(tokenizes=True), EngineConfig(model="b", context_length=64))
    model = await files.model(made)
    assert (model.name, model.checks_token_ids, model.context_length, model.chat_template) == ("b", False, 64, None)
    with pytest.raises(CodecError, match="at the server"):
        model.tokenizer.encode("text")
    assert objects.fetched == []


async def test_a_template_of_the_worker_replaces_the_models(
    files: CardFiles, objects: CountedObjects, folder: Path, tmp_path: Path
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ eos_token }}{{ messages[-1].content }}")
    model = await files.model(await card(folder, objects, custom_jinja_template=template))
    assert model.chat_template is not None
    assert model.chat_template.render([{"role": "user", "content": "x"}]) == "</s>x"
    made = card_of(
        WorkerConfig(custom_jinja_template=template, byte_level=Model.byte_level().byte_level_parts),
        EngineConfig(model="b"),
    )
    built_in = await files.model(await with_objects(made, objects))
    assert built_in.chat_template is not None
    assert built_in.chat_template.source == template.read_text()


@pytest.mark.parametrize(("length", "expected"), [(None, 8_000_000), (100, 100), (9_000_000, 8_000_000)])
async def test_the_shorter_context_length_holds(
    files: CardFiles, objects: CountedObjects, folder: Path, length: int | None, expected: int
) -> None:
    made = await card(folder, objects)
    made.runtime_config = ModelRuntimeConfig(context_length=length)
    assert (await files.model(made)).context_length == expected


# -- what is refused


async def test_a_card_without_a_tokenizer_is_refused(files: CardFiles) -> None:
    with pytest.raises(InvalidArgument, match="names no tokenizer: its worker needs the folder") as refused:
        await files.model(card_of(WorkerConfig(model_name="Org/Model"), EngineConfig(model="m")))
    assert refused.value.field == "tokenizer"


async def test_files_without_objects_are_refused(files: CardFiles, folder: Path) -> None:
    made = card_of(WorkerConfig(model_name=str(folder)), EngineConfig(model="m"))
    with pytest.raises(InvalidArgument, match="names no object"):
        await files.model(made)


async def test_files_of_unknown_size_are_refused(files: CardFiles, objects: CountedObjects, folder: Path) -> None:
    made = await card(folder, objects)
    assert made.tokenizer is not None
    unknown = evolve(made.tokenizer, file=evolve(made.tokenizer.file, size=None))
    with pytest.raises(InvalidArgument, match="names no object"):
        await files.model(evolve(made, tokenizer=unknown))


async def test_a_kind_that_cannot_be_read_is_refused(files: CardFiles, objects: CountedObjects, folder: Path) -> None:
    made = await card(folder, objects)
    assert made.tokenizer is not None
    with pytest.raises(InvalidArgument, match="cannot read the tik_token_model"):
        await files.model(evolve(made, tokenizer=TokenizerFile("tik_token_model", made.tokenizer.file)))


async def test_too_many_bytes_are_refused_before_anything_is_fetched(
    files: CardFiles, objects: CountedObjects, folder: Path
) -> None:
    made = await card(folder, objects)
    assert made.tokenizer is not None
    large = evolve(made.tokenizer, file=evolve(made.tokenizer.file, size=2**40))
    with pytest.raises(InvalidArgument, match="more than"):
        await files.model(evolve(made, tokenizer=large))
    assert objects.fetched == []


async def test_a_missing_object_leaves_nothing_behind(
    files: CardFiles, objects: CountedObjects, folder: Path, tmp_path: Path
) -> None:
    made = await card(folder, objects)
    objects._contents.clear()
    with pytest.raises(Unavailable):
        await files.model(made)
    assert (cached(tmp_path), loads(tmp_path)) == ([], [])


async def test_a_tokenizer_that_is_none_is_refused(
    files: CardFiles, objects: CountedObjects, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrong").write_text("{}")
    made = await card(folder, objects)
    name = await objects.put(tmp_path / "wrong")
    assert made.tokenizer is not None
    wrong = evolve(made.tokenizer, file=evolve(made.tokenizer.file, size=name.size_bytes, sha256=name.sha256))
    with pytest.raises(InvalidArgument, match=r"^m/tokenizer\.json") as refused:
        await files.model(evolve(made, tokenizer=wrong))
    assert "load-" not in str(refused.value), "it is logged once"


async def test_a_load_that_is_cancelled_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    class Slow(CountedObjects):
        async def get(self, name: ObjectName, target: Path) -> None:
            await anyio.sleep(60)

    objects = Slow()
    made = await card(folder, objects)
    async with CardFiles(objects, {"XDG_CACHE_HOME": str(tmp_path)}) as opened:
        with anyio.move_on_after(1):
            await opened.model(made)
    assert (cached(tmp_path), loads(tmp_path)) == ([], [])


async def test_files_that_cannot_be_written_are_the_error_of_the_build(folder: Path, tmp_path: Path) -> None:
    class Full(CountedObjects):
        async def get(self, name: ObjectName, target: Path) -> None:
            raise OSError(28, "No space left on device", str(target))

    full = Full()
    made = await card(folder, full)
    async with CardFiles(full, {"XDG_CACHE_HOME": str(tmp_path)}) as opened:
        texts = set()
        for _ in range(2):
            with pytest.raises(Unavailable, match="No space left") as refused:
                await opened.model(made)
            texts.add(str(refused.value))
        assert len(texts) == 1, "it is logged once"
    assert loads(tmp_path) == []


async def test_a_broken_template_in_the_card_is_refused(files: CardFiles) -> None:
    with pytest.raises(InvalidArgument, match="not a chat template"):
        await files.model(card_of(WorkerConfig(byte_level=ByteLevel("{% if")), EngineConfig(model="m")))
