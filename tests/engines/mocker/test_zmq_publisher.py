"""ZmqPublisher over real local sockets: what subscribers receive, what a replay returns, and that it closes."""

from __future__ import annotations

import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from engines.mocker.zmq_events import EngineEvent, ZmqPublisher
from pipeline import InvalidArgument, StreamClosed, Unavailable
from pipeline.protocols.kv import KvRemoved
from pipeline.wire import from_msgpack

if TYPE_CHECKING:
    import zmq
else:
    zmq = pytest.importorskip("zmq")


def publisher(port: int = 0, replay_port: int | None = None, dp_rank: int = 0) -> closing[ZmqPublisher]:
    return closing(ZmqPublisher(port, replay_port, dp_rank=dp_rank, block_size_tokens=4, clock=lambda: 12.5))


def removed(number: int) -> list[EngineEvent]:
    return [EngineEvent(KvRemoved([number]))]


def batch(frames: list[bytes]) -> tuple[int, list[Any]]:
    """Return the sequence and the content of the batch."""
    return int.from_bytes(frames[-2], "big"), from_msgpack(frames[-1], list[Any])


def replay(socket: Any, first: int) -> list[list[bytes]]:
    """Return every message of the reply."""
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    messages = [socket.recv_multipart()]
    while messages[-1][-2] != b"\xff" * 8:
        messages.append(socket.recv_multipart())
    return messages


def test_a_subscriber_gets_each_batch_in_three_frames_with_its_sequence(context: zmq.Context[Any]) -> None:
    with publisher(dp_rank=3) as events, context.socket(zmq.SUB) as reader:
        reader.subscribe(b"")
        reader.connect(events.endpoint)
        first, frames = publish_until_received(events, reader)
        events.publish([*removed(100), *removed(101)])
        events.publish([])
        events.publish(removed(102))
        assert frames[0] == b""
        assert len(frames) == 3
        assert batch(frames) == (first, [12.5, [event(first)], 3])
        got = [batch(reader.recv_multipart()) for _ in range(2)]
        assert got == [(first + 1, [12.5, [event(100), event(101)], 3]), (first + 2, [12.5, [event(102)], 3])]


def event(number: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [number], "group_idx": 0}


def publish_until_received(events: ZmqPublisher, reader: Any) -> tuple[int, list[bytes]]:
    """Publish until the first batch arrives, as a subscription takes a moment; return the last one sent."""
    sent = 0
    events.publish(removed(sent))
    while not reader.poll(20):
        sent += 1
        assert sent < 250, "no subscription came about"
        events.publish(removed(sent))
    frames = reader.recv_multipart()
    while batch(frames)[0] != sent:
        frames = reader.recv_multipart()
    return sent, frames


def test_a_replay_returns_batches_published_before_any_subscription(context: zmq.Context[Any]) -> None:
    with publisher(replay_port=0) as events, context.socket(zmq.DEALER) as reader:
        for number in range(5):
            events.publish(removed(number))
        reader.connect(events.replay_endpoint)
        *messages, end = replay(reader, 2)
        assert [message[:2] for message in messages] == [[b"", b""]] * 3
        assert [batch(message) for message in messages] == [(n, [12.5, [event(n)], 0]) for n in (2, 3, 4)]
        assert end == [b"", b"", b"\xff" * 8, b""]
        reader.send_multipart([b"", b"no sequence"])
        events.publish(removed(5))
        assert [batch(message)[0] for message in replay(reader, 5)[:-1]] == [5]


def test_a_whole_ring_is_replayed_to_a_reader_that_is_slow_to_read(context: zmq.Context[Any]) -> None:
    with publisher(replay_port=0) as events, context.socket(zmq.DEALER) as reader:
        for number in range(3000):
            events.publish(removed(number))
        reader.rcvhwm = 10
        reader.connect(events.replay_endpoint)
        reader.send_multipart([b"", bytes(8)])
        assert reader.poll(5000)
        reader.send_multipart([b"", (3000).to_bytes(8, "big")])
        assert [int.from_bytes(reader.recv_multipart()[-2], "big") for _ in range(3000)] == list(range(3000))


def test_without_a_replay_port_there_is_neither_a_socket_nor_a_thread() -> None:
    before = set(threading.enumerate())
    with publisher() as events:
        assert events.replay_endpoint is None
        assert set(threading.enumerate()) <= before


def test_closing_ends_the_thread_and_frees_both_ports(context: zmq.Context[Any]) -> None:
    before = set(threading.enumerate())
    events = ZmqPublisher(0, 0, block_size_tokens=4, clock=lambda: 12.5)
    (thread,) = set(threading.enumerate()) - before
    assert (thread.name, thread.daemon) == ("zmq-replay", False)
    ports = [int(str(end).rpartition(":")[2]) for end in (events.endpoint, events.replay_endpoint)]
    events.close()
    events.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(StreamClosed):
        events.publish(removed(1))
    for port in ports:
        with context.socket(zmq.PUB) as taker:
            taker.bind(f"tcp://127.0.0.1:{port}")


def test_each_rank_has_its_port_above_the_base() -> None:
    with publisher() as probe:
        port = int(probe.endpoint.rpartition(":")[2])
    with publisher(port - 7, dp_rank=7) as events:
        assert events.endpoint == f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize("which", ["port", "replay_port"])
def test_a_port_that_is_taken_is_unavailable_and_nothing_stays_open(which: str) -> None:
    before = set(threading.enumerate())
    with publisher() as first:
        taken = int(first.endpoint.rpartition(":")[2])
        with pytest.raises(Unavailable, match=str(taken)):
            publisher(taken) if which == "port" else publisher(replay_port=taken)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", ["zmq_kv_events_port", "zmq_replay_port"])
@pytest.mark.parametrize(("port", "rank"), [(65535, 1), (-1, 0), (65536, 0)])
def test_an_invalid_port_is_refused(name: str, port: int, rank: int) -> None:
    with pytest.raises(InvalidArgument) as raised:
        publisher(port, None, rank) if name == "zmq_kv_events_port" else publisher(0, port, rank)
    assert raised.value.field == name


def test_without_pyzmq_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(InvalidArgument, match=r"penstock\[zmq\]"):
        publisher()
