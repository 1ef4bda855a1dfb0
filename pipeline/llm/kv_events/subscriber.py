"""EngineSubscriber: an engine's KV events, received over ZeroMQ, as the events that a router follows.

    PUB socket of the engine ──► SUB socket ──► decode_frames ──► EngineEvents
                                              DuplicateFilter, merged ◄──┘ └──► events ──► KvRouter.follow

For engines that publish on their own and whose worker passes nothing on; no program here makes one.
One of the two doors of pyzmq (extra `zmq`).

Source: dynamo lib/llm/src/kv_router/publisher/zmq_listener.rs. Other than there it runs beside the router and not at
the worker, waits for the socket in the loop itself, and notices that an engine began anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from pipeline import ContractViolation, InvalidArgument
from pipeline.errors import InvalidMessage
from pipeline.protocols.kv import KvCleared, KvEvent, KvEventData, RouterEvent, StorageTier
from pipeline.rx import Observable, Subject

from .engine_changes import DuplicateFilter, EngineChange, EngineEvents, Filtered, merged
from .engine_wire import EngineBatch, RefusalReason, RefusedMessage, WireLimits, decode_frames

if TYPE_CHECKING:
    import zmq

_log = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 100
"""So many messages are taken before other tasks have their turn."""
_WARNINGS = 3
_LOOK_EVERY_S = 0.5
"""How often at least the connection is looked at."""


class EngineSubscriber:
    """Follows the engine of one worker at `endpoint` (`tcp://host:port`) in `run`; `events` is what it sends.

    The events of each rank are numbered from 1 without a gap. `topic` is what the engine's topics begin with. An engine
    whose sequence goes back has restarted: each rank seen before is cleared first. What was published before the
    connection stood, or faster than it was taken, is lost: seen by its sequence, it is counted in `lost_batches`, and
    the router's index may differ from the cache until those blocks go. `filtered` counts by reason what is not
    for the router, `malformed` the messages that were none, `refused` by reason those over a limit of `limits`. All of
    these leave the connection as it is, or it is made anew; what was in them counts as lost with the next message. Used
    in one loop.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        worker_id: int,
        block_size_tokens: int,
        topic: bytes = b"",
        limits: WireLimits | None = None,
    ) -> None:
        self.endpoint, self.worker_id, self.topic = endpoint, worker_id, topic
        self.limits = WireLimits() if limits is None else limits
        self.malformed = 0
        self.refused: Counter[RefusalReason] = Counter()
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
            watch = _ConnectionWatch(zmq, socket)
            descriptor: Any = socket.getsockopt(zmq.FD)
            while True:
                # The descriptor only signals a change, so messages that are there are taken before it is waited for.
                for _ in range(_MESSAGES_PER_TURN):
                    try:
                        frames = socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        with anyio.move_on_after(_LOOK_EVERY_S):
                            await anyio.wait_readable(descriptor)
                        break
                    self.receive(frames)
                else:
                    await checkpoint()
                if watch.is_cut():
                    self._refuse("too_large", "the connection broke over one, or over bytes that are no message")
                    self._connect_again(zmq, socket)
        finally:
            self._runs = False
            context.destroy(linger=0)

    def receive(self, frames: list[bytes]) -> None:
        """Takes one message of the engine, however it came."""
        try:
            batch = decode_frames(frames, self.limits)
        except RefusedMessage as error:
            self._refuse(error.reason, str(error))
            return
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

    def _refuse(self, reason: RefusalReason, text: str) -> None:
        self.refused[reason] += 1
        if self.refused[reason] <= _WARNINGS:
            _log.warning("a message from %s is refused, %s: %s", self.endpoint, reason, text)

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
        socket.setsockopt(zmq.MAXMSGSIZE, self.limits.message_bytes)
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            raise InvalidArgument(f"{self.endpoint!r}: {error}", field="endpoint", cause=error) from error
        return socket

    def _connect_again(self, zmq: Any, socket: zmq.Socket[bytes]) -> None:
        with suppress(zmq.ZMQError):
            socket.disconnect(self.endpoint)  # else connecting does nothing
        socket.connect(self.endpoint)


class _ConnectionWatch:
    """Sees that ZeroMQ has given up a connection, as it does when a frame is over the limit or is none.

    It connects again by itself when the other side goes: its next event is the new attempt then. After a frame that it
    refuses it does not.
    """

    def __init__(self, zmq: Any, socket: zmq.Socket[bytes]) -> None:
        events = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
        self._zmq, self._monitor = zmq, socket.get_monitor_socket(events)
        self._lost_at_s: float | None = None

    def is_cut(self) -> bool:
        """Whether the connection has been lost for a while and nothing is done about it. To be called now and then."""
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._lost_at_s = anyio.current_time() if event == self._zmq.EVENT_DISCONNECTED else None
        if self._lost_at_s is None or anyio.current_time() - self._lost_at_s < _LOOK_EVERY_S / 2:
            return False
        self._lost_at_s = None
        return True


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        text = "KV events over ZeroMQ need pyzmq: install penstock[zmq]"
        raise InvalidArgument(text, field="endpoint", cause=error) from error
    return zmq
