"""FakeKvSource: the sockets at which an engine publishes its KV events and replays them, with faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from socket import create_connection
from threading import Thread
from time import sleep
from typing import Any

import zmq

from pipeline.llm import block_hashes
from pipeline.protocols.kv import KvStored, StoredBlock
from pipeline.wire import to_msgpack

END = b"\xff" * 8
BLOCK_TOKENS = 4


def stored(first: int, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    """A store of one block of four tokens from `first` on, under the name `first`, as vLLM sends it."""
    plain: dict[str, Any] = {"type": "BlockStored", "block_hashes": [first], "parent_block_hash": parent}
    tokens = list(range(first, first + BLOCK_TOKENS))
    head = {"token_ids": tokens, "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None}
    return plain | head | fields


def removed(*names: int, **fields: Any) -> dict[str, Any]:
    """A removal of blocks, as vLLM sends it."""
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", **fields}


def change(first: int, parent: int | None = None) -> KvStored:
    """What `stored` comes to."""
    tokens = list(range(first, first + BLOCK_TOKENS))
    return KvStored(parent, [StoredBlock(first, block_hashes(tokens, BLOCK_TOKENS)[0])])


def _wait_until_refused(endpoint: str) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    for _ in range(200):
        try:
            create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
        except OSError:
            return
        sleep(0.005)


class FakeKvSource:
    """An engine's PUB and ROUTER socket; opened by `opened`, ended and begun again by `restart`.

    Batches are numbered from 0, and each life's have times of their own. Faults of the replay are set as attributes.
    """

    def __init__(self, dp_rank: int = 0, kept_batches: int = 10_000, host: str = "127.0.0.1") -> None:
        self.dp_rank, self.kept_batches = dp_rank, kept_batches
        self.not_replayed: set[int] = set()
        """Sequences that are dropped from the next replay, as a full router does."""
        self.cut_replay_after: int | None = None
        """The next replay stops after so many messages, without an end."""
        self.is_silent = False
        """Requests for a replay are not answered."""
        self.has_topic_in_replay = True
        """False: as older engines, which replay without a topic."""
        self.requests: list[int] = []
        """The first sequence of each request for a replay."""
        self.answered = 0
        """How many of these are over: what is published from now on is in none of them."""
        self._has_subscriber = False
        self.life = 0
        self.kept: dict[int, bytes] = {}
        """The payloads that can be replayed, by sequence."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = self.replay_endpoint = f"tcp://{host}:*"
        self._open()

    @classmethod
    @contextmanager
    def opened(cls, dp_rank: int = 0, kept_batches: int = 10_000, host: str = "127.0.0.1") -> Iterator[FakeKvSource]:
        source = cls(dp_rank, kept_batches, host)
        try:
            yield source
        finally:
            source.close()
            source._context.destroy(linger=0)

    @property
    def has_subscriber(self) -> bool:
        """Whether a subscription has come in this life: what is published from now on arrives."""
        if not self._has_subscriber and self._publisher.poll(0):
            self._publisher.recv()
            self._has_subscriber = True
        return self._has_subscriber

    def publish(self, *events: Any, sent: bool = True, payload: bytes | None = None) -> int:
        """Publish a batch and return its sequence; not `sent`, it is lost on the way and only kept for a replay."""
        sequence = self.next_sequence
        if payload is None:
            payload = to_msgpack([1000.0 * self.life + sequence, list(events), self.dp_rank])
        self.next_sequence += 1
        self.kept[sequence] = payload
        self.kept.pop(sequence - self.kept_batches, None)
        if sent:
            self.send(sequence, payload)
        return sequence

    def send(self, sequence: int, payload: bytes | None = None) -> None:
        """Send a message whatever was sent before; without a payload the one that is kept."""
        frames = [b"", sequence.to_bytes(8, "big"), self.kept[sequence] if payload is None else payload]
        self._publisher.send_multipart(frames)

    def send_frames(self, *frames: bytes) -> None:
        """Send whatever frames."""
        self._publisher.send_multipart(frames)

    def restart(self, *, reopens: bool = True) -> None:
        """End, as with a kill, and begin anew at the same endpoints with sequence 0 and nothing kept."""
        self.close()
        if reopens:
            self._open()

    def close(self) -> None:
        """End it. When it returns, its endpoints refuse connections: ZeroMQ closes sockets in a thread of its own."""
        if self._thread.is_alive():
            self._stop.send(b"")
            self._thread.join()
        for socket in (self._publisher, self._stop, self._stopped, self._router):
            socket.close(linger=0)
        for endpoint in (self.endpoint, self.replay_endpoint):
            _wait_until_refused(endpoint)

    # -- inside

    def _open(self) -> None:
        self.life += 1
        self.next_sequence = 0
        self.kept = {}
        self._has_subscriber = False
        self._publisher = self._bound(zmq.XPUB, self.endpoint)  # a PUB that shows who subscribes
        self._router = self._bound(zmq.ROUTER, self.replay_endpoint)
        self.endpoint = self._publisher.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop, self._stopped = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._stop.bind(f"inproc://stop-{self.life}")
        self._stopped.connect(f"inproc://stop-{self.life}")
        self._thread = Thread(target=self._answer_all)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 20_000)
        socket.setsockopt(zmq.IPV6, 1)
        for _ in range(200):  # a port that was just closed may take a moment
            try:
                socket.bind(endpoint)
                break
            except zmq.ZMQError:
                socket.poll(10)
        return socket

    def _answer_all(self) -> None:
        poller = zmq.Poller()
        for socket in (self._stopped, self._router):
            poller.register(socket, zmq.POLLIN)
        while self._stopped not in dict(poller.poll()):
            frames = self._router.recv_multipart()
            if len(frames) == 3:
                self._answer(frames[0], int.from_bytes(frames[2], "big"))
                self.answered += 1

    def _answer(self, identity: bytes, first: int) -> None:
        self.requests.append(first)
        if self.is_silent:
            return
        dropped, self.not_replayed = self.not_replayed, set()
        cut_after, self.cut_replay_after = self.cut_replay_after, None
        batches = [(n, payload) for n, payload in list(self.kept.items()) if n >= first and n not in dropped]
        for number, payload in batches[:cut_after]:
            self._reply(identity, number.to_bytes(8, "big"), payload)
        if cut_after is None:
            self._reply(identity, END, b"")

    def _reply(self, identity: bytes, sequence: bytes, payload: bytes) -> None:
        topic: Sequence[bytes] = [b""] if self.has_topic_in_replay else []
        self._router.send_multipart([identity, b"", *topic, sequence, payload])
