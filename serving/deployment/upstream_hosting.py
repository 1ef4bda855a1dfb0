"""Workers of a runtime in front of servers that run already, each kept in service by a supervisor of its own.

front ends ──► runtime ──► Worker of an Upstream ──► server          their graphs are those of other processes
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import anyio
from attrs import evolve

from engines import Worker
from operators import Model
from pipeline import InvalidArgument, PenstockError
from pipeline.errors import EngineShutdown
from pipeline.network import Runtime, Served, withdraw_all

from ..retry import Retry
from .announced_adapters import announced_adapters
from .config import GraphConfig, HostOptions
from .kv_routing import event_log
from .model_pools import folder_of, text_at_servers
from .server_prompts import has_text_at_servers
from .supervisor import Supervisor
from .upstream_config import closed, no_tokenizer
from .worker_prompts import serving_prompts

if TYPE_CHECKING:
    from engines.upstream import ServerFacts, Upstream

_log = logging.getLogger(__name__)

Beside = Callable[[Worker], AbstractAsyncContextManager[None]]
"""Gives what runs beside a worker while it is in service."""


@asynccontextmanager
async def upstream_workers(
    config: GraphConfig, hosting: HostOptions, runtime: Runtime, beside: Beside, *, retry: Retry | None = None
) -> AsyncIterator[Sequence[Supervisor]]:
    """Keep a worker in the runtime for each server of `config.upstream`, with the part of requests of `config.worker`.

    A server that is down is tried again, and is a new worker when it is back. The end of the block makes the workers
    invisible, waits for the grace period of `hosting.times` and then for their requests, and ends them. Raise
    InvalidArgument for a `model_path` where nothing is.
    """
    assert config.upstream is not None
    if config.model_path is not None and not config.model_path.exists():
        raise InvalidArgument(f"{config.model_path} does not exist", field="model_path")
    servers = _Servers(config, hosting, runtime, beside)
    supervisors = [Supervisor(url, lambda url=url: servers.serving(url), retry) for url in config.upstream.urls]  # type: ignore[misc]
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            for one in supervisors:
                tasks.start_soon(one.run)
            yield supervisors
            await _finish(supervisors, hosting)
        except Exception as error:  # the block's own: it is raised as it is, not inside a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _finish(supervisors: Sequence[Supervisor], hosting: HostOptions) -> None:
    """Let other processes see that the workers go, and then let the requests end that they have."""
    served = [one.worker.served for one in supervisors if one.worker is not None and one.worker.served is not None]
    if not served:
        return
    async with anyio.create_task_group() as tasks:
        for one in served:
            tasks.start_soon(_unpublish, one)
    await anyio.sleep(hosting.times.grace_s)
    await withdraw_all(served)
    with anyio.move_on_after(hosting.times.timeout_s):
        for one in served:
            await one.drained()


async def _unpublish(served: Served) -> None:
    try:
        await served.unpublish()
    except PenstockError as error:  # its requests end in order all the same
        _log.warning("%s could not be unregistered, its lease runs out: %s", served.instance, error)


class _Servers:
    """Makes the workers of servers."""

    def __init__(self, config: GraphConfig, hosting: HostOptions, runtime: Runtime, beside: Beside) -> None:
        assert config.upstream is not None
        self._upstream, self._config, self._hosting = config.upstream, config, hosting
        self._runtime, self._beside = runtime, beside
        self._connector = config.upstream.new_connector()
        self._models: dict[str, tuple[GraphConfig, Model]] = {}
        """By the name that servers have for them."""
        self._loading = anyio.Lock()

    @asynccontextmanager
    async def serving(self, url: str) -> AsyncIterator[Worker]:
        """Give a worker of the server in service. Raise what the server's discovery raises."""
        mode, transport = self._config.worker.disaggregation_mode, self._hosting.transports.get(url)
        engine, facts = await self._upstream.found(url, mode, self._connector, transport, self._needs_text)
        async with AsyncExitStack() as served:
            try:
                text = self._upstream.text_of(engine)
                config, model = await self._model_of(facts, has_text=text is not None)
                worker = self._worker(engine, config, model)
                if text is not None:
                    prompts = serving_prompts(self._runtime, worker.endpoint, worker.worker_id, text)
                    await served.enter_async_context(prompts)
            except BaseException:
                await closed(engine)
                raise
            async with worker, announced_adapters(worker, engine), self._beside(worker):
                if engine.known.model != facts.model:
                    raise EngineShutdown(f"{url} was started again with another model")
                yield worker

    def _worker(self, engine: Upstream, config: GraphConfig, model: Model) -> Worker:
        hosting, settings = self._hosting, config.worker_settings(model)
        may_prefill = settings.may_prefill and self._upstream.may_prefill(engine)
        return Worker(
            engine,
            evolve(settings, may_prefill=may_prefill),
            runtime=self._runtime,
            metrics=hosting.metrics,
            environment=hosting.environment,
            health=hosting.health,
            times=hosting.times,
            kv_event_log=event_log,
            tracer=hosting.tracer,
        )

    def _needs_text(self, facts: ServerFacts) -> bool:
        """Return whether the tokenizer of a server's model is only there."""
        known = self._models.get(facts.model)
        return folder_of(facts, self._config) is None if known is None else has_text_at_servers(known[1])

    async def _model_of(self, facts: ServerFacts, *, has_text: bool) -> tuple[GraphConfig, Model]:
        """Return the model of a server, read once, and its config; `has_text`: whether its engine gives text.

        Raise InvalidArgument without a tokenizer here or there.
        """
        async with self._loading:
            if (known := self._models.get(facts.model)) is None:
                folder, name = folder_of(facts, self._config), self._config.model_name or facts.model
                if folder is None and not has_text:
                    raise no_tokenizer(facts)
                config = evolve(self._config.in_namespace_of(name), model_path=folder, model_name=name)
                model = text_at_servers(name, config) if folder is None else await config.loaded_model()
                lengths = [each for each in (model.context_length, facts.context_length) if each is not None]
                model = evolve(model, context_length=min(lengths, default=None))
                known = self._models[facts.model] = config, model
        if has_text_at_servers(known[1]) and not has_text:
            raise no_tokenizer(facts)
        return known
