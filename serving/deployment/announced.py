"""The graph over the workers that other processes announce in a runtime.

    model cards ──► sets of workers ──► a graph for each ──► Switch by the model's name
                                                                 └─► several sets of one model: by their workers

Models appear and vanish while it runs. A name that was announced once is expected back: its requests are Unavailable
without workers, those for any other name ModelNotFound.

Source: dynamo lib/llm/src/discovery, ModelWatcher and its controller.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from operator import is_
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, evolve, field, frozen

from pipeline import AsyncEngine, Context, PenstockError, ResponseStream, Stage, link
from pipeline.network import Added, EndpointId, Model, Removed, Runtime, TaintsUpdated
from pipeline.telemetry import merged, with_labels

from .announced_set import BUILDS_MAX, AnnouncedSet
from .card_files import CardFiles
from .config import GraphConfig, HostOptions
from .model_graph import Graphs, Offers
from .stages import StandardGraph, TokenGraph
from .worker_sets import Announced, Deployment, deployment_of

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

_log = logging.getLogger(__name__)

OPEN_S = 5.0
"""How long the start waits for the graphs of models whose workers are there."""


@frozen(eq=False)
class AnnouncedGraph:
    """A graph that runs over the workers of other processes."""

    graph: StandardGraph
    tokens: TokenGraph
    models: AnnouncedModels
    """What is announced."""

    @property
    def workers(self) -> list[Model]:
        """The cards of the workers that answer."""
        return [one for each in self.models.deployment.answering.values() for one in each.workers.members]

    @property
    def prefill_workers(self) -> list[Model]:
        """The cards of the workers that prefill for them."""
        sets = {one.prefill.endpoint: one.prefill for one in self.models.deployment.answering.values() if one.prefill}
        return [one for each in sets.values() for one in each.members]

    @property
    def failure(self) -> PenstockError | None:
        """None: workers that are gone may come back."""
        return None

    async def ended(self) -> None:
        """Wait for ever, for the same reason."""
        await anyio.sleep_forever()

    def native_metrics(self) -> str:
        """Return how many workers each model has, and whether cards are refused, as Prometheus text."""
        counts: dict[tuple[str, str], int] = {}
        for role, models in (("answer", self.workers), ("prefill", self.prefill_workers)):
            for one in models:
                key = one.card.display_name, role
                counts[key] = counts.get(key, 0) + 1
        samples = [
            with_labels(f"{_WORKERS} {count}\n", {"model": name, "role": role})
            for (name, role), count in sorted(counts.items())
        ]
        refused = f"{_REFUSED} {len(self.models.deployment.refused)}\n"
        return merged([_ABOUT_WORKERS, *samples, _ABOUT_REFUSED + refused])


_WORKERS = "dynamo_frontend_model_workers"
_ABOUT_WORKERS = f"# HELP {_WORKERS} Workers that are announced for a model\n# TYPE {_WORKERS} gauge\n"
_REFUSED = "dynamo_frontend_refused_endpoints"
_ABOUT_REFUSED = (
    f"# HELP {_REFUSED} Endpoints whose workers get no requests, as their cards disagree or cannot be served\n"
    f"# TYPE {_REFUSED} gauge\n"
)


@asynccontextmanager
async def announced_graph(
    config: GraphConfig, hosting: HostOptions, runtime: Runtime, *, namespace: str | None = None
) -> AsyncIterator[AnnouncedGraph]:
    """Give the graph over the workers that announce themselves in the runtime, which must be open and outlive it.

    With a namespace only its own workers are used, and those of namespaces that begin with it and `-` or `.`. The start
    waits for the graphs of models that are there, `OPEN_S` at most; without any there is a graph without models. Raise
    what `Discovery.models` raises if the runtime's discovery cannot be read, and InvalidArgument for a config that has
    a model or an engine of its own. The end of the block leaves the workers as they are; requests that run then may be
    cut, so end them first.
    """
    config = evolve(config, is_announced=True)
    failure: Exception | None = None
    async with CardFiles(runtime.objects, hosting.environment) as files, anyio.create_task_group() as tasks:
        try:
            models = AnnouncedModels(config, hosting, runtime, files, tasks, namespace)
            present = [one for one in await runtime.discovery.models() if models.may_use(one)]
            tasks.start_soon(models.run)
            with anyio.move_on_after(OPEN_S):
                await models.settled({one.key for one in present})
            yield AnnouncedGraph(link(models.offers.switch), models.offers.tokens, models)
        except Exception as error:  # the block's own: it is raised as it is, not inside a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


class AnnouncedModels:
    """The models that workers announce, followed by `run`. `tasks` keep the graphs, and end them when cancelled.

    A set of workers whose cards disagree is refused as a whole until they agree again, which is logged once.
    """

    def __init__(
        self,
        config: GraphConfig,
        hosting: HostOptions,
        runtime: Runtime,
        files: CardFiles,
        tasks: TaskGroup,
        namespace: str | None = None,
    ) -> None:
        self.offers = Offers()
        """The graphs by model name."""
        self.deployment = Deployment()
        """What the cards make together."""
        self._config, self._hosting, self._runtime, self._files = config, hosting, runtime, files
        self._tasks, self._namespace = tasks, namespace
        self._builds = anyio.CapacityLimiter(BUILDS_MAX)
        self._rng = Random(config.seed)
        self._cards: dict[str, Announced] = {}
        self._sets: dict[EndpointId, AnnouncedSet] = {}
        self._groups: dict[str, _Group] = {}
        self._names: set[str] = set()
        self._changed = anyio.Event()

    def may_use(self, model: Model) -> bool:
        """Return whether a card is of the namespace."""
        wanted, found = self._namespace, model.endpoint.namespace
        return wanted is None or found == wanted or found.startswith((f"{wanted}-", f"{wanted}."))

    async def run(self) -> None:
        """Follow the announcements until cancelled. What is known stays in use when discovery ends, or fails."""
        news = self._runtime.discovery.watch_models()
        subscription = news.subscribe(
            self._note, on_error=lambda error: _log.error("models are not followed: %s", error)
        )
        try:
            while True:
                changed = self._changed
                self._look()
                await changed.wait()
        finally:
            subscription.dispose()

    async def settled(self, keys: Collection[str]) -> None:
        """Wait until these cards are known, and each set of workers has been tried."""
        while not self._cards.keys() >= set(keys):
            await self._changed.wait()
        self._look()  # `run` may be about to
        for one in list(self._sets.values()):
            await one.was_tried.wait()

    def _note(self, change: Added[Model] | Removed[Model] | TaintsUpdated) -> None:
        model = change.item
        if not self.may_use(model):
            return
        self._cards.pop(model.key, None)
        if not isinstance(change, Removed):
            try:
                self._cards[model.key] = Announced.of(model)
            except Exception:  # a card that no other way of reading refused
                _log.exception("passing over the card of %s", model.key)
        self._changed.set()
        self._changed = anyio.Event()

    def _look(self) -> None:
        try:
            self._reconcile()
        except Exception:  # no card ends the service of the other models
            _log.exception("the models that are served stay as they are")

    def _reconcile(self) -> None:
        """Have a set for each endpoint that answers, which wants the workers that are there."""
        before, self.deployment = self.deployment, deployment_of(self._cards.values())
        self._names = {name for one in self._cards.values() for name in one.names}
        _log_refused(before.refused, self.deployment.refused)
        answering = self.deployment.answering
        for endpoint, one in list(self._sets.items()):
            wanted = answering.get(endpoint)
            if wanted is not None and not one.fits(wanted):
                wanted = None  # it stays open for the requests that run, and another one takes its place
                del self._sets[endpoint]
            one.want(wanted)
        for endpoint, wanted in answering.items():
            if endpoint not in self._sets:
                self._sets[endpoint] = AnnouncedSet(
                    wanted, self._config, self._hosting, self._runtime, self._files, self._builds, self._offer
                )
                self._tasks.start_soon(self._keep, self._sets[endpoint])
        self._offer()

    async def _keep(self, one: AnnouncedSet) -> None:
        await one.run()
        if self._sets.get(one.endpoint) is one:
            del self._sets[one.endpoint]

    def _offer(self) -> None:
        """Offer what the sets have now, under the names of their models; other names that are known are expected."""
        known = {*self.offers.switch.graphs, *self._names}
        found: dict[str, list[AnnouncedSet]] = {name: [] for name in self._groups}
        for one in self._sets.values():
            if one.graphs and one.wanted is not None:
                found.setdefault(one.wanted.workers.name, []).append(one)
        for name, sets in found.items():
            group = self._groups.setdefault(name, _Group(name))
            self.offers.offer(group, group.merged(sets, self._rng))
        self._groups = {name: group for name, group in self._groups.items() if found[name]}
        for name in known:
            self.offers.expect(name)


def _log_refused(before: Mapping[EndpointId, str], now: Mapping[EndpointId, str]) -> None:
    for endpoint, problem in now.items():
        if before.get(endpoint) != problem:
            _log.error("%s; none of them gets requests until that is mended", problem)
    for endpoint in before.keys() - now.keys():
        _log.info("the workers at %s are no longer refused", endpoint)


@define(eq=False)
class _Group:
    """What several sets of one model offer together, as the owner of its names."""

    name: str
    names: Collection[str] = ()
    _merged: dict[str, tuple[tuple[Graphs, ...], Graphs]] = field(factory=dict)

    def merged(self, sets: Sequence[AnnouncedSet], rng: Random) -> Mapping[str, Graphs]:
        """Return a graph for each name; the same one as before as long as the same sets have it."""
        by_name: dict[str, list[tuple[AnnouncedSet, Graphs]]] = {}
        for one in sets:
            for name, graphs in one.graphs.items():
                by_name.setdefault(name, []).append((one, graphs))
        self.names = {name for one in sets for name in one.graphs if name not in one.names}
        merged: dict[str, tuple[tuple[Graphs, ...], Graphs]] = {}
        for name, those in by_name.items():
            parts = tuple(graphs for _, graphs in those)
            known = self._merged.get(name)
            same = known is not None and len(known[0]) == len(parts) and all(map(is_, known[0], parts))
            merged[name] = known if same and known is not None else (parts, _joined(those, rng))
        self._merged = merged
        return {name: graphs for name, (_, graphs) in merged.items()}


def _joined(those: Sequence[tuple[AnnouncedSet, Graphs]], rng: Random) -> Graphs:
    if len(those) == 1:
        return those[0][1]
    weights = [lambda one=one: one.weight for one, _ in those]
    texts = Spread({one.endpoint.path: text for one, (text, _) in those}, weights, rng)
    tokens = Spread({one.endpoint.path: part for one, (_, part) in those}, weights, rng)
    return link(texts), tokens


class Spread(AsyncEngine[Any, Any]):
    """Sends each request to one of several graphs of a model, at random by the number of their workers.

        request ──► one of the graphs, unchanged
        stream  ◄── that graph's own, at no cost

    Ends a graph. `graphs` are by the endpoints of their workers, `weights` are called for each request.
    """

    adds_time = False

    def __init__(
        self, graphs: Mapping[str, AsyncEngine[Any, Any]], weights: Sequence[Callable[[], int]], rng: Random
    ) -> None:
        self._graphs, self._weights, self._rng = dict(graphs), weights, rng

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        weights = [max(weight(), 0) for weight in self._weights]
        (graph,) = self._rng.choices(list(self._graphs.values()), weights if any(weights) else None)
        return await graph.generate(request)

    def branches(self) -> Mapping[str, Stage]:
        return self._graphs
