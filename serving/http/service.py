"""Service: what all requests of one app share: its models, options, availability, telemetry and limits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import Factory, field, frozen

from operators import Model, Preprocess, Switch
from pipeline import Annotated, AsyncEngine, Stage
from pipeline.protocols import BackendOutput
from pipeline.protocols.openai import ModelInfo

from ..openai import OpenAIRequest
from ..problems import Refusal
from .metrics import Telemetry
from .open_requests import Availability, OpenRequests, TimeLimits
from .options import HttpOptions

Graph = AsyncEngine[OpenAIRequest, Annotated[BackendOutput]]
"""A graph that serves a model: OpenAI requests in, detokenized items out."""


@frozen
class ServedModel:
    """A graph under the model name that clients use."""

    name: str
    graph: Graph
    """What takes the requests for it."""
    own: Graph = field(default=Factory(lambda self: self.graph, takes_self=True))
    """The part of the graph that is for this model: all of it, but for stages above a switch."""
    created: int = field(init=False, factory=lambda: int(time.time()))
    """When it was first served, in seconds since the epoch."""
    context_length_tokens: int | None = field(
        init=False, default=Factory(lambda self: _context_length(self.own), takes_self=True)
    )
    """Tokens of a prompt and its answer at most; None if unknown."""

    def info(self, options: HttpOptions) -> ModelInfo:
        """Return the model as the list of models shows it."""
        return ModelInfo(
            self.name,
            self.created,
            context_window=options.context_window_tokens or self.context_length_tokens,
            max_output_tokens=options.max_output_tokens,
        )


@frozen
class Service:
    """The shared objects of one app."""

    models: Mapping[str, ServedModel]
    """Models by name."""
    options: HttpOptions
    availability: Availability
    telemetry: Telemetry
    time_limits: TimeLimits = field(init=False, default=Factory(lambda s: TimeLimits.of(s.options), takes_self=True))
    open_requests: OpenRequests = field(
        init=False,
        default=Factory(lambda self: OpenRequests(self.options.limits, self.time_limits.period_s), takes_self=True),
    )

    def check_absent(self, name: str) -> None:
        """Raise Refusal (503) if a model that is not served is expected, or if there is no model at all yet."""
        if isinstance(self.models, SwitchedModels) and name in self.models.awaited:
            raise Refusal(503, "No worker of the model is there now")
        if not self.models:
            raise Refusal(503, "Service is not ready")

    def instances(self) -> dict[str, list[str]]:
        """Return the present instances of the graphs' worker pools by role, each once.

        The role of a side graph's workers is its label, as `prefill`; beside those the others of the graph `decode`.
        """
        found: dict[str, set[str]] = {}
        for model in self.models.values():
            for role, members in _members(model.own.parts()):
                found.setdefault(role, set()).update(members)
        return {role: sorted(members) for role, members in sorted(found.items()) if members}


class SwitchedModels(Mapping[str, ServedModel]):
    """The models of a graph that ends in a switch, as the switch has them at each moment."""

    def __init__(self, graph: Graph, switch: Switch[Any, Any]) -> None:
        self._graph, self._switch = graph, switch
        self.awaited = switch.awaited
        """The names of models that are expected."""
        self._known: dict[str, ServedModel] = {}

    def __getitem__(self, name: str) -> ServedModel:
        graphs, known = self._switch.graphs, self._known.get(name)
        own = graphs[name]
        if known is None or known.own is not own:
            self._known = {each: model for each, model in self._known.items() if graphs.get(each) is model.own}
            known = self._known[name] = ServedModel(name, own if self._graph is self._switch else self._graph, own)
        return known

    def __iter__(self) -> Iterator[str]:
        return iter(self._switch.graphs)

    def __len__(self) -> int:
        return len(self._switch.graphs)


def served(graph: Graph | Mapping[str, Graph]) -> Mapping[str, ServedModel]:
    """Return the models of one graph or several; those of a graph that ends in a Switch come and go with its graphs.

    Raise ValueError for a single graph without a model in it.
    """
    if not isinstance(graph, Mapping):
        if isinstance(switch := graph.parts()[-1], Switch):
            return SwitchedModels(graph, switch)
        if (model := _model(graph)) is None:
            raise ValueError("this graph does not say which model it serves: pass a mapping of names to graphs")
        graph = {model.name: graph}
    return {name: ServedModel(name, each) for name, each in graph.items()}


def _context_length(graph: Graph) -> int | None:
    model = _model(graph)
    return None if model is None else model.context_length


def _members(stages: Sequence[Stage]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the instances behind each stage with their role. A last stage with branches chooses among graphs."""
    *above, last = stages
    for graph in last.branches().values():
        yield from _members(graph.parts())
    sides = {label: side for stage in above for label, side in stage.branches().items()}
    own = "decode" if "prefill" in sides else "aggregated"
    for stage in stages:
        yield own, stage.members()
    for label, side in sides.items():
        for part in side.parts():
            yield label, part.members()


def _model(graph: Stage) -> Model | None:
    """Return the model that a stage of the graph knows, or of the first graph that its last stage chooses from."""
    *_, last = parts = graph.parts()
    if (own := next((stage.model for stage in parts if isinstance(stage, Preprocess)), None)) is not None:
        return own
    side = next(iter(last.branches().values()), None)
    return None if side is None else _model(side)
