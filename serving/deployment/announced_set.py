"""AnnouncedSet: the workers at one endpoint of the runtime, and the graph in front of them while they are wanted.

    wanted ──► build: files, model, routing ──► offered, while its workers are there
       │            └─► fails ──► again after 1, 2, 4, ... s, or at the next change
       └─► gone, or refused ──► not offered; closed after KEPT_S

A graph stays open while its workers restart. Workers with other cards are another set, see `fits`.

Source: dynamo lib/llm/src/discovery, the worker sets of its controller. Other than there, a graph without workers stays
open for a while, so that requests which run on are neither cut nor lose the workers that come back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack

import anyio
from attrs import evolve

from operators.kv import WorkerType
from pipeline import PenstockError
from pipeline.network import Runtime
from pipeline.protocols.card import WorkerType as Role

from .admission import Admission
from .card_files import CardFiles
from .config import GraphConfig, HostOptions
from .model_graph import Graphs, ModelGraph
from .server_prompts import ServerPrompts
from .worker_prompts import prompt_workers
from .worker_sets import Answering

_log = logging.getLogger(__name__)

KEPT_S = 300.0
"""How long a graph is kept without workers."""
FIRST_S = 1.0
"""Wait after the first build that failed."""
LONGEST_S = 30.0
"""Longest wait before a failed build is tried again."""
BUILDS_MAX = 8
"""Models that are built at once."""


class AnnouncedSet:
    """See the module. `offer` is called after each change of `graphs`; `run` builds, and ends once nothing is wanted.

    `wanted` are its first workers. All sets of a front end share the limiter of `builds` and the files.
    """

    def __init__(
        self,
        wanted: Answering,
        config: GraphConfig,
        hosting: HostOptions,
        runtime: Runtime,
        files: CardFiles,
        builds: anyio.CapacityLimiter,
        offer: Callable[[], object],
    ) -> None:
        self.endpoint = wanted.workers.endpoint
        self.wanted: Answering | None = wanted
        """The workers that are there now; None if there are none, or none that agree."""
        self.was_tried = anyio.Event()
        """Set once the first build has ended, well or not."""
        self.problem: Exception | None = None
        """Why there is no graph; None before the first try, and while there is one."""
        self._config, self._hosting, self._runtime = config, hosting, runtime
        self._files, self._builds, self._offer = files, builds, offer
        self._graph: ModelGraph | None = None
        self._identity = wanted.workers.identity
        self._prefill_at = None if wanted.prefill is None else wanted.prefill.endpoint
        self._changed = anyio.Event()
        self._was_offered = False
        self._shown = ""
        self._admission, self._prefill_admission = Admission(), Admission()
        self._admit(wanted)

    # -- as adapters of its graph

    @property
    def names(self) -> Collection[str]:
        """Names of the LoRA adapters."""
        return () if self.wanted is None else self.wanted.workers.adapters

    def workers(self, name: str) -> set[int]:
        """Return the workers that have an adapter now, of prefill and of decode."""
        return set() if self.wanted is None else self.wanted.adapter_workers(name)

    # -- what it offers

    @property
    def graphs(self) -> Mapping[str, Graphs]:
        """What requests can go to now, by name."""
        wanted = self.wanted
        if self._graph is None or wanted is None or wanted.missing:
            return {}
        return self._graph.graphs

    @property
    def weight(self) -> int:
        """How many workers answer."""
        return 0 if self.wanted is None else len(self.wanted.workers.members)

    def fits(self, wanted: Answering) -> bool:
        """Return whether these workers can be behind its graph: their cards are as those of the first ones."""
        prefill = wanted.prefill
        is_known = prefill is None or self._prefill_at in (None, prefill.endpoint)
        return is_known and wanted.workers.identity == self._identity

    def want(self, wanted: Answering | None) -> None:
        """These workers are there now, or none. A build that has failed is tried at once if they are others."""
        before, self.wanted = self.wanted, wanted
        if _members(before) != _members(wanted):
            self._changed.set()
            self._changed = anyio.Event()
        self._admit(wanted)
        if wanted is None:
            return
        if wanted.prefill is not None:
            self._prefill_at = wanted.prefill.endpoint
        if wanted.missing:
            self._show(wanted.missing)
            self.was_tried.set()
        elif self.graphs:
            self._show("")
        if (graph := self._graph) is not None:
            self._adopt(graph)
            if before is None or before.workers.adapters.keys() != wanted.workers.adapters.keys():
                graph.renew()

    # -- its life

    async def run(self) -> None:
        """Keep a graph of the workers that are wanted, until there were none for `KEPT_S`, or until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_built)
            while True:
                changed = self._changed
                with anyio.move_on_after(KEPT_S if self.wanted is None else None) as scope:
                    await changed.wait()
                if scope.cancelled_caught:
                    break
            tasks.cancel_scope.cancel()

    async def _keep_built(self) -> None:
        """Build the graph and keep it open, until cancelled."""
        wait_s = 0.0
        while True:
            wanted, changed = self.wanted, self._changed
            if wanted is not None:
                self._was_offered = False
                try:
                    await self._open(wanted)
                except PenstockError as error:
                    self._fail(error)
                except Exception as error:  # a fault of ours with one model does not end the others
                    if str(error) != str(self.problem):
                        _log.exception("%s met an error that is no worker's", self.endpoint)
                    self._fail(error)
                wait_s = FIRST_S if self._was_offered or not wait_s else min(2 * wait_s, LONGEST_S)
            with anyio.move_on_after(None if wanted is None else wait_s):
                await changed.wait()

    async def _open(self, wanted: Answering) -> None:
        card, role = wanted.workers.card, wanted.workers.role
        async with self._builds:
            model = await self._files.model(card)
        needs_prefill = role is Role.DECODE and bool(card.needs)
        config = evolve(self._config, enforce_disagg=self._config.enforce_disagg or needs_prefill)
        kind: WorkerType = "decode" if role is Role.DECODE else "aggregated"
        names = dict.fromkeys((card.display_name, *(alias for alias in card.aliases if alias.strip())))
        self._graph = graph = ModelGraph(
            model, tuple(names), self.endpoint, kind, config, self._hosting, self._runtime, self._renewed, self
        )
        graph.admission, graph.prefill_admission = self._admission, self._prefill_admission
        self._adopt(graph)
        try:
            async with AsyncExitStack() as views:
                if card.tokenizes:
                    opening = prompt_workers(self.endpoint, self._runtime, self._admission)
                    workers = await views.enter_async_context(opening)
                    limits, lenient = config.request_limits, config.ignore_unsupported
                    graph.prompts = ServerPrompts(workers, limits, ignore_unsupported=lenient)
                await graph.run()
        finally:
            self._graph = None
            self._offer()

    def _renewed(self) -> None:
        if self._graph is not None and self._graph.graphs:
            self.problem, self._was_offered = None, True
            self._show("")
            self.was_tried.set()
        self._offer()

    def _admit(self, wanted: Answering | None) -> None:
        """Have requests go to these workers. Without any that agree, requests that run go on with the last ones."""
        if wanted is not None:
            self._admission.admit([one.instance_id for one in wanted.workers.members])
        prefill = None if wanted is None else wanted.prefill
        self._prefill_admission.admit([] if prefill is None else [one.instance_id for one in prefill.members])

    def _adopt(self, graph: ModelGraph) -> None:
        """Have the graph use the prefill workers, once some were there."""
        if self._prefill_at is not None and not graph.has_prefill.is_set():
            graph.prefill_at = self._prefill_at
            graph.has_prefill.set()

    def _fail(self, problem: Exception) -> None:
        self.problem = problem
        self._show(f"{type(problem).__name__}: {problem}")
        self.was_tried.set()

    def _show(self, problem: str) -> None:
        """Log a problem once, and its end."""
        if problem != self._shown:
            if problem:
                _log.warning("the workers at %s get no requests: %s", self.endpoint, problem)
            else:
                _log.info("the workers at %s get requests again", self.endpoint)
            self._shown = problem


def _members(wanted: Answering | None) -> list[int]:
    """Return which cards these are, without a look at what is in them."""
    if wanted is None:
        return []
    prefill = () if wanted.prefill is None else wanted.prefill.members
    return [id(one) for one in (*wanted.workers.members, *prefill)]
