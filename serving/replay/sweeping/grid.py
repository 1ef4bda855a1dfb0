"""The runs of a sweep: every combination of the values that vary, each with a name.

    runs = sweep_runs(
        GraphConfig(engine="mocker"),
        {"router": ["round-robin", "kv"], "workers": [4, 8], "overlap_score_credit": [0.5, 1.0]},
    )
    [run.name for run in runs]  # "round-robin 4 workers", ..., "kv 8 workers overlap_score_credit=1.0"

Six runs, not eight: round robin has no such setting, so it does not run twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from inspect import Parameter, signature
from itertools import product
from typing import Any
from urllib.parse import quote

from attrs import asdict, evolve, fields, frozen

from operators import BusyThresholds
from operators.kv import KvRouterConfig
from pipeline import InvalidArgument

from ...deployment import GraphConfig, converted, find_engine
from ..traces import SyntheticLoad

FIELD = "vary"
"""First part of the field of an error: `vary.workers`."""

_GRAPH = (
    *("router", "engine", "workers", "prefill_workers", "enforce_disagg"),
    *("migration_limit", "migration_max_seq_len_tokens", "seed"),
)
_BUSY = tuple(one.name for one in fields(BusyThresholds))
_ROUTER = tuple(one.name for one in fields(KvRouterConfig))
_DRIVE = ("speed_up", "concurrency")
"""Fields of a run outside graph and load."""
_LOAD = tuple(one.name for one in fields(SyntheticLoad))
_ENGINE = "engine_args."
_NEEDS_PREFILL = ("enforce_disagg", "conditional_disagg_")
"""Prefixes of settings that need prefill workers."""
_COUNTED = {"workers": "worker", "prefill_workers": "prefill worker"}
_SAFE = " =,.+"
"""Characters that are not quoted in the name of a file."""
_LONGEST = 160


@frozen
class SweepRun:
    """One replay of a sweep."""

    name: str
    """The values that differ in the sweep; the router if none does."""
    parameters: Mapping[str, Any]
    """The values of the names that vary."""
    config: GraphConfig
    speed_up: float = 1.0
    """Divides times between arrivals and think times."""
    concurrency: int | None = None
    """Sessions at a time; None: arrivals as recorded."""
    load: SyntheticLoad | None = None
    """Its own load; None: the trace of the sweep."""

    @property
    def file_name(self) -> str:
        """The file of its report: unique in the sweep, and the same after values are added to it."""
        values = self.parameters or {"router": self.config.router}
        text = quote(",".join(f"{name}={text_of(value)}" for name, value in values.items()), safe=_SAFE)
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}~{blake2b(text.encode(), digest_size=4).hexdigest()}"
        return f"{text}.json"

    @property
    def load_label(self) -> str:
        """The values of its load; only runs with the same label can be compared."""
        names = _DRIVE if self.load is None else (*_LOAD, *_DRIVE)
        return label_of({name: value for name, value in self.parameters.items() if name in names})

    @property
    def workers(self) -> int:
        """Of both roles: what the run costs."""
        return self.config.workers + self.config.prefill_workers


def sweep_runs(
    base: GraphConfig | Mapping[str, Any],
    vary: Mapping[str, Sequence[Any]],
    *,
    speed_up: float = 1.0,
    concurrency: int | None = None,
    load: SyntheticLoad | None = None,
) -> list[SweepRun]:
    """Return a run for each combination of values, the last name changing first.

    `base` is the common config, or its arguments, which may be invalid without the varied ones. A name in `vary` is a
    field of the config, `speed_up` or `concurrency`, a busy threshold, a setting of the router kv, a field of `load`,
    or else an argument of the engine; `engine_args.NAME` always is. Values may be texts. A setting that a run does not
    have does not multiply it.

    Raise InvalidArgument with the field `vary.NAME` or that of the config: for an unknown name, without values, for a
    value that is repeated or of the wrong type, for a setting that no run has, and for an invalid combination.
    """
    common = {"speed_up": speed_up, "concurrency": concurrency}
    arguments = asdict(base, recurse=False) if isinstance(base, GraphConfig) else dict(base)
    axes = {name: _values(name, values, arguments, load) for name, values in vary.items()}
    for name in axes:
        own = name.removeprefix(_ENGINE)
        if own != name and own in axes and _owner(own, arguments, load) is None:
            raise InvalidArgument(f"is given twice, once as {own}", field=f"{FIELD}.{name}")
    chosen = list(_combinations(axes, arguments))
    for name in axes:
        if not any(name in one for one in chosen):
            raise InvalidArgument(
                "no run has it: it is of the router kv, or of prefill workers", field=f"{FIELD}.{name}"
            )
    varied = [name for name, values in axes.items() if len(values) > 1]
    return [_run(one, varied, arguments, common, load) for one in chosen]


def _combinations(axes: Mapping[str, Sequence[Any]], arguments: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Return each combination once, without the settings that its run does not have."""
    found: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for values in product(*axes.values()):
        one = dict(zip(axes, values, strict=True))
        graph = {**arguments, **one}
        there = {name: value for name, value in one.items() if _has(graph, name)}
        found.setdefault(tuple((name, text_of(value)) for name, value in there.items()), there)
    return found.values()


def _has(graph: Mapping[str, Any], name: str) -> bool:
    if name in _ROUTER and graph.get("router") != "kv":
        return False
    return bool(graph.get("prefill_workers")) or not name.startswith(_NEEDS_PREFILL)


def _values(name: str, values: Sequence[Any], arguments: Mapping[str, Any], load: SyntheticLoad | None) -> list[Any]:
    """Return the values of one name, converted from text."""
    place = f"{FIELD}.{name}"
    if isinstance(values, str) or not values:
        raise InvalidArgument("needs values to vary over", field=place)
    make = _owner(name, arguments, load)
    read = []
    for value in values:
        if make is None:
            one = text_of(value)
        elif isinstance(value, str):
            try:
                one = converted(make, {name: value})[name]
            except InvalidArgument as error:
                raise InvalidArgument(str(error), field=place) from error
        else:
            one = value
        if one in read:
            raise InvalidArgument(f"{text_of(value)} is given twice", field=place)
        read.append(one)
    return read


def _owner(name: str, arguments: Mapping[str, Any], load: SyntheticLoad | None) -> Any:
    """Return the owner of a name; None for the engine, whose arguments are texts. Raise InvalidArgument."""
    for names, owner in ((_GRAPH, GraphConfig), (_DRIVE, SweepRun), (_BUSY, BusyThresholds), (_ROUTER, KvRouterConfig)):
        if name in names:
            return owner
    if name in _LOAD:
        if load is None:
            raise InvalidArgument("is of made up load, and there is a trace", field=f"{FIELD}.{name}")
        return SyntheticLoad
    engine = arguments.get("engine", "echo")
    if name.startswith(_ENGINE) or _takes(engine, name):
        return None
    what = f"the load, the graph, the router kv and the engine {engine} have nothing of that name"
    raise InvalidArgument(what, field=f"{FIELD}.{name}")


def _takes(engine: str, name: str) -> bool:
    parameters = signature(find_engine(engine).arguments).parameters
    return name in parameters or any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())


def _run(
    chosen: Mapping[str, Any],
    varied: Sequence[str],
    arguments: Mapping[str, Any],
    common: Mapping[str, Any],
    load: SyntheticLoad | None,
) -> SweepRun:
    """Return the run of one combination. Raise InvalidArgument that names it."""

    def of(names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name, value in chosen.items() if name in names}

    others = {*_GRAPH, *_DRIVE, *_BUSY, *_ROUTER, *_LOAD}
    engine_args = {name.removeprefix(_ENGINE): value for name, value in chosen.items() if name not in others}
    try:
        config = GraphConfig(
            **{
                **arguments,
                **of(_GRAPH),
                "engine_args": {**arguments.get("engine_args", {}), **engine_args},
                "busy": evolve(arguments.get("busy", BusyThresholds()), **of(_BUSY)),
                "kv_router": evolve(arguments.get("kv_router", KvRouterConfig()), **of(_ROUTER)),
            }
        )
        made = None if load is None else evolve(load, **of(_LOAD))
    except InvalidArgument as error:
        own = (error.field or "").removeprefix(_ENGINE)
        if not chosen:
            raise
        place = f"{FIELD}.{own}" if own in chosen else error.field
        raise InvalidArgument(f"{label_of(chosen)}: {error}", field=place) from error
    name = label_of({name: value for name, value in chosen.items() if name in varied}) or config.router
    return SweepRun(name, dict(chosen), config, load=made, **{**common, **of(_DRIVE)})


def label_of(parameters: Mapping[str, Any]) -> str:
    """Return parameters as they stand in the name of a run."""
    texts = []
    for name, value in parameters.items():
        if name in _COUNTED:
            texts.append(f"{value} {_COUNTED[name]}{'' if value == 1 else 's'}")
        else:
            texts.append(str(value) if name in ("router", "engine") else f"{name}={text_of(value)}")
    return " ".join(texts)


def text_of(value: Any) -> str:
    """Return a value in the form of an option."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
