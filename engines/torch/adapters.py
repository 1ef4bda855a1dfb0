"""Adapters: LoRA weights beside those of a model, and which of them a pass computes with. peft does both.

What is computed with different adapters is computed in different passes. Engines in several threads may share a model:
whichever computes with it has it to itself for the pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from attrs import define, field

from pipeline import InvalidArgument
from pipeline.extras import brought_by

from .library import peft


@define
class _Switch:
    """Which adapter a model computes with; None is the model alone."""

    lock: Any = field(factory=RLock)
    active: str | None = None
    loaded: dict[str, Path] = field(factory=dict)


_SWITCHES: WeakKeyDictionary[Any, _Switch] = WeakKeyDictionary()
_MAKING = RLock()


class Adapters:
    """The adapters of one model, from folders as peft writes them, by name.

    An adapter that an engine has loaded into the model before is used as it is. Raise InvalidArgument that names
    `adapters` for a folder that cannot be loaded, and for a name that stands for another folder; ModuleNotFoundError
    without the extra.
    """

    def __init__(self, model: Any, folders: Mapping[str, Path]) -> None:
        self._model = model
        with _MAKING:
            self._switch = _SWITCHES.setdefault(model, _Switch())
        if folders:
            with brought_by("lora", by="an adapter"):
                peft()
        for name, folder in folders.items():
            with self._switch.lock:
                self._load(name, folder)

    @property
    def names(self) -> Collection[str]:
        """The names that requests may have."""
        return self._switch.loaded.keys()

    @contextmanager
    def active(self, name: str | None) -> Iterator[None]:
        """Compute with this adapter inside the block, or with the model alone."""
        switch = self._switch
        if not switch.loaded:
            yield
            return
        with switch.lock:
            if switch.active != name:
                self._turn(name)
            yield

    def _load(self, name: str, folder: Path) -> None:
        switch = self._switch
        if name in switch.loaded:
            if switch.loaded[name] != folder:
                raise InvalidArgument(f"{name!r} is {switch.loaded[name]} already", field="adapters")
            return
        if not folder.is_dir():
            raise InvalidArgument(f"{folder} is no folder of an adapter", field="adapters")
        try:
            self._model.load_adapter(str(folder), adapter_name=name)
        except Exception as error:
            text = f"{folder} cannot be loaded: {type(error).__name__}: {error}"
            raise InvalidArgument(text, field="adapters") from error
        switch.loaded[name] = folder
        self._turn(None)

    def _turn(self, name: str | None) -> None:
        if name is None:
            self._model.disable_adapters()
        else:
            self._model.enable_adapters()
            self._model.set_adapter(name)
        self._switch.active = name
