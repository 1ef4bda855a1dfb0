"""ModelPools: the servers of each model, and the graph in front of them, which a Switch picks by the model's name.

facts of a server ──► its model's pool ──► workers at <namespace>-<model>/backend/generate, and /prefill/
first worker      ──► routing, stages ──► switch
first prefill     ──► the same with a PrefillRouter in place of it
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from attrs import evolve

from engines import DisaggregationMode
from operators import Model, PrefillRouter, Switch
from operators.kv import WorkerType
from pipeline import InvalidArgument, PenstockError
from pipeline.loop import time_held
from pipeline.network import EndpointId, Runtime

from .config import GraphConfig, HostOptions
from .routing import Routing, prefill_stage, routing_to
from .server_prompts import ServerPrompts, ServerTokenizer
from .stages import line, token_line

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from engines.upstream import ServerFacts, VllmText

_log = logging.getLogger(__name__)

AGAIN_S = 0.5
"""Wait before a graph that could not be opened is opened again."""


class ModelPool:
    """The servers of one model; `run` opens its graph once a worker is there, and keeps it until cancelled."""

    def __init__(
        self, model: Model, names: tuple[str, ...], facts: ServerFacts, config: GraphConfig, pools: ModelPools
    ) -> None:
        self.model, self.names, self.config = model, names, config
        self.block_size_tokens = facts.block_size_tokens
        self.text_servers: list[VllmText] = []
        """The servers that are there now, if it is they that have the tokenizer."""
        self.is_open = anyio.Event()
        """Set once requests for the model are taken, or never will be: see `failure`."""
        self.has_prefill_stage = anyio.Event()
        """Set once prompts are computed by the prefill servers."""
        self.failure: InvalidArgument | None = None
        """Why its graph cannot be opened."""
        self._pools = pools
        self._has_worker, self._has_prefill = anyio.Event(), anyio.Event()
        worker = config.worker_settings(model, config.modes[0])
        self.endpoint = EndpointId(worker.namespace, worker.component, worker.endpoint)

    def add(self, url: str, facts: ServerFacts, mode: DisaggregationMode) -> None:
        """A worker of this server is in service. A block size unlike that of the others is logged."""
        if facts.block_size_tokens != self.block_size_tokens:
            sizes = f"{facts.block_size_tokens} tokens, others of {self.model.name} have {self.block_size_tokens}"
            _log.warning(f"{url} has KV blocks of {sizes}: its cache is not seen")
        (self._has_prefill if mode is DisaggregationMode.PREFILL else self._has_worker).set()

    @contextmanager
    def joined(self, server: VllmText | None) -> Iterator[None]:
        """Have this server tokenize prompts during the block."""
        if server is None:
            yield
            return
        self.text_servers.append(server)
        try:
            yield
        finally:
            self.text_servers.remove(server)

    async def settled(self) -> None:
        """Wait until the graph is open, with its prefill stage if a prefill server is there."""
        if self.failure is None and self._has_prefill.is_set() and self._has_worker.is_set():
            await self.has_prefill_stage.wait()
        await self.is_open.wait()

    async def run(self) -> None:
        """Keep the graph open until cancelled. Return if it can never be opened."""
        while True:
            await self._has_worker.wait()
            try:
                await self._opened()
            except InvalidArgument as error:
                _log.error(f"{self.model.name} cannot be served: {error}")
                self.failure = error
                self.is_open.set()
                return
            except PenstockError as error:  # the worker left again before its card was read
                _log.warning(f"{self.model.name} is not served yet: {error}")
                await anyio.sleep(AGAIN_S)

    async def _opened(self) -> None:
        hosting, runtime = self._pools.hosting, self._pools.runtime
        has_prefill = self.config.modes[0] is DisaggregationMode.DECODE
        async with AsyncExitStack() as stages:
            role: WorkerType = "decode" if has_prefill else "aggregated"
            where = routing_to(self.endpoint, self.config, hosting, runtime, role)
            routing = await stages.enter_async_context(where)
            stages.callback(self._pools.withdraw, self)
            if not (has_prefill and self.config.enforce_disagg):
                self._serve(routing, None)
            if has_prefill:
                await self._has_prefill.wait()
                stage = await stages.enter_async_context(prefill_stage(routing, self.config, hosting, runtime))
                self._serve(routing, stage)
                self.has_prefill_stage.set()
            await anyio.sleep_forever()

    def _serve(self, routing: Routing, prefill: PrefillRouter | None) -> None:
        """Send requests to this graph from now on; those that run stay with the one that they began with."""
        hosting = self._pools.hosting
        graph = line(self.model, routing, self.config, hosting, prefill, self._prompts())
        self._pools.offer(self, graph, token_line(routing, self.config, hosting, prefill))
        self.is_open.set()

    @property
    def has_server_text(self) -> bool:
        """Whether its servers have the tokenizer, and this machine has not."""
        return isinstance(self.model.tokenizer, ServerTokenizer)

    def _prompts(self) -> ServerPrompts | None:
        if not self.has_server_text:
            return None
        limits, lenient = self.config.request_limits, self.config.ignore_unsupported
        return ServerPrompts(lambda: self.text_servers, limits, ignore_unsupported=lenient)


class ModelPools:
    """The pools of all models, used in one loop. `tasks` run their graphs, and end them when cancelled."""

    def __init__(self, config: GraphConfig, hosting: HostOptions, runtime: Runtime, tasks: TaskGroup) -> None:
        self.hosting, self.runtime = hosting, runtime
        self.switch: Switch[Any, Any] = Switch()
        """The graphs by model name."""
        self.tokens: Switch[Any, Any] = Switch()
        """Their parts below the text stages."""
        self.pools: dict[str, ModelPool] = {}
        """The pools by the name that clients have for the model."""
        self._config, self._tasks = config, tasks
        self._owner: dict[str, ModelPool] = {}
        self._loading = anyio.Lock()

    def needs_server_text(self, facts: ServerFacts) -> bool:
        """Return whether the tokenizer of a server's model is only there."""
        pool = self.pools.get(self._config.model_name or facts.model)
        return folder_of(facts, self._config) is None if pool is None else pool.has_server_text

    async def pool_of(self, facts: ServerFacts, *, may_prefill: bool, has_text: bool) -> ModelPool:
        """Return the pool of a server's model, made at the first one of it; `has_text`: whether its engine gives text.

        Beside prefill servers a pool whose others cannot prefill is as with `enforce_disagg`.
        Raise InvalidArgument if the model's tokenizer is nowhere on this machine, or cannot be read.
        """
        name = self._config.model_name or facts.model
        async with self._loading:  # two servers of one model may be found at the same time
            if (pool := self.pools.get(name)) is None:
                pool = self.pools[name] = await self._made(name, facts, may_prefill, has_text)
                self._tasks.start_soon(pool.run)
        return pool

    async def _made(self, name: str, facts: ServerFacts, may_prefill: bool, has_text: bool) -> ModelPool:
        if (folder := folder_of(facts, self._config)) is None and not has_text:
            raise _no_tokenizer(facts)
        settings = self._config.worker
        enforce = self._config.has_prefill_pool and not may_prefill
        config = evolve(
            self._config,
            model_path=folder,
            model_name=name,
            enforce_disagg=self._config.enforce_disagg or enforce,
            worker=evolve(settings, namespace=f"{settings.namespace}-{slug(name)}"),
        )
        if folder is None:
            model = Model(name, ServerTokenizer(), checks_token_ids=False)
        else:
            with time_held():
                model = await to_thread.run_sync(config.load_model, abandon_on_cancel=True)
        lengths = [each for each in (model.context_length, facts.context_length) if each is not None]
        model = evolve(model, context_length=min(lengths, default=None))
        names = (name,) if self._config.model_name else (name, *facts.aliases)
        return ModelPool(model, names, facts, config, self)

    def offer(self, pool: ModelPool, graph: Any, tokens: Any) -> None:
        """Send requests for the names of a pool to this graph of it."""
        self.withdraw(pool)
        for name in pool.names:
            if name in self.switch.graphs:
                _log.warning(f"{pool.model.name} is not served as {name!r} too: another model has that name")
                continue
            self.switch.add(name, graph)
            self.tokens.add(name, tokens)
            self._owner[name] = pool

    def withdraw(self, pool: ModelPool) -> None:
        """Send no requests to the graph of a pool any more."""
        for name in [name for name, owner in self._owner.items() if owner is pool]:
            self.switch.remove(name)
            self.tokens.remove(name)
            del self._owner[name]


def folder_of(facts: ServerFacts, config: GraphConfig) -> Path | None:
    """Return the folder of a server's model: as configured, or where the server has it, if this machine has it too."""
    given = None if config.upstream is None else config.upstream.model_paths.get(facts.model)
    if (folder := given or config.model_path) is not None:
        return folder
    root = None if facts.root is None else Path(facts.root)
    return root if root is not None and root.is_absolute() and root.is_dir() else None


def _no_tokenizer(facts: ServerFacts) -> InvalidArgument:
    where = "shows no folder" if facts.root is None else f"has it from {facts.root!r}, which is no folder here"
    text = f"the tokenizer of {facts.model!r} is not on this machine: its server {where}"
    return InvalidArgument(text, field="model_path")


def slug(name: str) -> str:
    """Return a model's name as part of a namespace; a name that has to be changed for that gets a checksum."""
    plain = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")
    return plain if plain == name else f"{plain}-{hashlib.blake2s(name.encode(), digest_size=4).hexdigest()}"
