"""Registration: one worker in discovery, from its card to its withdrawal; and the publishers of its engine.

    card ──► serve: KV event logs, then the worker itself ──► withdraw: unpublish ─ grace ─ refuse new requests ──► cut

    engine ──KvEventPublisher──► RouterEvent ──┐        (the events also to the rank's log)
                                               ├──► event plane, in the scope of the worker's component
    engine ──SnapshotPublisher─► ActiveLoad ───┘

Source: dynamo lib/backend-common/src/worker.rs, Worker; publisher.rs, setup_publishers; and metrics.rs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from pipeline import AsyncEngine, CannotConnect, Control, InvalidArgument
from pipeline.protocols import worker_label
from pipeline.protocols.kv import KV_EVENTS_TOPIC, KV_METRICS_TOPIC

from ..kv_events import KvEventLog, KvEventLogs, KvEventPublisher, KvEventSource
from ..llm import EngineConfig
from ..metrics import EngineMetrics, MetricsBindings, SnapshotPublisher
from .card import card_of, model_folder
from .config import WorkerConfig
from .lifecycle import engine_errors

if TYPE_CHECKING:
    from pipeline.network import EndpointId, Runtime, Served
    from pipeline.protocols.card import ModelDeploymentCard

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

    async def make_card(self, worker: WorkerConfig, engine: EngineConfig, environment: Mapping[str, str]) -> None:
        """Make the card. Raises InvalidArgument as `card_of`."""
        if model_folder(worker) is None and worker.custom_jinja_template is None:
            card = card_of(worker, engine, environment)
        else:  # its files are read whole, meanwhile other workers of this loop go on
            card = await anyio.to_thread.run_sync(card_of, worker, engine, environment)
        card.runtime_config.enable_local_indexer = self._kv_logs.answers
        self.card = card

    async def serve(self, engine: AsyncEngine[Any, Any]) -> None:
        """Serve the engine and register it, unless a shutdown comes first. Raises as `Runtime.serve`."""
        with anyio.CancelScope() as scope:
            forget = self._shutdown.on_stop(scope.cancel)
            try:
                await self._kv_logs.serve(self._runtime)  # first: routers recover from it once they see the worker
                self.served = await self._runtime.serve(
                    self._endpoint, engine, card=self.card, instance_id=self._worker_id
                )
            finally:
                forget()

    async def withdraw(self, grace_s: float) -> None:
        """Remove it from discovery, serve on for the grace period, then refuse new requests."""
        if self.served is None:
            return
        try:
            await self.served.unpublish()
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


Connect = Callable[[str], Callable[[object], None]]
"""Returns the function that publishes on a topic."""


def attach_kv_events(
    sources: Sequence[KvEventSource],
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


def attach_snapshots(bindings: MetricsBindings, worker_id: int, metrics: EngineMetrics, connect: Connect) -> None:
    """Give the engine the publisher of its ranks' snapshots, if it names any. Raises as `attach_kv_events`."""
    if not bindings.dp_ranks:
        return
    _check_unique(bindings.dp_ranks)
    publisher = SnapshotPublisher(worker_id, bindings.dp_ranks, metrics, _connected(connect, KV_METRICS_TOPIC))
    if bindings.on_publisher_ready is not None:
        with engine_errors():
            bindings.on_publisher_ready(publisher)


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


def _connected(connect: Connect, topic: str) -> Callable[[object], None]:
    try:
        return connect(topic)
    except Exception as error:
        raise CannotConnect(f"there is no publisher for {topic}: {error}") from error
