"""Gatherer: makes overviews of a deployment from discovery, from the reports of loads, and by asking its processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Self

import anyio

from operators.pool import load_reports
from pipeline import Context, PenstockError
from pipeline.network import EndpointId, Instance, Runtime
from pipeline.protocols.kv import ActiveLoad
from pipeline.rx import CompositeDisposable

from .overview import Overview, overview_of
from .process_status import STATUS_ENDPOINT, ProcessStatus

_ANSWER_S = 2.0
"""A process that does not answer within this counts as one that does not."""
_QUERIES_MAX = 32
"""Processes that are queried at once."""


class Gatherer:
    """A context manager in an open runtime. Reports of loads are collected from the first overview to its end."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._loads: dict[tuple[int, int], ActiveLoad] = {}
        """The last report by worker and rank."""
        self._followed: set[tuple[str, str]] = set()
        self._subscriptions = CompositeDisposable()
        self._queries = anyio.CapacityLimiter(_QUERIES_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._subscriptions.dispose()

    async def gather(self) -> Overview:
        """Return the processes as they are now. Raise Unavailable if discovery cannot be read."""
        discovery = self._runtime.discovery
        instances, models = await discovery.instances(), await discovery.models()
        self._follow(one.endpoint for one in models)
        answers = await self._answers(each for each in instances if each.endpoint == STATUS_ENDPOINT)
        present = {each.instance_id for each in instances}
        self._loads = {key: load for key, load in self._loads.items() if key[0] in present}
        by_worker: dict[int, list[ActiveLoad]] = {}
        for (worker_id, _), load in self._loads.items():
            by_worker.setdefault(worker_id, []).append(load)
        return overview_of(instances, models, by_worker, answers)

    def _follow(self, endpoints: Iterable[EndpointId]) -> None:
        """Collect the reports of components from now on."""
        for endpoint in endpoints:
            component = endpoint.namespace, endpoint.component
            if component not in self._followed:
                self._followed.add(component)
                self._subscriptions.add(load_reports(self._runtime.events, endpoint).subscribe(self._note))

    def _note(self, load: ActiveLoad) -> None:
        self._loads[load.worker_id, load.dp_rank] = load

    async def _answers(self, instances: Iterable[Instance]) -> Mapping[str, ProcessStatus]:
        answers: dict[str, ProcessStatus] = {}
        async with anyio.create_task_group() as tasks:
            for instance in instances:
                tasks.start_soon(self._query, instance, answers)
        return answers

    async def _query(self, instance: Instance, answers: dict[str, ProcessStatus]) -> None:
        engine = self._runtime.requests.engine(instance, ProcessStatus)
        async with self._queries:
            with suppress(PenstockError), anyio.move_on_after(_ANSWER_S):
                async with await engine.generate(Context(None)) as stream:
                    async for answer in stream:
                        answers[instance.key] = answer
