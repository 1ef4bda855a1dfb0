"""EngineSubscriber: an engine's KV events, heard over ZeroMQ, as the events that a router follows.

    PUB socket of the engine ──► SUB socket ──► decode_frames ──► EngineEvents
                                              DuplicateFilter, merged ◄──┘ └──► events ──► KvRouter.follow

For engines that publish on their own and whose worker passes nothing on. One of the two doors of pyzmq (extra `zmq`).
Source: dynamo lib/llm/src/kv_router/publisher/zmq_listener.rs. Other than there it runs beside the router and not at
the worker, waits for the socket in the loop itself, and notices that an engine began anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from pipeline import ContractViolation, InvalidArgument
from pipeline.errors import InvalidMessage
from pipeline.protocols.kv_events import KvCleared, KvEvent, KvEventData, RouterEvent, StorageTier
from pipeline.rx import Observable, Subject

from .engine_events import EngineChange, EngineEvents, Filtered
from .engine_wire import EngineBatch, decode_frames
from .event_merge import DuplicateFilter, merged

if TYPE_CHECKING:
    import zmq

_log = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 100
"""So many messages are taken before other tasks have their turn."""
_WARNINGS = 3


class EngineSubscriber:
    """Hears the engine of one worker at `endpoint` (`tcp://host:port`) while `run` does; `events` is what it says.

    The events of each rank are numbered from 1 without a gap. `topic` is what the engine's topics begin with. An engine
    whose sequence goes back began anew: each rank heard before is cleared first. What was published before the
    connection stood, or faster than it was taken, is lost: seen by its sequence, it is counted in `lost_batches`, and
    what the router believes may differ from the cache until those blocks go. `filtered` counts by reason what is not
    for the router, `malformed` the messages that were none. Used in one loop.
    """

    def __init__(self, endpoint: str, *, worker_id: int, block_size_tokens: int, topic: bytes = b"") -> None:
        self.endpoint, self.worker_id, self.topic = endpoint, worker_id, topic
        self.malformed = 0
        self.filtered: Counter[str] = Counter()
        self._converter = EngineEvents(block_size_tokens)
        self._duplicates = DuplicateFilter()
        self._lost_before = 0
        self._last_sequence = -1
        self._last_ids: dict[int, int] = {}
        self._events: Subject[RouterEvent] = Subject()
        self._runs = False

    @property
    def events(self) -> Observable[RouterEvent]:
        """What comes from now on. A listener's error ends `run`."""
        return self._events

    @property
    def lost_batches(self) -> int:
        """How many of the engine's messages did not arrive."""
        return self._lost_before + self._converter.lost_batches

    async def run(self) -> None:
        """Connects, and again after each loss, and hands on what comes, until it is cancelled.

        Raises InvalidArgument without pyzmq and for an endpoint that is none, ContractViolation while it runs already.
        """
        if self._runs:
            raise ContractViolation("the subscriber runs already")
        zmq = _zmq()
        self._runs = True
        context = zmq.Context()
        try:
            socket = self._connected(zmq, context)
            descriptor: Any = socket.getsockopt(zmq.FD)
            while True:
                # The descriptor only tells of a change, so what is there is taken before it is waited for.
                for _ in range(_MESSAGES_PER_TURN):
                    try:
                        frames = socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        await anyio.wait_readable(descriptor)
                        break
                    self.receive(frames)
                else:
                    await checkpoint()
        finally:
            self._runs = False
            context.destroy(linger=0)

    def receive(self, frames: list[bytes]) -> None:
        """Takes one message of the engine, however it came."""
        try:
            batch = decode_frames(frames)
        except InvalidMessage as error:
            self.malformed += 1
            if self.malformed <= _WARNINGS:
                _log.warning("a message from %s cannot be read: %s", self.endpoint, error)
            return
        self._note(batch)
        changes: list[EngineChange] = []
        for item in self._converter.convert(batch):
            if isinstance(item, Filtered):
                self.filtered[item.reason] += 1
            elif (passed := self._duplicates.passed(item)) is not None:
                changes.append(passed)
        for change in merged(changes):
            self._publish(change.dp_rank, change.change, change.storage_tier)

    def _note(self, batch: EngineBatch) -> None:
        """Begins anew if the engine did."""
        if batch.sequence <= self._last_sequence:
            self._lost_before = self.lost_batches
            self._converter = EngineEvents(self._converter.block_size_tokens)
            self._duplicates = DuplicateFilter()
            for dp_rank in self._last_ids:
                self._publish(dp_rank, KvCleared())
        self._last_sequence = batch.sequence

    def _publish(self, dp_rank: int, change: KvEventData, tier: StorageTier = "device") -> None:
        event_id = self._last_ids[dp_rank] = self._last_ids.get(dp_rank, 0) + 1
        self._events.on_next(RouterEvent(self.worker_id, KvEvent(event_id, change, dp_rank), tier))

    def _connected(self, zmq: Any, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.SUB)
        socket.subscribe(self.topic)
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            raise InvalidArgument(f"{self.endpoint!r}: {error}", field="endpoint", cause=error) from error
        return socket


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        text = "KV events over ZeroMQ need pyzmq: install penstock[zmq]"
        raise InvalidArgument(text, field="endpoint", cause=error) from error
    return zmq
