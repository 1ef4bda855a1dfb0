"""Publishers of a worker's engine: its KV events and its load for routers; and the labels of its metrics.

    engine ──KvEventPublisher──► RouterEvent ──┐        (the events also to the rank's log)
                                               ├──► event plane, in the scope of the worker's component
    engine ──SnapshotPublisher─► ActiveLoad ───┘

Source: dynamo lib/backend-common/src/publisher.rs, setup_publishers, and metrics.rs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline import CannotConnect, InvalidArgument
from pipeline.protocols import worker_label
from pipeline.protocols.kv import KV_EVENTS_TOPIC, KV_METRICS_TOPIC

from ..kv_events import KvEventPublisher, KvEventSource
from ..metrics import EngineMetrics, MetricsBindings, SnapshotPublisher
from .lifecycle import engine_errors

if TYPE_CHECKING:
    from pipeline.network import EndpointId

    from ..kv_events import KvEventLog

_log = logging.getLogger(__name__)

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
