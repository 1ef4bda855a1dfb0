"""EngineSubscriber: an engine's KV events, received over ZeroMQ, as the events that a router follows.

    sockets of the engine ──► EngineFollower ──changes──► numbered by rank ──► events ──► KvRouter.follow

For engines that publish on their own and whose worker passes nothing on; no program here makes one.

Source: dynamo lib/llm/src/kv_router/publisher/zmq_listener.rs. Other than there it runs beside the router and not at
the worker.
"""

from __future__ import annotations

from pipeline.protocols.kv import KvEvent, RouterEvent
from pipeline.rx import Observable, Subject

from .engine_changes import EngineChange
from .engine_wire import WireLimits
from .follower import EngineFollower, ReplayLimits


class EngineSubscriber(EngineFollower):
    """Follows the engine of one worker at `endpoint` (`tcp://host:port`) in `run`; `events` is what it sends.

    The events of each rank are numbered from 1 without a gap. See `EngineFollower` for all else.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        worker_id: int,
        block_size_tokens: int,
        replay_endpoint: str | None = None,
        topic: bytes = b"",
        limits: WireLimits | None = None,
        replay_limits: ReplayLimits | None = None,
    ) -> None:
        super().__init__(
            endpoint,
            self._publish,
            block_size_tokens=block_size_tokens,
            replay_endpoint=replay_endpoint,
            topic=topic,
            limits=limits,
            replay_limits=replay_limits,
        )
        self.worker_id = worker_id
        self._last_ids: dict[int, int] = {}
        self._events: Subject[RouterEvent] = Subject()

    @property
    def events(self) -> Observable[RouterEvent]:
        """What comes from now on. A listener's error ends `run`."""
        return self._events

    def _publish(self, change: EngineChange) -> None:
        event_id = self._last_ids[change.dp_rank] = self._last_ids.get(change.dp_rank, 0) + 1
        event = KvEvent(event_id, change.change, change.dp_rank)
        self._events.on_next(RouterEvent(self.worker_id, event, change.storage_tier))
