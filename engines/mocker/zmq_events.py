"""KV events over ZeroMQ, as vLLM publishes them: one batch per step, and a replay of the last ones.

    block pool ──change, tokens──► EventFeed ──flush──► ZmqPublisher ─► PUB socket ─► subscribers
                                                            ring ◄──── ROUTER socket ◄─► replays, from a sequence on

    published    topic (empty) │ sequence, u64 big-endian │ MessagePack of [timestamp_s, [event, ...], dp_rank]
    requested    identity │ empty │ first sequence wanted
    replayed     identity │ empty │ topic (empty) │ sequence │ batch, for each kept; then the same with sequence -1

Source: dynamo lib/mocker/src/services/zmq_events.rs. Other than there, a cleared cache is an event too, tokens that do
not fit their blocks are an error instead of a panic, a malformed request for a replay is not answered, sending needs no
task, and only the replay socket has a thread. The one door of pyzmq (extra `zmq`), imported when a publisher is made.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from attrs import frozen

from pipeline import InvalidArgument, StreamClosed, Unavailable
from pipeline.protocols.kv import KvCleared, KvEventData, KvRemoved, StorageTier
from pipeline.wire import to_msgpack

from .args import MockEngineArgs
from .scheduling import BlockPool

if TYPE_CHECKING:
    import zmq

_log = logging.getLogger(__name__)

REPLAY_BATCHES = 10_000
"""How many of the last batches can be replayed."""
_TOPIC = b""
_SEQUENCE_BYTES = 8
_REQUEST_FRAMES = 3
_END_OF_REPLAY = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
"""In the place of a sequence: nothing follows."""
_MEDIUM: dict[StorageTier, dict[str, Any]] = {
    "device": {},
    "host_pinned": {"medium": "CPU_PINNED"},
    "disk": {"medium": "DISK"},
    "external": {"medium": "EXTERNAL"},
}
"""The field for the tier of blocks."""
_GROUP = {"group_idx": 0}
"""The attention group of every block: a mock worker has one."""
_PORT_END = 2**16
_SUBSCRIBER_QUEUE_MESSAGES = 1000
"""A subscriber further behind than this misses batches (ZeroMQ's own default)."""
_STOP = "inproc://stop"

Frames = list[bytes]


@frozen
class EngineEvent:
    """A change of the cache as an engine publishes it: with all tokens of the stored blocks, and their tier."""

    data: KvEventData
    token_ids: Sequence[int] = ()
    tier: StorageTier = "device"

    def to_plain(self, block_size_tokens: int) -> dict[str, Any]:
        """Return the event in vLLM's form. Raises InvalidArgument if a stored event lacks tokens of a block."""
        data, place = self.data, _MEDIUM[self.tier] | _GROUP
        if isinstance(data, KvCleared):
            return {"type": "AllBlocksCleared"}
        if isinstance(data, KvRemoved):
            return {"type": "BlockRemoved", "block_hashes": data.block_hashes} | place
        if len(self.token_ids) != len(data.blocks) * block_size_tokens:
            expected = f"{len(data.blocks)} blocks of {block_size_tokens} tokens"
            raise InvalidArgument(f"expected {expected}, got {len(self.token_ids)} tokens", field="token_ids")
        return {
            "type": "BlockStored",
            "block_hashes": [block.block_hash for block in data.blocks],
            "parent_block_hash": data.parent_hash,
            "token_ids": list(self.token_ids),
            "block_size": block_size_tokens,
        } | place


def encode_batch(timestamp_s: float, events: Sequence[EngineEvent], block_size_tokens: int, dp_rank: int = 0) -> bytes:
    """Return one batch as MessagePack. Raises as `EngineEvent.to_plain`."""
    return to_msgpack([timestamp_s, [event.to_plain(block_size_tokens) for event in events], dp_rank])


def published(sequence: int, batch: bytes) -> Frames:
    """Return the message of a batch."""
    return [_TOPIC, _bytes_of(sequence), batch]


def _bytes_of(sequence: int) -> bytes:
    return sequence.to_bytes(_SEQUENCE_BYTES, "big")


class ReplayRing:
    """The last batches with their sequences, which count up from 0; the oldest make room for new ones."""

    def __init__(self, batches_max: int = REPLAY_BATCHES) -> None:
        self._next_sequence = 0
        self._batches: deque[bytes] = deque(maxlen=batches_max)

    def append(self, batch: bytes) -> int:
        """Keep the batch and return its sequence."""
        self._batches.append(batch)
        self._next_sequence += 1
        return self._next_sequence - 1

    def answer(self, request: Sequence[bytes]) -> list[Frames]:
        """Return the messages that answer a request for a replay; none if it is malformed.

        Batches that are not kept any more are left out: the reader sees it by the first sequence.
        """
        if len(request) != _REQUEST_FRAMES or len(request[-1]) != _SEQUENCE_BYTES:
            return []
        to, first = [request[0], b"", _TOPIC], int.from_bytes(request[-1], "big")
        kept = enumerate(self._batches, self._next_sequence - len(self._batches))
        batches = [[*to, _bytes_of(sequence), batch] for sequence, batch in kept if sequence >= first]
        return [*batches, [*to, _END_OF_REPLAY, b""]]


class ZmqPublisher:
    """Publishes on `port` + `dp_rank`, and answers replays on `replay_port` + `dp_rank` if there is one.

    A port of 0 is any free one; `endpoint` and `replay_endpoint` are the addresses. `clock` returns the time of day in
    seconds, for the batches. Raises InvalidArgument without pyzmq and for an invalid port, Unavailable for a port that
    is taken. Its owner calls `close`, which waits for the replay that is being sent.
    """

    def __init__(
        self,
        port: int,
        replay_port: int | None = None,
        *,
        dp_rank: int = 0,
        block_size_tokens: int,
        clock: Callable[[], float],
        host: str = "127.0.0.1",
    ) -> None:
        zmq = _zmq()
        self._rank, self._block_size_tokens, self._clock = dp_rank, block_size_tokens, clock
        self._ring, self._lock = ReplayRing(0 if replay_port is None else REPLAY_BATCHES), Lock()
        self._again, self._no_wait = zmq.Again, zmq.NOBLOCK
        ports = [_port(port, dp_rank, "zmq_kv_events_port")]
        if replay_port is not None:
            ports.append(_port(replay_port, dp_rank, "zmq_replay_port"))
        self._context = zmq.Context()
        self._replay: _ReplayThread | None = None
        self.replay_endpoint: str | None = None
        try:
            self._socket = _bound(self._context, zmq.PUB, host, ports[0], queue_messages=_SUBSCRIBER_QUEUE_MESSAGES)
            self.endpoint = _endpoint(self._socket)
            if replay_port is not None:
                # Room for a whole replay: a router drops what a slow reader has no room for.
                router = _bound(self._context, zmq.ROUTER, host, ports[1], queue_messages=REPLAY_BATCHES + 1)
                self.replay_endpoint = _endpoint(router)
                self._replay = _ReplayThread(self._context, router, self._answer)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: Sequence[EngineEvent]) -> None:
        """Send the events as one batch, if there are any; never waits, from one thread.

        A subscriber that does not keep up misses batches, which shows by the sequence. Raises as
        `EngineEvent.to_plain`, and StreamClosed after the close.
        """
        if self._context.closed:
            raise StreamClosed("the publisher is closed")
        if not events:
            return
        batch = encode_batch(self._clock(), events, self._block_size_tokens, self._rank)
        with self._lock:
            sequence = self._ring.append(batch)
        try:
            self._socket.send_multipart(published(sequence, batch), self._no_wait)
        except self._again:
            _log.warning("batch %d of rank %d was not sent: its socket is full", sequence, self._rank)

    def close(self) -> None:
        """Close both sockets and end the thread; unsent batches are lost. Idempotent."""
        if self._context.closed:
            return
        if self._replay is not None:
            self._replay.stop()
        self._context.destroy(linger=0)

    def _answer(self, request: Frames) -> list[Frames]:
        with self._lock:
            return self._ring.answer(request)


class _ReplayThread:
    """Answers on the router socket, which it owns, until it is stopped."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        answer: Callable[[Frames], list[Frames]],
    ) -> None:
        # A socket belongs to one thread; the two ends of a pair wake one thread from another.
        self._stop, self._stopped = context.socket(_zmq().PAIR), context.socket(_zmq().PAIR)
        self._stop.bind(_STOP)
        self._stopped.connect(_STOP)
        self._router, self._answer = router, answer
        self._thread = Thread(target=self._run, name="zmq-replay")
        self._thread.start()

    def stop(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(linger=0)

    def _run(self) -> None:
        zmq = _zmq()
        poller = zmq.Poller()
        for socket in (self._stopped, self._router):
            poller.register(socket, zmq.POLLIN)
        try:
            while self._stopped not in dict(poller.poll()):
                for frames in self._answer(self._router.recv_multipart()):
                    self._router.send_multipart(frames)
        finally:
            for socket in (self._stopped, self._router):
                socket.close(linger=0)


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        text = "KV events over ZeroMQ need pyzmq: install penstock[zmq]"
        raise InvalidArgument(text, field="zmq_kv_events_port", cause=error) from error
    return zmq


def _port(base: int, dp_rank: int, name: str) -> int:
    """Return the port of that rank; 0 for any."""
    port = base + dp_rank if base else 0
    if not 0 <= port < _PORT_END:
        raise InvalidArgument(f"rank {dp_rank} would need port {port}", field=name)
    return port


def _bound(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str, port: int, *, queue_messages: int
) -> zmq.Socket[bytes]:
    zmq = _zmq()
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, queue_messages)
    address = f"tcp://{host}:{port or '*'}"
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise Unavailable(f"{address} cannot be bound: {error}", cause=error) from error
    return socket


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    """Return the address of the socket, with its real port."""
    text = socket.getsockopt(_zmq().LAST_ENDPOINT)
    assert isinstance(text, bytes)
    return text.decode().rstrip("\0")


class EventFeed:
    """Collects the changes of a pool from now on and publishes them when it is flushed. Its owner closes it.

    Events come out in the order of the changes: there is only one thread.
    """

    def __init__(self, pool: BlockPool, publisher: ZmqPublisher) -> None:
        self.publisher = publisher
        self._pool = pool
        self._events: list[EngineEvent] = []
        pool.on_event_with_tokens = lambda change, tokens: self._events.append(EngineEvent(change, tokens))

    @classmethod
    def bound(cls, pool: BlockPool, args: MockEngineArgs, dp_rank: int, clock: Callable[[], float]) -> EventFeed | None:
        """Return the feed of a rank on the ports of its arguments; None without ports or without KV events.

        Raises as `ZmqPublisher`: InvalidArgument without pyzmq, Unavailable for a port that is taken.
        """
        port, replay_port = args.zmq_kv_events_port, args.zmq_replay_port
        if port is None or not args.publishes_kv_events:
            return None
        publisher = ZmqPublisher(port, replay_port, dp_rank=dp_rank, block_size_tokens=args.block_size, clock=clock)
        return cls(pool, publisher)

    def flush(self) -> None:
        """Publish the collected changes as one batch, if there are any."""
        if self._events:
            events, self._events = self._events, []
            self.publisher.publish(events)

    def close(self) -> None:
        """Close the sockets; later changes are not collected. Idempotent."""
        self._pool.on_event_with_tokens = None
        self._events = []
        self.publisher.close()
