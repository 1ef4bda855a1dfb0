"""CardFiles: the model of a card that another process announces, from the files that the card names.

    card ──► names of objects ──► cache folder ─┬─► there, and as it should be ─┐
                                                └─► objects.get ────────────────┴─► folder of one load ──► Model

A file is cached under the sha256 of its content, so that all programs of a user share it and nothing in a card is ever
a path here. Each load links its files into a folder of its own and checks them there: what another program does to the
cache meanwhile changes nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
from anyio import to_thread
from attrs import evolve

from operators import Model
from pipeline import InvalidArgument, Unavailable
from pipeline.errors import CodecError
from pipeline.loop import time_held
from pipeline.network import ObjectName, Objects, name_of
from pipeline.protocols.card import ModelDeploymentCard

from .server_prompts import model_at_servers

_log = logging.getLogger(__name__)

MODEL_BYTES_MAX = 512 * 1024 * 1024
"""Most bytes of one model's files; a tokenizer has up to 40 MB."""
CACHE_BYTES_MAX = 1024 * 1024 * 1024
"""Bytes of the cache folder above which the files used longest ago are removed."""
_STALE_S = 24 * 3600.0
"""Age from which a folder of a load was left behind by a process that died."""
_LOAD = "load-"
_NAMES = {
    "hf_config_json": "config.json",
    "hf_tokenizer_json": "tokenizer.json",
    "hf_tokenizer_config_json": "tokenizer_config.json",
    "hf_chat_template": "chat_template.jinja",
    "hf_chat_template_json": "chat_template.json",
    "hf_generation_config_json": "generation_config.json",
}
"""Names of a model's files by their kinds in a card."""
_CUSTOM_TEMPLATE = "custom_chat_template.jinja"


class CardFiles:
    """Models by their cards. A context manager: its end removes the cache if that is a temporary one.

    `environment` has the user's cache folder: XDG_CACHE_HOME, else that in HOME. Where it cannot be written, the cache
    is a temporary folder.
    """

    def __init__(
        self, objects: Objects, environment: Mapping[str, str], *, cache_bytes_max: int = CACHE_BYTES_MAX
    ) -> None:
        self._objects, self._wanted = objects, cache_folder(environment)
        self._bytes_max = cache_bytes_max
        self._folder = Path()
        self._is_temporary = False

    async def __aenter__(self) -> Self:
        with time_held():
            self._folder, self._is_temporary = await to_thread.run_sync(_opened, self._wanted)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_temporary:
            with anyio.CancelScope(shield=True), time_held():
                await to_thread.run_sync(_removed, self._folder)

    async def model(self, card: ModelDeploymentCard) -> Model:
        """Return the model, with the worker's context length if that is shorter.

        Raise InvalidArgument for a card from which no model can be made, Unavailable if a file cannot be fetched, or
        cannot be written here, and InvalidMessage if it is not what the card names.
        """
        try:
            model = model_at_servers(card.display_name) if card.tokenizes else await self._of_files(card)
        except OSError as error:
            text = f"the files of {card.display_name!r} cannot be kept here: {error.strerror}"
            raise Unavailable(text, cause=error) from error
        lengths = [each for each in (model.context_length, card.effective_context_length) if each]
        return evolve(model, context_length=min(lengths, default=None))

    async def _of_files(self, card: ModelDeploymentCard) -> Model:
        files = objects_of(card)
        return await self._read(card, files) if files else _byte_level(card)

    async def _read(self, card: ModelDeploymentCard, files: Mapping[str, ObjectName]) -> Model:
        with time_held():
            folder = await to_thread.run_sync(_new_load, self._folder)
        try:
            for name, wanted in files.items():
                await self._place(wanted, folder / name)
            with time_held():
                return await to_thread.run_sync(_model_in, folder, card)
        finally:
            with anyio.CancelScope(shield=True), time_held():
                await to_thread.run_sync(_removed, folder)

    async def _place(self, name: ObjectName, target: Path) -> None:
        """Have the content in a file of the load's folder: from the cache, or else fetched and then cached."""
        cached = self._folder / name.sha256
        with time_held():
            is_cached = await to_thread.run_sync(_linked, cached, target)
        if is_cached:
            if await name_of(target) == name:
                return
            _log.warning("%s was damaged and is fetched again", cached)
            with time_held():
                await to_thread.run_sync(_forgotten, target, cached)
        await self._objects.get(name, target)
        with time_held():
            await to_thread.run_sync(_cached, target, cached, self._bytes_max)


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder for objects in the user's cache; None if the environment has none."""
    for name, below in (("XDG_CACHE_HOME", "penstock"), ("HOME", ".cache/penstock")):
        if (root := environment.get(name)) and Path(root).is_absolute():
            return Path(root) / below / "objects"
    return None


def objects_of(card: ModelDeploymentCard) -> dict[str, ObjectName]:
    """Return the objects of a card by the names that the files have in a model's folder; empty for the built-in model.

    Raise InvalidArgument for a card without a tokenizer, or with files that have no object or are too large.
    """
    if card.tokenizer is None and card.byte_level is None:
        text = f"the card of {card.display_name!r} names no tokenizer: its worker needs the folder of its model"
        raise InvalidArgument(text, field="tokenizer")
    found: dict[str, ObjectName] = {}
    for tagged in card.files:
        if tagged is None:
            continue
        file, name = tagged.file, _CUSTOM_TEMPLATE if tagged.is_custom else _NAMES.get(tagged.kind)
        if name is None:
            raise InvalidArgument(
                f"a front end cannot read the {tagged.kind} of {card.display_name!r}", field=tagged.kind
            )
        if file.sha256 is None or file.size is None:
            text = f"{name} of {card.display_name!r} is at its worker only, for the card names no object of it"
            raise InvalidArgument(text, field=tagged.kind)
        found[name] = ObjectName(file.sha256, file.size)
    if (size_bytes := sum(name.size_bytes for name in found.values())) > MODEL_BYTES_MAX:
        text = f"the files of {card.display_name!r} have {size_bytes} bytes, more than {MODEL_BYTES_MAX}"
        raise InvalidArgument(text, field="size")
    return found


def _byte_level(card: ModelDeploymentCard) -> Model:
    assert card.byte_level is not None
    try:
        model = Model.byte_level(card.display_name, chat_template=card.byte_level.chat_template)
    except CodecError as error:
        raise InvalidArgument(f"the template of {card.display_name!r}: {error}", field="byte_level") from error
    return evolve(model, checks_token_ids=card.byte_level.checks_token_ids)


def _model_in(folder: Path, card: ModelDeploymentCard) -> Model:
    custom = folder / _CUSTOM_TEMPLATE
    try:
        model = _byte_level(card) if card.tokenizer is None else Model.from_folder(folder, card.display_name)
        return model.with_chat_template(custom) if custom.is_file() else model
    except InvalidArgument as error:  # of a file, whose folder here is another one each time
        text = str(error).replace(str(folder), card.display_name)
        raise InvalidArgument(text, field=error.field) from error


# -- the cache, in threads


def _opened(wanted: Path | None) -> tuple[Path, bool]:
    """Return the cache folder, and whether it is a temporary one."""
    if wanted is not None:
        try:
            wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
            own = _new_load(wanted)
            _tidied(wanted, own.stat().st_mtime)
            _removed(own)
        except OSError as error:
            _log.warning("the files of models are kept in a temporary folder: %s", error)
        else:
            return wanted, False
    return Path(tempfile.mkdtemp(prefix="penstock-")), True


def _new_load(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=_LOAD, dir=folder))


def _tidied(folder: Path, now_s: float) -> None:
    """Remove what processes that died have left; `now_s` is the time of the folder's own file system."""
    for each in folder.glob(f"{_LOAD}*"):
        with suppress(OSError):
            if each.stat().st_mtime < now_s - _STALE_S:
                _removed(each)


def _removed(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _linked(cached: Path, target: Path) -> bool:
    """Return whether the cached file is now at the target too; its use is noted for `_pruned`."""
    try:
        os.utime(cached)
        _link(cached, target)
    except FileNotFoundError:
        return False
    return True


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def _forgotten(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _cached(placed: Path, cached: Path, bytes_max: int) -> None:
    """Put a file of a load into the cache too; without room for it there the load goes on."""
    part = placed.with_name(f"{placed.name}.part")
    try:
        _link(placed, part)
        part.replace(cached)
        part.unlink(missing_ok=True)  # replacing a link to the same file leaves both
        _pruned(cached.parent, bytes_max, cached)
    except OSError as error:
        _log.warning("%s is not cached: %s", cached, error)


def _pruned(folder: Path, bytes_max: int, newest: Path) -> None:
    """Remove the files used longest ago until the others have at most `bytes_max`; never the newest."""
    states: dict[Path, os.stat_result] = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another program makes room too
            if path.is_file():
                states[path] = path.stat()
    size_bytes = sum(state.st_size for state in states.values())
    for path in sorted(states, key=lambda path: states[path].st_mtime):
        if size_bytes <= bytes_max:
            return
        if path != newest:
            path.unlink(missing_ok=True)
            size_bytes -= states[path].st_size
