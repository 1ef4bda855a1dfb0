"""EventFeed: the changes of a rank's cache over ZeroMQ, a batch for each pass.

    block pool ──change, tokens──► feed ──flush──► ZmqPublisher ──► whoever subscribed

Source: dynamo lib/mocker/src/services/zmq_events.rs, the raw event sink of a scheduler. Other than there, events come
out in the order of the changes whatever thread asks, for there is only one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.protocols.kv_events import KvEventData

from .args import MockEngineArgs
from .blocks import BlockPool
from .zmq_events import EngineEvent
from .zmq_publisher import ZmqPublisher


class EventFeed:
    """Collects what a pool tells it from now on, and publishes it when it is flushed. Whoever makes it closes it."""

    def __init__(self, pool: BlockPool, publisher: ZmqPublisher, block_size_tokens: int) -> None:
        self.publisher = publisher
        self._pool = pool
        self._block_size_tokens = block_size_tokens
        self._events: list[EngineEvent] = []
        pool.on_event_with_tokens = self._add

    @classmethod
    def bound(cls, pool: BlockPool, args: MockEngineArgs, dp_rank: int, clock: Callable[[], float]) -> EventFeed | None:
        """The feed of a rank on the ports its arguments name; None if they name none, or events are of no use.

        Raises as `ZmqPublisher`: InvalidArgument without pyzmq, Unavailable for a port that is taken.
        """
        if args.zmq_kv_events_port is None or not args.publishes_kv_events:
            return None
        publisher = ZmqPublisher(
            args.zmq_kv_events_port,
            args.zmq_replay_port,
            dp_rank=dp_rank,
            block_size_tokens=args.block_size,
            clock=clock,
        )
        return cls(pool, publisher, args.block_size)

    def flush(self) -> None:
        """Publishes what was collected as one batch; nothing if there is nothing."""
        if self._events:
            events, self._events = self._events, []
            self.publisher.publish(events)

    def close(self) -> None:
        """Ends the sockets; later changes are nobody's business. Idempotent."""
        self._pool.on_event_with_tokens = None
        self._events = []
        self.publisher.close()

    def _add(self, change: KvEventData, tokens: Sequence[int]) -> None:
        size = self._block_size_tokens
        blocks = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        self._events.append(EngineEvent(change, blocks))
