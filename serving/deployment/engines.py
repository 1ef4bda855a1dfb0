"""The engines a program can host: by name, or as `module:factory` of another package.

--engine mocker --engine-arg speedup_ratio=100
--engine my_package.engine:MyEngine --engine-arg device=cpu

Arguments given as text, turned into what a function or a record wants by its annotations.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
import types
import typing
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs
from attrs import define, evolve, field, frozen

from engines import DisaggregationMode, EchoEngine, LLMEngine
from engines.mocker import (
    MODEL,
    Horizon,
    MockEngine,
    MockEngineArgs,
    RecordedOutputs,
    TransferExchange,
    transfer_order,
)
from engines.torch import ReportProgress, no_report
from pipeline import InvalidArgument, PenstockError, to_error
from pipeline.foreign import raise_if_ours
from pipeline.settings import expected
from pipeline.wire import from_json

from .torch_workers import SharedModel, TorchArgs, shared_model, torch_args, torch_engine


def converted(make: Callable[..., Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the texts as arguments of `make`. Raise InvalidArgument that names the argument.

    A choice among texts is left to `make`, which knows what it accepts; a record is given as JSON. What has no
    annotation is a text.
    """
    if not texts:
        return {}
    return {name: _converted(text, hint_of(make, name), name) for name, text in texts.items()}


def hint_of(make: Callable[..., Any], name: str) -> Any:
    """Return the type of an argument of `make`. Raise InvalidArgument if there is none of that name."""
    parameters = inspect.signature(make).parameters
    takes_any = next((name for name, one in parameters.items() if one.kind is inspect.Parameter.VAR_KEYWORD), None)
    named = [name for name, one in parameters.items() if one.kind in _BY_NAME]
    declared = name if name in named else takes_any
    if declared is None:
        raise InvalidArgument(f"no such argument; there are: {', '.join(named) or 'none'}", field=name)
    return _hint(make, declared, name)


def _hint(make: Callable[..., Any], parameter: str, name: str) -> Any:
    """Return the type of a parameter. The others are not evaluated: theirs may exist for type checkers only."""
    function: Any = make
    names: dict[str, Any] = {}
    if isinstance(make, type):
        function = make.__init__  # type: ignore[misc]
        # Of a record the annotations are those of its fields, its parents' too, in whose modules the names are.
        names = {k: v for each in reversed(make.__mro__) for k, v in vars(sys.modules[each.__module__]).items()}
    elif not inspect.isroutine(make):
        function = make.__call__  # type: ignore[operator]

    def alone() -> None: ...

    alone.__annotations__ = {parameter: getattr(function, "__annotations__", {}).get(parameter, str)}
    try:
        return typing.get_type_hints(alone, names | getattr(function, "__globals__", {}))[parameter]
    except Exception as error:
        raise InvalidArgument(f"its type is unknown: {error}", field=name) from error


def _converted(text: str, hint: Any, name: str) -> Any:
    is_union = isinstance(hint, types.UnionType) or get_origin(hint) is typing.Union
    parts: tuple[Any, ...] = get_args(hint) if is_union else (hint,)
    kinds = [str if get_origin(part) is Literal else part for part in parts]
    # The narrowest first: any text is a text, and `none` is not a number.
    for kind in sorted(kinds, key=lambda kind: kind is str):
        if attrs.has(kind):
            if text.lstrip().startswith("{"):
                try:
                    return from_json(text, kind)
                except InvalidArgument as error:
                    raise InvalidArgument(str(error), field=name) from None
        elif kind in _READERS:
            try:
                return _READERS[kind](text)
            except (ValueError, KeyError):
                continue
    raise InvalidArgument(f"must be {expected(kinds)}, got {text!r}", field=name)


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_READERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    str: str,
    Path: Path,
    type(None): lambda text: {"none": None}[text.lower()],
}


@define
class Deployment:
    """What the engines of one deployment have in common.

    The first engine that is made adds the exchange, or the shared model.
    """

    token_ids: range | None = None
    """Token ids of synthetic answers; None: the engine decides."""
    model_name: str | None = None
    mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    exchange: TransferExchange | None = None
    """Where engines transfer blocks."""
    recorded: RecordedOutputs | None = None
    """Known answers."""
    horizon: Horizon | None = None
    """How far mock engines may run ahead; None: not at all."""
    has_event_reader: bool = True
    """Whether anything may read the KV events of mock engines."""
    has_load_reader: bool = True
    """Whether anything may read their loads and metrics."""
    has_rate_reader: bool = True
    """Whether anything may read what their passes take."""
    model_path: Path | None = None
    """Folder or file of the model; None: there is none."""
    lora: Mapping[str, Path] = field(factory=dict)
    """Folders of LoRA adapters by name."""
    report_loading: ReportProgress = no_report
    """Called with the progress of each model that an engine loads."""
    shared_model: SharedModel | None = None
    """Weights that torch engines share."""
    made: int = 0
    """Number of engines so far; each one listens on ports of its own."""


@frozen
class EngineChoice:
    """An engine, the callable whose parameters are its arguments, and how it is made from them."""

    arguments: Callable[..., Any]
    make: Callable[[dict[str, Any], Deployment], LLMEngine | Awaitable[LLMEngine]]
    is_ours: bool = True

    async def build(self, texts: Mapping[str, str], deployment: Deployment) -> LLMEngine:
        """Return a new engine, not started. Raise InvalidArgument, for a wrong argument below `engine_args`.

        What else a foreign factory raises comes as an error of the tree. An async one is awaited: its cancellation is
        that of the caller.
        """
        with _placed():
            made = self.make(converted(self.arguments, texts), deployment)
            return made if isinstance(made, LLMEngine) else await made

    def check(self, texts: Mapping[str, str], deployment: Deployment) -> None:
        """Raise what `build` would. A foreign engine is not made for that: it may hold a device that others need."""
        with _placed():
            arguments = converted(self.arguments, texts)
            if self.is_ours:
                self.make(arguments, deployment)


@contextmanager
def _placed() -> Iterator[None]:
    try:
        yield
    except InvalidArgument as error:
        place = f"engine_args.{error.field}" if error.field else "engine"
        raise InvalidArgument(str(error), field=place) from error.__cause__


@contextmanager
def engine_args_named(names: Collection[str]) -> Iterator[None]:
    """Name the engine's argument in errors of the block that an engine raised for one of them when it started."""
    try:
        yield
    except InvalidArgument as error:
        if error.field.partition(".")[0] not in names:
            raise
        raise InvalidArgument(str(error), field=f"engine_args.{error.field}") from error.__cause__


def _mocker(arguments: dict[str, Any], deployment: Deployment) -> LLMEngine:
    if deployment.mode is DisaggregationMode.ENCODE:
        raise InvalidArgument("a mock engine cannot be an encode worker")
    wanted: dict[str, Any] = {"worker_type": deployment.mode.value}
    args = MockEngineArgs(**wanted | arguments)
    if args.worker_type != deployment.mode.value:
        raise InvalidArgument(f"must be {deployment.mode}, the mode of its worker", field="worker_type")
    if deployment.exchange is None:
        order, session_s = transfer_order(args.engine_type), args.handoff_session_timeout_ms / 1000
        deployment.exchange = TransferExchange(order, session_timeout_s=session_s)
    args = _with_ports_of(args, deployment.made)
    deployment.made += 1
    name = MODEL if deployment.model_name is None else deployment.model_name
    return MockEngine(
        args,
        exchange=deployment.exchange,
        token_ids=deployment.token_ids,
        recorded=deployment.recorded,
        horizon=deployment.horizon,
        has_event_reader=deployment.has_event_reader,
        has_load_reader=deployment.has_load_reader,
        has_rate_reader=deployment.has_rate_reader,
        model=name,
        clock=time.time,
    )


def _with_ports_of(args: MockEngineArgs, worker: int) -> MockEngineArgs:
    """Return the arguments with the ports of this worker: behind those of the ranks of the workers before."""
    offset = worker * args.dp_size
    names = ("bootstrap_port", "zmq_kv_events_port", "zmq_replay_port")
    return evolve(args, **{name: port + offset for name in names if (port := getattr(args, name)) is not None})


def _torch(arguments: dict[str, Any], deployment: Deployment) -> LLMEngine:
    args = torch_args(arguments, deployment.mode)
    if deployment.shared_model is None:
        deployment.shared_model = shared_model(deployment.model_path, args)
    return torch_engine(args, deployment.shared_model, deployment.report_loading, deployment.lora)


ENGINES: Mapping[str, EngineChoice] = {
    "echo": EngineChoice(EchoEngine, lambda arguments, _: EchoEngine(**arguments)),
    "mocker": EngineChoice(MockEngineArgs, _mocker),
    "torch": EngineChoice(TorchArgs, _torch),
}
"""Engines by the name a config gives them."""


def find_engine(name: str) -> EngineChoice:
    """Return the engine of that name, or the factory at `module:factory`, which may lie in the current folder.

    Raise InvalidArgument if it is neither.
    """
    if name in ENGINES:
        return ENGINES[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise InvalidArgument(f"must be one of {', '.join(ENGINES)}, or module:factory, got {name!r}", field="engine")
    factory = _imported(module, attribute)
    return EngineChoice(factory, lambda arguments, _: _foreign(factory, arguments, name), is_ours=False)


def _imported(module: str, attribute: str) -> Callable[..., Any]:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(str(error), field="engine") from error
    except BaseException as error:  # of the module's own code
        raise_if_ours(error)
        raise InvalidArgument(f"{module}: {type(error).__name__}: {error}", field="engine") from error
    if not callable(found):
        raise InvalidArgument(f"{module}:{attribute} cannot be called", field="engine")
    factory: Callable[..., Any] = found
    return factory


async def _foreign(factory: Callable[..., Any], arguments: dict[str, Any], name: str) -> LLMEngine:
    try:
        made = factory(**arguments)
        if isawaitable(made):
            made = await made
    except PenstockError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name}: {type(error).__name__}: {error}") from error
    except BaseException as error:
        raise_if_ours(error)
        raise to_error(error) from error
    if not isinstance(made, LLMEngine):
        raise InvalidArgument(f"{name} makes a {type(made).__name__}, which is no LLMEngine")
    return made
