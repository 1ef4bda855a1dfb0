"""GraphConfig: everything a standard graph is built from, checked in one place."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from attrs import field, frozen

from engines import EchoEngine
from operators import Model
from pipeline import AsyncEngine, InvalidArgument

RouterName = Literal["round-robin", "random", "direct"]

ENGINES: Mapping[str, Callable[..., AsyncEngine[Any, Any]]] = {"echo": EchoEngine}
"""Engines by the name a config gives them."""


@frozen
class GraphConfig:
    """What to serve and with what. Raises InvalidArgument, naming the field, for what cannot be served.

    `model_path` is a local model folder; without one the built-in byte-level model is served. `engine_args` are texts
    by name, turned into what the engine's own arguments want. `workers` is the number of engine instances. `seed`
    makes random routing repeatable. `ignore_unsupported` lets fields of requests pass that have no meaning here.
    """

    model_path: Path | None = None
    model_name: str | None = None
    engine: str = "echo"
    engine_args: Mapping[str, str] = field(factory=dict)
    workers: int = 1
    router: RouterName = "round-robin"
    seed: int | None = None
    ignore_unsupported: bool = False

    def __attrs_post_init__(self) -> None:
        if self.model_name is not None and not self.model_name.strip():
            raise InvalidArgument("must not be empty", field="model_name")
        if self.workers < 1:
            raise InvalidArgument(f"must be at least 1, got {self.workers}", field="workers")
        _require_one_of(self.router, get_args(RouterName), "router")
        _require_one_of(self.engine, list(ENGINES), "engine")
        self.make_engine()

    def make_engine(self) -> AsyncEngine[Any, Any]:
        """A new engine instance. Raises InvalidArgument, naming the argument."""
        make = ENGINES[self.engine]
        return make(**converted(make, self.engine_args))

    def load_model(self) -> Model:
        """The model as text and token stages know it. Raises InvalidArgument for a folder that is not one."""
        if self.model_path is None:
            return Model.byte_level() if self.model_name is None else Model.byte_level(self.model_name)
        return Model.from_folder(self.model_path, self.model_name)


def _require_one_of(value: str, known: typing.Sequence[str], name: str) -> None:
    if value not in known:
        raise InvalidArgument(f"must be one of {', '.join(known)}, got {value!r}", field=name)


def converted(make: Callable[..., Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """The texts as the arguments of `make`, by its annotations. Raises InvalidArgument, naming the argument."""
    parameters = inspect.signature(make).parameters
    hints = typing.get_type_hints(getattr(make, "__init__") if isinstance(make, type) else make)  # noqa: B009
    arguments = {}
    for name, text in texts.items():
        place = f"engine_args.{name}"
        if name not in parameters:
            raise InvalidArgument(f"no such argument; there are: {', '.join(parameters) or 'none'}", field=place)
        arguments[name] = _converted(text, hints.get(name, str), place)
    return arguments


def _converted(text: str, hint: Any, place: str) -> Any:
    kinds = get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    for kind in kinds:
        if kind in _READERS:
            try:
                return _READERS[kind](text)
            except (ValueError, KeyError):
                continue
    names = " or ".join(_NAMES.get(kind, "something not settable as text") for kind in kinds)
    raise InvalidArgument(f"must be {names}, got {text!r}", field=place)


_READERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    str: str,
    Path: Path,
    type(None): lambda text: {"none": None}[text.lower()],
}
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "none"}
