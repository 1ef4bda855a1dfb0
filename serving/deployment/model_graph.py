"""ModelGraph: the graph of one model in front of the workers at one endpoint, and what clients find by which name.

first worker   ──► routing, stages ──► offered by the model's names
first prefill  ──► the same with a PrefillRouter in place of it
LoRA adapters  ──► each a model of its own: the same stages with a LoraAdapter

Offers: the graphs of several owners in one Switch; a name belongs to one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol

import anyio
from attrs import evolve

from operators import LoraAdapter, Model, PrefillRouter, Switch
from operators.kv import WorkerType
from pipeline import Unavailable
from pipeline.network import EndpointId, Runtime

from .admission import Admission
from .config import GraphConfig, HostOptions
from .routing import Routing, prefill_endpoint, prefill_stage, routing_to
from .server_prompts import ServerPrompts
from .stages import StandardGraph, TokenGraph, line, token_line

_log = logging.getLogger(__name__)

AGAIN_S = 0.5
"""Wait before a graph that could not be opened is opened again."""

FOUND_S = 5.0
"""How long a graph of announced workers waits for the first of them before it takes requests."""

_WARNED_MAX = 1000
"""Texts that are remembered as logged."""

Graphs = tuple[StandardGraph, TokenGraph]
"""A graph as clients use it, and its part below the text stages."""


class AdapterSet(Protocol):
    """The LoRA adapters of a model's workers."""

    @property
    def names(self) -> Collection[str]:
        """Names of the adapters, for clients."""
        ...

    def workers(self, name: str) -> set[int]:
        """Return the workers that have the adapter now, of prefill and of decode."""
        ...


class ModelGraph:
    """The graph of `model`, for clients under `names`, over the workers at `endpoint`, whose role is `role`.

    `offer` is called after each change of `graphs`. Decode workers get a prefill stage once `has_prefill` is set, in
    front of the workers at `prefill_at`.
    """

    def __init__(
        self,
        model: Model,
        names: Collection[str],
        endpoint: EndpointId,
        role: WorkerType,
        config: GraphConfig,
        hosting: HostOptions,
        runtime: Runtime,
        offer: Callable[[], object],
        adapters: AdapterSet,
    ) -> None:
        self.model, self.names, self.endpoint, self.config = model, tuple(names), endpoint, config
        self.adapters = adapters
        self.prefill_at = prefill_endpoint(endpoint)
        """Endpoint of the prefill workers."""
        self.admission: Admission | None = None
        """Which of its workers get requests; None: all."""
        self.prefill_admission: Admission | None = None
        """Which of the prefill workers do; None: all."""
        self.graphs: Mapping[str, Graphs] = {}
        """What requests go to now, by the names of the model and of its adapters; empty while it is not open."""
        self.is_open = anyio.Event()
        """Set once requests for the model were taken."""
        self.has_prefill = anyio.Event()
        """Set once a prefill worker was there."""
        self.has_prefill_stage = anyio.Event()
        """Set once prompts are computed by prefill workers."""
        self.prompts: ServerPrompts | None = None
        """What makes tokens of prompts, if this machine has no tokenizer."""
        self._hosting, self._runtime, self._offer = hosting, runtime, offer
        self._role: WorkerType = role
        self._routing: tuple[Routing, PrefillRouter | None] | None = None

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    async def run(self) -> None:
        """Keep the graph open until cancelled. Raise as `routing_to`."""
        has_prefill = self._role == "decode"
        async with AsyncExitStack() as stages:
            where = routing_to(self.endpoint, self.config, self._hosting, self._runtime, self._role, self.admission)
            routing = await stages.enter_async_context(where)
            stages.callback(self._withdraw)
            if self.admission is not None:  # its card was found, which may be before the worker itself is
                with anyio.move_on_after(FOUND_S):
                    await routing.workers.wait_for_instances()
            if not (has_prefill and self.config.enforce_disagg):
                self._serve(routing, None)
            if has_prefill:
                self._serve(routing, await self._prefill_stage(routing, stages))
                self.has_prefill_stage.set()
            await anyio.sleep_forever()

    def renew(self) -> None:
        """Offer a graph for each name of the model, and for each adapter that its workers have now."""
        adapters = () if self._routing is None else self.adapters.names
        names = () if self._routing is None else self.names
        known = self.graphs
        self.graphs = {
            **{name: known[name] for name in names},
            **{name: known.get(name) or self._of_adapter(name) for name in adapters if name not in names},
        }
        self._offer()

    async def _prefill_stage(self, routing: Routing, stages: AsyncExitStack) -> PrefillRouter:
        """Return the prefill stage, open until `stages` are closed, once a prefill worker is there."""
        await self.has_prefill.wait()
        shown = ""
        while True:
            try:
                opening = prefill_stage(
                    routing, self.config, self._hosting, self._runtime, self.prefill_at, self.prefill_admission
                )
                return await stages.enter_async_context(opening)
            except Unavailable as error:  # the worker has left again: until it is back, the others serve on
                if str(error) != shown:
                    shown = str(error)
                    _log.warning(f"no prefill worker of {self.name} is used yet: {error}")
                await anyio.sleep(AGAIN_S)

    def _serve(self, routing: Routing, prefill: PrefillRouter | None) -> None:
        """Send requests to this graph from now on; those that run stay with the one that they began with."""
        self._routing, self.graphs = (routing, prefill), {}
        self.graphs = dict.fromkeys(self.names, self._graph(self.model))
        self.renew()
        self.is_open.set()

    def _withdraw(self) -> None:
        self._routing, self.graphs = None, {}
        self._offer()

    def _of_adapter(self, name: str) -> Graphs:
        adapter = LoraAdapter(name, workers=lambda: self.adapters.workers(name))
        return self._graph(evolve(self.model, name=name), adapter)

    def _graph(self, model: Model, adapter: LoraAdapter | None = None) -> Graphs:
        assert self._routing is not None
        (routing, prefill), hosting = self._routing, self._hosting
        graph = line(model, routing, self.config, hosting, prefill, self.prompts, adapter)
        return graph, token_line(routing, self.config, hosting, prefill, adapter)


class Owner(Protocol):
    """What offers graphs: a model with its names."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def names(self) -> Collection[str]:
        """Names of the model itself; other names are those of adapters."""
        ...


class Offers:
    """The graphs of all models by the names that clients use."""

    def __init__(self) -> None:
        self.switch: Switch[Any, Any] = Switch()
        """The graphs by model name."""
        self.tokens: Switch[Any, Any] = Switch()
        """Their parts below the text stages."""
        self._owner: dict[str, Owner] = {}
        self._warned: set[str] = set()

    def offer(self, owner: Owner, graphs: Mapping[str, Graphs]) -> None:
        """Send requests for these names to these graphs of an owner, and none to graphs that it had before.

        A name that another owner has stays with that, unless it is an adapter's there and a model's here.
        """
        for name in [name for name, other in self._owner.items() if other is owner]:
            if name not in graphs or graphs[name][0] is not self.switch.graphs[name]:
                self._remove(name)
        for name, (graph, tokens) in graphs.items():
            other = self._owner.get(name)
            if other not in (None, owner) and (name in other.names or name not in owner.names):
                self._warn(f"{owner.name} is not served as {name!r} too: another model has that name")
            elif other is not owner:
                if other is not None:
                    self._warn(f"the adapter {name!r} of {other.name} is not served: a model has that name")
                    self._remove(name)
                self.switch.add(name, graph)
                self.tokens.add(name, tokens)
                self._owner[name] = owner

    def _warn(self, text: str) -> None:
        """Log it once, for all that is offered is looked at after each change."""
        if text not in self._warned:
            if len(self._warned) >= _WARNED_MAX:
                self._warned.clear()
            self._warned.add(text)
            _log.warning(text)

    def expect(self, name: str) -> None:
        """Refuse requests for this name as Unavailable, not as ModelNotFound, while it has no graph."""
        self.switch.expect(name)
        self.tokens.expect(name)

    def _remove(self, name: str) -> None:
        self.switch.remove(name)
        self.tokens.remove(name)
        del self._owner[name]
