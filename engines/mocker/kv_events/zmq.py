"""ZmqPublisher: one rank's KV events over ZeroMQ, as vLLM sends them, with a replay of the last ones.

    publish ─► PUB socket ─► subscribers
    ring ◄──── ROUTER socket ◄─► replays, from a sequence on

The one door of pyzmq (extra `zmq`), imported when a publisher is made. Source: dynamo lib/mocker/src/services/
zmq_events.rs, ZmqKvEventSink. Other than there, sending needs no task, and only the replay socket has a thread.

EventFeed: the changes of a rank's cache over ZeroMQ, one batch per step.

    block pool ──change, tokens──► feed ──flush──► ZmqPublisher ──► subscribers

Source: dynamo lib/mocker/src/services/zmq_events.rs, the raw event sink of a scheduler. Other than there, events come
out in the order of the changes: there is only one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pipeline import InvalidArgument, StreamClosed, Unavailable
from pipeline.protocols.kv import KvEventData

from ..args import MockEngineArgs
from ..scheduling import BlockPool
from .events import REPLAY_BATCHES, EngineEvent, ReplayRing, encode_batch, published, replay_answer

if TYPE_CHECKING:
    import zmq


_log = logging.getLogger(__name__)

_PORT_END = 2**16
_SUBSCRIBER_QUEUE_MESSAGES = 1000
"""A subscriber further behind than this misses batches (ZeroMQ's own default)."""
_STOP = "inproc://stop"


class ZmqPublisher:
    """Publishes on `port` + `dp_rank`, and answers replays on `replay_port` + `dp_rank` if there is one.

    A port of 0 is any free one; `endpoint` and `replay_endpoint` are the addresses. `clock` returns the time of day in
    seconds, for the batches. Raises InvalidArgument without pyzmq and for an invalid port, Unavailable for a port that
    is taken. Its owner closes it: `with` or `close`, which waits for the replay that is being sent.
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

        A subscriber that does not keep up misses batches, which shows by the sequence. Raises InvalidArgument as
        `encode_batch`, and StreamClosed after the close.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, request: list[bytes]) -> list[list[bytes]]:
        with self._lock:
            return replay_answer(request, self._ring)


class _ReplayThread:
    """Answers on the router socket, which it owns, until it is stopped."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        answer: Callable[[list[bytes]], list[list[bytes]]],
    ) -> None:
        zmq = _zmq()
        # A socket belongs to one thread; the two ends of a pair wake one thread from another.
        self._stop, self._stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
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
    """Collects the changes of a pool from now on and publishes them when it is flushed. Its owner closes it."""

    def __init__(self, pool: BlockPool, publisher: ZmqPublisher, block_size_tokens: int) -> None:
        self.publisher = publisher
        self._pool = pool
        self._block_size_tokens = block_size_tokens
        self._events: list[EngineEvent] = []
        pool.on_event_with_tokens = self._add

    @classmethod
    def bound(cls, pool: BlockPool, args: MockEngineArgs, dp_rank: int, clock: Callable[[], float]) -> EventFeed | None:
        """Return the feed of a rank on the ports of its arguments; None without ports or without KV events.

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
        """Publish the collected changes as one batch, if there are any."""
        if self._events:
            events, self._events = self._events, []
            self.publisher.publish(events)

    def close(self) -> None:
        """Close the sockets; later changes are not collected. Idempotent."""
        self._pool.on_event_with_tokens = None
        self._events = []
        self.publisher.close()

    def _add(self, change: KvEventData, tokens: Sequence[int]) -> None:
        size = self._block_size_tokens
        blocks = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        self._events.append(EngineEvent(change, blocks))
