"""Registration: one worker in discovery, with its card, until its withdrawal; and the publishers of its engine.

    card ──► serve: KV event logs, then the worker itself ──► withdraw: unpublish ─ grace ─ refuse new requests ──► cut

    engine ──KvEventPublisher──► RouterEvent ──┐        (the events also to the rank's log)
                                               ├──► event plane, in the scope of the worker's component
    engine ──SnapshotPublisher─► ActiveLoad, RankRates

Source: dynamo lib/backend-common/src/worker.rs, Worker and build_local_model; publisher.rs, setup_publishers;
metrics.rs; and lib/llm/src/local_model.rs. Other than there, nothing is ever fetched: a model name that is not a folder
makes a card of names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import anyio
from attrs import evolve

from pipeline import AsyncEngine, CannotConnect, Control, InvalidArgument, PenstockError
from pipeline.llm import card_from_folder, checked_file
from pipeline.loop import time_held
from pipeline.protocols import worker_label
from pipeline.protocols.card import (
    STOPS_PREFILLS,
    DisaggregatedEndpoint,
    LoraInfo,
    ModelDeploymentCard,
    ModelRuntimeConfig,
    PromptFormatterFile,
    TaggedFile,
)
from pipeline.protocols.kv import KV_EVENTS_TOPIC, KV_METRICS_TOPIC, KV_RATES_TOPIC

from ..llm import EngineConfig
from ..publishing import (
    EngineMetrics,
    KvEventLog,
    KvEventLogs,
    KvEventPublisher,
    MetricsBindings,
    PushSource,
    SnapshotPublisher,
)
from .config import WorkerConfig, served_name
from .lifecycle import engine_errors

if TYPE_CHECKING:
    from pipeline.network import EndpointId, Objects, Runtime, Served

_log = logging.getLogger(__name__)


class Registration:
    """The card and the served endpoints of one worker. `shutdown` cuts `serve` short once it is stopped."""

    def __init__(
        self, runtime: Runtime, endpoint: EndpointId, worker_id: int, kv_logs: KvEventLogs, shutdown: Control
    ) -> None:
        self.card: ModelDeploymentCard | None = None
        """The card, once it is made."""
        self.served: Served | None = None
        """The served endpoint; None before, and for a worker that was shut down before."""
        self._runtime, self._endpoint, self._worker_id = runtime, endpoint, worker_id
        self._kv_logs, self._shutdown = kv_logs, shutdown
        self._adapters: dict[str, Any] = {}  # their leases

    async def make_card(self, worker: WorkerConfig, engine: EngineConfig, environment: Mapping[str, str]) -> None:
        """Make the card, and store its files for front ends.

        Raises InvalidArgument as `card_of`, and Unavailable if the files cannot be stored.
        """
        if worker.write_model is None:
            card = await self._card(worker, engine, environment)
        else:
            with TemporaryDirectory(prefix="penstock-") as folder:
                await _write(worker.write_model, Path(folder))
                written = evolve(worker, model_name=folder)
                card = evolve(await self._card(written, engine, environment), source_path=worker.model_name)
        card.runtime_config.enable_local_indexer = self._kv_logs.answers
        self.card = card

    async def _card(
        self, worker: WorkerConfig, engine: EngineConfig, environment: Mapping[str, str]
    ) -> ModelDeploymentCard:
        """Return the card of the worker, its files stored as objects."""
        if model_folder(worker) is None and worker.custom_jinja_template is None:
            return card_of(worker, engine, environment)
        with time_held():  # its files are read whole, meanwhile other workers of this loop go on
            card = await anyio.to_thread.run_sync(card_of, worker, engine, environment)
        return await with_objects(card, self._runtime.objects)

    async def serve(self, engine: AsyncEngine[Any, Any], adapters: Collection[str] = ()) -> None:
        """Serve the engine and register it, unless a shutdown comes first. Raises as `Runtime.serve`."""
        with anyio.CancelScope() as scope:
            forget = self._shutdown.on_stop(scope.cancel)
            try:
                await self._kv_logs.serve(self._runtime)  # first: routers recover from it once they see the worker
                self.served = await self._runtime.serve(
                    self._endpoint, engine, card=self.card, instance_id=self._worker_id
                )
                await self.announce_adapters(adapters)
            finally:
                forget()

    async def announce_adapters(self, names: Collection[str]) -> None:
        """Have a card for each of these adapters, and for no other, while the worker is visible.

        They go with the worker's own. Raise as `Discovery.register_model`.
        """
        from pipeline.network import Model  # as in `Worker`

        if (served := self.served) is None or self.card is None:
            return
        for name in [name for name in self._adapters if name not in names]:
            lease = self._adapters.pop(name)
            served.leases = tuple(one for one in served.leases if one is not lease)
            await lease.release()
        for name in names:
            if name in self._adapters or not served.leases:
                continue
            card = evolve(self.card, lora=LoraInfo(name))
            model = Model(self._endpoint, self._worker_id, card, suffix=name)
            lease = await self._runtime.discovery.register_model(model)
            if not served.leases:  # it was withdrawn meanwhile
                await lease.release()
                return
            self._adapters[name] = lease
            served.leases = (*served.leases, lease)

    async def withdraw(self, grace_s: float) -> None:
        """Remove it from discovery, serve on for the grace period, then refuse new requests."""
        if self.served is None:
            return
        try:
            await self.served.unpublish()
        except PenstockError as error:
            text = "%s/%x could not be unregistered, its lease runs out: %s"
            _log.warning(text, self._endpoint.path, self._worker_id, error)
        except Exception:
            _log.warning("%s/%x could not be unregistered", self._endpoint.path, self._worker_id, exc_info=True)
        await self._kv_logs.withdraw()
        await anyio.sleep(grace_s)
        await self.served.withdraw()

    def abort(self) -> None:
        """Disappear at once, as in a crash."""
        if self.served is not None:
            self.served.abort()
        self._kv_logs.abort()


async def _write(write: Callable[[Path], None], folder: Path) -> None:
    """Write the files of a model into a folder. Raise InvalidArgument if that is not possible."""
    try:
        with time_held():
            await anyio.to_thread.run_sync(write, folder)
    except OSError as error:
        raise InvalidArgument(f"its text side cannot be written: {error}", field="model_name") from error


Connect = Callable[[str], Callable[[object], None]]
"""Returns the function that publishes on a topic."""


def attach_kv_events(
    sources: Sequence[PushSource],
    block_size_tokens: int | None,
    worker_id: int,
    connect: Connect,
    log_of: Callable[[int], KvEventLog | None] = lambda _: None,
) -> None:
    """Give each source the publisher of its rank, with the rank's log from `log_of`.

    Without a block size the events would have no meaning: none are published, with a warning. Raises InvalidArgument
    for a rank named twice, CannotConnect if there is no publisher, and what a source's `on_ready` raises.
    """
    if not sources:
        return
    if not block_size_tokens:
        _log.warning("the engine has KV events but no KV block size: they are not published")
        return
    _check_unique([source.dp_rank for source in sources])
    send = _connected(connect, KV_EVENTS_TOPIC)
    for source in sources:
        with engine_errors():
            source.on_ready(KvEventPublisher(worker_id, source.dp_rank, send, log_of(source.dp_rank)))


def attach_snapshots(
    bindings: MetricsBindings, worker_id: int, metrics: EngineMetrics, connect: Connect
) -> SnapshotPublisher | None:
    """Give the engine the publisher of its ranks' snapshots, if it names any, and return it.

    Raises as `attach_kv_events`.
    """
    if not bindings.dp_ranks:
        return None
    _check_unique(bindings.dp_ranks)
    send_loads, rates = _connected(connect, KV_METRICS_TOPIC), Later(connect, KV_RATES_TOPIC)
    publisher = SnapshotPublisher(worker_id, bindings.dp_ranks, metrics, send_loads, rates.publish)
    if bindings.on_publisher_ready is not None:
        with engine_errors():
            bindings.on_publisher_ready(publisher)
    return publisher


def worker_labels(endpoint: EndpointId, worker_id: int, *, model: str, model_name: str) -> dict[str, str]:
    """Return the labels of one worker's metrics; empty ones are left out."""
    labels: Mapping[str, str] = {
        "dynamo_namespace": endpoint.namespace,
        "dynamo_component": endpoint.component,
        "dynamo_endpoint": endpoint.endpoint,
        "worker_id": worker_label(worker_id),
        "model": model,
        "model_name": model_name,
    }
    return {name: text for name, text in labels.items() if text}


def _check_unique(ranks: Sequence[int]) -> None:
    if len(set(ranks)) != len(ranks):
        raise InvalidArgument(f"each rank must be named once, got {list(ranks)}", field="dp_rank")


class Later:
    """A publisher that is there from its first event on: most engines have none for this topic."""

    def __init__(self, connect: Connect, topic: str) -> None:
        self._connect, self._topic = connect, topic
        self._send: Callable[[object], None] | None = None

    def publish(self, what: object) -> None:
        """Publish it. Raise CannotConnect if there is no publisher."""
        if self._send is None:
            self._send = _connected(self._connect, self._topic)
        self._send(what)


def _connected(connect: Connect, topic: str) -> Callable[[object], None]:
    try:
        return connect(topic)
    except Exception as error:
        raise CannotConnect(f"there is no publisher for {topic}: {error}") from error


DEFAULT_BLOCK_SIZE_TOKENS = 16
"""Block size in the card of an engine without KV blocks: the field must not be empty."""


def model_folder(worker: WorkerConfig) -> Path | None:
    """Return the folder of the worker's model; None if its name is not a path of this machine.

    Raises InvalidArgument if the path cannot be examined.
    """
    if not worker.model_name:
        return None
    path = Path(worker.model_name)
    try:
        return path if path.exists() else None
    except OSError as error:
        raise InvalidArgument(f"cannot be examined: {error}", field="model_name") from error


def card_of(
    worker: WorkerConfig, engine: EngineConfig, environment: Mapping[str, str] | None = None
) -> ModelDeploymentCard:
    """Return the card of the worker's model, with the files of its folder if there is one, which are read whole.

    Raises InvalidArgument if the model has no name, or its folder or template cannot be used.
    """
    name = served_name(worker, engine)
    if not name:
        raise InvalidArgument("the engine gives no name of its model", field="model")
    mode = worker.disaggregation_mode
    try:
        card = _base(worker, engine, name)
        template = card.chat_template_file
        if worker.custom_jinja_template is not None:
            custom = checked_file(worker.custom_jinja_template)
            template = PromptFormatterFile("hf_chat_template", custom, is_custom=True)
    except OSError as error:
        raise InvalidArgument(f"the files of {name} cannot be read: {error}", field="model_name") from error
    return evolve(
        card,
        chat_template_file=template,
        model_type=worker.model_type,
        model_input=worker.model_input,
        worker_type=mode.worker_type,
        needs=mode.needs(route_to_encoder=worker.route_to_encoder, may_prefill=worker.may_prefill),
        aliases=list(engine.model_aliases),
        byte_level=worker.byte_level,
        tokenizes=worker.tokenizes,
        runtime_config=runtime_config_of(worker, engine, environment or {}),
    ).with_projected_context()


_FILES = ("model_info", "tokenizer", "prompt_formatter", "chat_template_file", "gen_config")
"""The fields of a card that are files."""


async def with_objects(card: ModelDeploymentCard, objects: Objects) -> ModelDeploymentCard:
    """Return the card with its files stored as objects, each with the name of its own.

    Raise InvalidArgument if one of them cannot be read, Unavailable if it cannot be stored.
    """
    stored: dict[str, Any] = {}
    for field in _FILES:
        tagged: TaggedFile | None = getattr(card, field)
        if tagged is not None:
            try:
                name = await objects.put(Path(tagged.file.path))
            except OSError as error:
                text = f"{tagged.file.path} of {card.display_name} cannot be read: {error}"
                raise InvalidArgument(text, field="model_name") from error
            stored[field] = evolve(tagged, file=evolve(tagged.file, size=name.size_bytes, sha256=name.sha256))
    return evolve(card, **stored) if stored else card


def _base(worker: WorkerConfig, engine: EngineConfig, name: str) -> ModelDeploymentCard:
    block_size = engine.kv_cache_block_size or DEFAULT_BLOCK_SIZE_TOKENS
    if (folder := model_folder(worker)) is not None:
        return card_from_folder(folder, kv_cache_block_size=block_size, display_name=name)
    return evolve(
        ModelDeploymentCard.named(name, kv_cache_block_size=block_size), source_path=worker.model_name or None
    )


def runtime_config_of(worker: WorkerConfig, engine: EngineConfig, environment: Mapping[str, str]) -> ModelRuntimeConfig:
    """Return the runtime part of the card; values that the engine does not advertise are left out."""
    endpoint = None
    if engine.bootstrap_host is not None and engine.bootstrap_port is not None:
        endpoint = DisaggregatedEndpoint(engine.bootstrap_host, engine.bootstrap_port)
    config = ModelRuntimeConfig(
        context_length=engine.context_length,
        total_kv_blocks=engine.total_kv_blocks,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        tool_call_parser=worker.tool_call_parser,
        reasoning_parser=worker.reasoning_parser,
        exclude_tools_when_tool_choice_none=worker.exclude_tools_when_tool_choice_none,
        data_parallel_start_rank=engine.data_parallel_start_rank or 0,
        data_parallel_size=1 if engine.data_parallel_size is None else engine.data_parallel_size,
        kv_event_publishing_enabled=engine.publishes_kv_events,
        enable_local_indexer=worker.enable_local_indexer and worker.disaggregation_mode.may_index,
        runtime_data=engine.runtime_data | ({STOPS_PREFILLS: True} if engine.stops_prefills else {}),
        disaggregated_endpoint=endpoint,
    )
    config.fill_from_environment(environment)
    return config
