"""Where a worker's KV events come from, and how they reach the routers.

    engine ──publish(change)──► KvEventPublisher ──RouterEvent──► event plane

Source: dynamo lib/backend-common/src/publisher.rs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from attrs import frozen

from pipeline.protocols.kv_events import KvEvent, KvEventData, RouterEvent


class KvEventPublisher:
    """Publishes the changes of one rank's cache, numbered from 1 without a gap."""

    def __init__(self, worker_id: int, dp_rank: int, send: Callable[[RouterEvent], object]) -> None:
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.last_event_id = 0
        self._send = send

    def publish(self, change: KvEventData) -> None:
        """Sends the change to whoever listens. Does not wait; call it on one thread, in the order of the changes."""
        self.last_event_id += 1
        self._send(RouterEvent(self.worker_id, KvEvent(self.last_event_id, change, self.dp_rank)))


@frozen
class PushSource:
    """The engine pushes its events itself: `on_ready` is given the publisher of the rank, once, before serving."""

    on_ready: Callable[[KvEventPublisher], None]
    dp_rank: int = 0


KvEventSource: TypeAlias = PushSource
