"""ModelPools: the servers of each model, and the graph in front of them, which a Switch picks by the model's name.

facts of a server ──► its model's pool ──► workers at <namespace>-<model>/backend/generate, and /prefill/
first worker      ──► the pool's graph is opened and offered
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread
from attrs import evolve

from engines import DisaggregationMode
from operators import Model
from operators.kv import WorkerType
from pipeline import InvalidArgument, PenstockError
from pipeline.loop import time_held
from pipeline.network import EndpointId, Runtime

from .adapters import Adapters
from .config import GraphConfig, HostOptions
from .model_graph import AGAIN_S, ModelGraph, Offers
from .server_prompts import ServerPrompts, has_text_at_servers, model_at_servers
from .upstream_config import no_tokenizer

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from engines.upstream import ServerFacts, VllmText

_log = logging.getLogger(__name__)


class ModelPool(ModelGraph):
    """The servers of one model; `keep` opens its graph once a worker is there, until cancelled."""

    adapters: Adapters

    def __init__(
        self, model: Model, names: tuple[str, ...], facts: ServerFacts, config: GraphConfig, pools: ModelPools
    ) -> None:
        worker = config.worker_settings(model, config.modes[0])
        endpoint = EndpointId(worker.namespace, worker.component, worker.endpoint)
        role: WorkerType = "decode" if config.modes[0] is DisaggregationMode.DECODE else "aggregated"
        super().__init__(
            model,
            names,
            endpoint,
            role,
            config,
            pools.hosting,
            pools.runtime,
            lambda: pools.offers.offer(self, self.graphs),
            Adapters(self.renew),
        )
        self.block_size_tokens = facts.block_size_tokens
        self.text_servers: list[VllmText] = []
        """The servers that are there now, if it is they that have the tokenizer."""
        self.failure: InvalidArgument | None = None
        """Why its graph cannot be opened."""
        self._has_worker = anyio.Event()
        if self.has_server_text:
            limits, lenient = config.request_limits, config.ignore_unsupported
            self.prompts = ServerPrompts(lambda: self.text_servers, limits, ignore_unsupported=lenient)

    def add(self, url: str, facts: ServerFacts, mode: DisaggregationMode) -> None:
        """A worker of this server is in service. A block size unlike that of the others is logged."""
        if facts.block_size_tokens != self.block_size_tokens:
            sizes = f"{facts.block_size_tokens} tokens, others of {self.name} have {self.block_size_tokens}"
            _log.warning(f"{url} has KV blocks of {sizes}: its cache is not seen")
        (self.has_prefill if mode is DisaggregationMode.PREFILL else self._has_worker).set()

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
        """Wait until the graph is open, with its prefill stage if a prefill server is there; or never will be."""
        if self.failure is None and self.has_prefill.is_set() and self._has_worker.is_set():
            await self.has_prefill_stage.wait()
        await self.is_open.wait()

    async def keep(self) -> None:
        """Keep the graph open until cancelled. Return if it can never be opened, which sets all events."""
        while True:
            await self._has_worker.wait()
            try:
                await self.run()
            except InvalidArgument as error:
                _log.error(f"{self.name} cannot be served: {error}")
                self.failure = error
                self.is_open.set()
                self.has_prefill_stage.set()
                return
            except PenstockError as error:  # the worker left again before its card was read
                _log.warning(f"{self.name} is not served yet: {error}")
                await anyio.sleep(AGAIN_S)

    @property
    def has_server_text(self) -> bool:
        """Whether its servers have the tokenizer, and this machine has not."""
        return has_text_at_servers(self.model)


class ModelPools:
    """The pools of all models, used in one loop. `tasks` run their graphs, and end them when cancelled."""

    def __init__(self, config: GraphConfig, hosting: HostOptions, runtime: Runtime, tasks: TaskGroup) -> None:
        self.hosting, self.runtime = hosting, runtime
        self.offers = Offers()
        """The graphs by model name."""
        self.pools: dict[str, ModelPool] = {}
        """The pools by the name that clients have for the model."""
        self._config, self._tasks = config, tasks
        self._loading = anyio.Lock()

    def needs_server_text(self, facts: ServerFacts) -> bool:
        """Return whether the tokenizer of a server's model is only there."""
        pool = self.pools.get(self._config.model_name or facts.model)
        return folder_of(facts, self._config) is None if pool is None else pool.has_server_text

    async def pool_of(self, facts: ServerFacts, *, may_prefill: bool, has_text: bool) -> ModelPool:
        """Return the pool of a server's model, made at the first one of it; `has_text`: whether its engine gives text.

        Beside prefill servers a pool whose others cannot prefill is as with `enforce_disagg`.
        Raise InvalidArgument if the model's tokenizer is nowhere on this machine, or cannot be read, and for an engine
        without text where that is needed.
        """
        name = self._config.model_name or facts.model
        async with self._loading:  # two servers of one model may be found at the same time
            if (pool := self.pools.get(name)) is None:
                pool = self.pools[name] = await self._made(name, facts, may_prefill, has_text)
                self._tasks.start_soon(pool.keep)
        if pool.has_server_text and not has_text:
            raise no_tokenizer(facts)
        return pool

    async def _made(self, name: str, facts: ServerFacts, may_prefill: bool, has_text: bool) -> ModelPool:
        if (folder := folder_of(facts, self._config)) is None and not has_text:
            raise no_tokenizer(facts)
        enforce = self._config.has_prefill_pool and not may_prefill
        config = evolve(
            self._config.in_namespace_of(name),
            model_path=folder,
            model_name=name,
            enforce_disagg=self._config.enforce_disagg or enforce,
        )
        if folder is None:
            model = text_at_servers(name, config)
        else:
            with time_held():
                model = await to_thread.run_sync(config.load_model, abandon_on_cancel=True)
        lengths = [each for each in (model.context_length, facts.context_length) if each is not None]
        model = evolve(model, context_length=min(lengths, default=None))
        names = (name,) if self._config.model_name else (name, *facts.aliases)
        return ModelPool(model, names, facts, config, self)


def folder_of(facts: ServerFacts, config: GraphConfig) -> Path | None:
    """Return the folder of a server's model: as configured, or where the server has it, if this machine has it too."""
    given = None if config.upstream is None else config.upstream.model_paths.get(facts.model)
    if (folder := given or config.model_path) is not None:
        return folder
    root = None if facts.root is None else Path(facts.root)
    return root if root is not None and root.is_absolute() and root.is_dir() else None


def text_at_servers(name: str, config: GraphConfig) -> Model:
    """Return the model of servers that make its texts. Raise InvalidArgument for a chat template beside theirs."""
    if config.worker.custom_jinja_template is not None:
        text = f"the chats of {name!r} are rendered by its servers: another template needs its folder, by --model-path"
        raise InvalidArgument(text, field="custom_jinja_template")
    return model_at_servers(name)
