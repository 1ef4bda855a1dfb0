"""Where a worker's KV events come from, and how they reach the routers.

    engine ──publish(change)──► KvEventPublisher ──RouterEvent──► event plane
                                      └── numbered here, or by the log of the rank

Source: dynamo lib/backend-common/src/publisher.rs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from pipeline.loop import Home
from pipeline.protocols.kv_events import KvEvent, KvEventData, RouterEvent

if TYPE_CHECKING:
    from .kv_recovery import KvEventLog

_log = logging.getLogger(__name__)


class KvEventPublisher:
    """Publishes the changes of one rank's cache, numbered from 1 without a gap, or as its `log` numbers them.

    A log is written, and its events are sent, in the thread the publisher was made in. What either raises is logged: a
    change the log refuses is not published, one that cannot be sent is there for routers that ask.
    """

    def __init__(
        self, worker_id: int, dp_rank: int, send: Callable[[RouterEvent], object], log: KvEventLog | None = None
    ) -> None:
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.last_event_id = 0
        self._send = send
        self._kept_in = log
        self._home = Home()

    def publish(self, change: KvEventData) -> None:
        """Sends the change to whoever listens. Does not wait; call it on one thread, in the order of the changes."""
        if (log := self._kept_in) is None:
            self._publish(RouterEvent(self.worker_id, KvEvent(self.last_event_id + 1, change, self.dp_rank)))
        else:
            self._home.run(lambda: self._record(log, change))  # where routers are answered from it

    def _record(self, log: KvEventLog, change: KvEventData) -> None:
        try:
            self._publish(log.record(change))
        except Exception:  # this may be a callback of the loop, where it would reach nobody, or end the loop
            _log.exception("a change of rank %d is not published", self.dp_rank)

    def _publish(self, event: RouterEvent) -> None:
        self.last_event_id = event.event.event_id
        self._send(event)


@frozen
class PushSource:
    """The engine pushes its events itself: `on_ready` is given the publisher of the rank, once, before serving."""

    on_ready: Callable[[KvEventPublisher], None]
    dp_rank: int = 0


KvEventSource: TypeAlias = PushSource
