"""Workers and front ends that share a runtime, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
from anyio.abc import TaskGroup, TaskStatus

from engines import DisaggregationMode, Worker, WorkerConfig
from pipeline import Annotated, AsyncEngine, Context, Disconnected, ResponseStream
from pipeline.network import EventPlane, Runtime
from pipeline.network.direct_events import DirectEventPlane
from pipeline.network.discovery import Store
from pipeline.network.objects import InProcessObjects
from pipeline.network.requests import RequestPlane
from pipeline.protocols import BackendOutput
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from pipeline.rx import AnyIOScheduler
from serving.deployment import AnnouncedGraph, GraphConfig, HostOptions, announced_graph
from serving.deployment.fleet import hosted
from tests.pipeline.network.worlds import deployment


class Cluster:
    """Workers and front ends over runtimes of one deployment; `cache` is the cache folder of every front end."""

    def __init__(
        self, runtime: Runtime, cache: Path, processes: tuple[TaskGroup, Callable[[], Runtime]] | None = None
    ) -> None:
        """`processes` makes the runtime of one more process, for each worker and front end, and has a task group for
        them; None: all share `runtime`."""
        self.runtime, self.cache = runtime, cache
        self._processes = processes
        self.workers: list[Worker] = []
        """Those in service."""
        self._exchanges: dict[str, Any] = {}
        """Where the mock engines of a model transfer blocks, if they share a runtime."""
        self._process_ends: dict[Worker, anyio.Event] = {}

    async def start(
        self,
        name: str = "echo",
        *,
        mode: DisaggregationMode = DisaggregationMode.AGGREGATED,
        namespace: str | None = None,
        worker: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Worker:
        """A worker in service; `worker` are further fields of WorkerConfig, `fields` those of GraphConfig."""
        settings = WorkerConfig(namespace="penstock", disaggregation_mode=mode, **(worker or {}))
        config = GraphConfig(model_name=name, worker=settings, **fields).in_namespace_of(namespace or name)
        model = await config.loaded_model()
        shared = config.deployment(mode)
        shared.exchange = self._exchanges.get(name)
        (engine,) = await config.make_engines(1, shared)
        runtime, ended = self.runtime, None
        if self._processes is None:
            self._exchanges[name] = shared.exchange
        else:
            tasks, _ = self._processes
            runtime, ended = await tasks.start(self._run_process)
        made = hosted(engine, config, HostOptions({}), model, runtime, mode)
        await made.__aenter__()
        self.workers.append(made)
        if ended is not None:
            self._process_ends[made] = ended
        return made

    async def _run_process(self, *, task_status: TaskStatus[tuple[Runtime, anyio.Event]]) -> None:
        assert self._processes is not None
        _, process = self._processes
        ended = anyio.Event()
        async with process() as runtime:
            task_status.started((runtime, ended))
            await ended.wait()

    async def end(self, worker: Worker) -> None:
        """The worker ends in order: it gets no new requests, and finishes those it has."""
        self.workers.remove(worker)
        if worker.served is not None:
            await worker.served.withdraw()
            await worker.served.drained()
        await worker.__aexit__(None, None, None)
        if (ended := self._process_ends.pop(worker, None)) is not None:
            ended.set()

    async def kill(self, worker: Worker) -> None:
        """The worker disappears as in a crash."""
        self.workers.remove(worker)
        worker.abort()
        error = Disconnected("killed")
        await worker.__aexit__(type(error), error, None)
        if (ended := self._process_ends.pop(worker, None)) is not None:
            ended.set()

    @asynccontextmanager
    async def front(self, *, namespace: str | None = None, **fields: Any) -> AsyncIterator[AnnouncedGraph]:
        """A front end; `fields` are those of GraphConfig."""
        config, hosting = GraphConfig(is_announced=True, **fields), HostOptions({"XDG_CACHE_HOME": str(self.cache)})
        async with AsyncExitStack() as stack:
            runtime = self.runtime
            if self._processes is not None:
                _, process = self._processes
                runtime = await stack.enter_async_context(process())
            opening = announced_graph(config, hosting, runtime, namespace=namespace)
            yield await stack.enter_async_context(opening)


@asynccontextmanager
async def cluster_of(cache: Path) -> AsyncIterator[Cluster]:
    """A cluster over one runtime; its workers end with the block."""
    async with Runtime.in_process() as runtime:
        cluster = Cluster(runtime, cache)
        try:
            yield cluster
        finally:
            with anyio.CancelScope(shield=True):
                for worker in list(cluster.workers):
                    await cluster.end(worker)


@asynccontextmanager
async def processes_of(cache: Path) -> AsyncIterator[Cluster]:
    """A cluster in which each worker and each front end is a process of its own, over a network in memory."""
    objects = InProcessObjects()
    async with deployment() as site:

        def process() -> Runtime:
            made = site.runtime(make_events=_direct_events)
            made.objects = objects
            return made

        async with process() as runtime, anyio.create_task_group() as tasks:
            cluster = Cluster(runtime, cache, (tasks, process))
            try:
                yield cluster
            finally:
                with anyio.CancelScope(shield=True):
                    for worker in list(cluster.workers):
                        await cluster.end(worker)


def _direct_events(store: Store, requests: RequestPlane, scheduler: AnyIOScheduler) -> EventPlane:
    return DirectEventPlane(store, requests, scheduler, lambda: 0, Random())


def chat(text: str, model: str = "echo", max_tokens: int | None = None) -> Context[Any]:
    """A chat of one message."""
    messages = [ChatMessage(role="user", content=text)]
    return Context(ChatCompletionRequest(model=model, messages=messages, max_tokens=max_tokens))


async def answer(graph: AsyncEngine[Any, Any], sent: Context[Any]) -> str:
    """The text of an answer. Raise the error of an error item."""
    async with await graph.generate(sent) as stream:
        return await text_of(stream)


async def text_of(stream: ResponseStream[Any]) -> str:
    """The text of what is left of an answer. Raise the error of an error item."""
    text = ""
    async for item in stream:
        if (error := item.extract_error()) is not None:
            raise error
        if item.data is not None:
            text += item.data.text or ""
    return text


def first_text(item: Annotated[BackendOutput]) -> str:
    """The text of one item."""
    return "" if item.data is None else item.data.text or ""
