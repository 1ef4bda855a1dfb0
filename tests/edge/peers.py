"""Attacks by time and number: pipelined requests, slow and silent peers, readers that stop, floods of connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from .attack import Act, Attack
from .bodies import MB, raw_chat
from .heads import CHUNKED, GET, raw
from .limits import QUICK
from .server import SEATS
from .wire import CUT, OPEN, Answer, Client, Connection, chunk, head

CUT_OFF = frozenset({408, CUT})
LENGTH = f"content-length: {len(raw_chat())}"
CHAT = head(lines=(LENGTH,)) + raw_chat()
STREAM = raw_chat('"stream":true,"ignore_eos":true,"max_completion_tokens":100000')
SMALL_BUFFER = 4096
GIVEN_UP_S = 4.0
"""By when a server with the limits of `QUICK` has cut a peer that does nothing: the limit, and time to look."""


def never_read(data: bytes, total: int, time_s: float = 3.0) -> Act:
    """Requests one behind another, and not one answer is read; they end when the server takes no more."""

    def act(client: Client) -> list[Answer]:
        connection = client.connect(SMALL_BUFFER)
        block = data * max(1, MB // len(data))
        sent, deadline = 0, time.monotonic() + time_s
        while sent < total and time.monotonic() < deadline and not connection.is_cut:
            taken = connection.send(block[: total - sent], 0.5, reading=False)
            if not taken:
                break
            sent += taken
        time.sleep(0.5)
        return []

    return act


def silent(count: int, first: bytes = b"") -> Act:
    """Connections on which nothing comes behind these bytes; the server gives them up."""

    def act(client: Client) -> list[Answer]:
        connections = client.connect_many(count)
        for each in connections:
            each.send(first)
        return client.answers_of(connections, GIVEN_UP_S)

    return act


def idle_behind_an_answer(count: int) -> Act:
    """Connections that stay open after an answer without another request; the server closes them."""

    def act(client: Client) -> list[Answer]:
        connections = client.connect_many(count)
        for each in connections:
            each.send(GET)
        deadline = time.monotonic() + GIVEN_UP_S
        answers = [each.answers(max(0.0, deadline - time.monotonic()), most=2) for each in connections]
        return [answer for each in answers for answer in each]

    return act


def drip(first: bytes, byte: bytes, *, every_s: float = 0.2, count: int = 20) -> Act:
    """A byte now and then, so that no single wait is long."""

    def act(client: Client) -> list[Answer]:
        connections = client.connect_many(count)
        for each in connections:
            each.send(first)
        deadline = time.monotonic() + GIVEN_UP_S
        while time.monotonic() < deadline and not all(each.is_cut or each.received for each in connections):
            for each in connections:
                each.send(byte, 0.1)
                each.read(0)
            time.sleep(every_s)
        return client.answers_of(connections, 0.5)

    return act


def stopped_readers(count: int, body: bytes = STREAM) -> Act:
    """Streams of which nothing is read: the server cuts them, and their seats at the engine are free again."""

    def act(client: Client) -> list[Answer]:
        connections = [client.connect(SMALL_BUFFER) for _ in range(count)]
        for each in connections:
            each.send(head(length=len(body)) + body, reading=False)
        time.sleep(2 * GIVEN_UP_S)  # those without a seat begin when the first ones are cut
        deadline = time.monotonic() + 1.0
        for each in connections:
            each.read(max(0.05, deadline - time.monotonic()), lambda: False)
        return [Answer(CUT if each.is_cut else OPEN) for each in connections]

    return act


def slow_readers(count: int) -> Act:
    """Streams that are read a few bytes at a time: the server may cut them, and holds little of them if it does not."""

    def act(client: Client) -> list[Answer]:
        connections = [client.connect(SMALL_BUFFER) for _ in range(count)]
        for each in connections:
            each.send(head(length=len(STREAM)) + STREAM, reading=False)
        deadline = time.monotonic() + GIVEN_UP_S
        while time.monotonic() < deadline:
            for each in connections:
                if not each.is_cut:
                    each._receive(1)
            time.sleep(0.05)
        return []

    return act


def left(count: int, leave: Callable[[Connection], None], data: bytes, wait_s: float = 0.0) -> Act:
    """Clients that send this and then leave in that way."""

    def act(client: Client) -> list[Answer]:
        for _ in range(count):
            connection = client.connect()
            connection.send(data)
            if wait_s:
                connection.read(wait_s, lambda: False)
            leave(connection)
        return []

    return act


def idle(count: int) -> Act:
    """Many connections that send one request and then stay open; a new client is served beside them."""

    def act(client: Client) -> list[Answer]:
        connections = client.connect_many(count)
        for start in range(0, count, 50):  # a few at a time: that they are there is the attack, not that they come
            for each in connections[start : start + 50]:
                each.send(GET)
            client.answers_of(connections[start : start + 50], 5.0)
        newcomer = client.connect()
        newcomer.send(CHAT)
        return [newcomer.answer()]

    return act


def flood(count: int) -> Act:
    """Connections that are opened and closed at once."""

    def act(client: Client) -> list[Answer]:
        for _ in range(count):
            with suppress(OSError), socket.create_connection((client.host, client.port), timeout=5):
                pass
        return []

    return act


def _two_halves() -> Act:
    """A request and the first half of a second one; then the other half."""

    def act(client: Client) -> list[Answer]:
        connection = client.connect()
        connection.send(CHAT + CHAT[:100])
        first = connection.answer()
        connection.received = b""
        connection.send(CHAT[100:])
        return [first, connection.answer()]

    return act


def _byte_by_byte() -> Act:
    """A whole request in pieces of one byte, as fast as they go."""

    def act(client: Client) -> list[Answer]:
        connection = client.connect()
        for each in CHAT:
            connection.send(bytes([each]))
        return connection.answers()

    return act


def _reset(connection: Connection) -> None:
    connection.reset()


def _close(connection: Connection) -> None:
    connection.sock.close()


def _quick(
    name: str, act: Act, statuses: frozenset[int] = CUT_OFF, memory_mb: float = 48, *, is_slow: bool = False
) -> Attack:
    return Attack(name, act, statuses, limits=QUICK, memory_mb=memory_mb, is_slow=is_slow)


def peers() -> list[Attack]:
    """All of them."""
    half_head, half_body = CHAT[:60], CHAT[:-10]
    stream = head(length=len(STREAM)) + STREAM
    long_body = head(length=MB)
    none: frozenset[int] = frozenset()
    models = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"
    return [
        Attack("pipelined requests never read, small", never_read(models, 4 * MB)),
        Attack("pipelined requests never read, full size", never_read(models, 46 * MB, 60), is_slow=True),
        Attack("pipelined metrics never read", never_read(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n", 200_000)),
        Attack("pipelined refusals never read", never_read(b"GET /none HTTP/1.1\r\nhost: a\r\n\r\n", 2 * MB)),
        Attack("pipelined chats never read", never_read(CHAT, 2 * MB), memory_mb=64),
        Attack("pipelined streams never read", never_read(stream, 200_000), memory_mb=64),
        Attack("10,000 pipelined requests, read", raw(GET * 10_000, most=1, time_s=10), {200}),
        Attack(
            "a chat and garbage behind", raw(CHAT + b"\x00garbage\r\n\r\n", most=2, half_close=True), {200, 400, CUT}
        ),
        Attack("a chat and half of the next", _two_halves(), {200}, group="endings"),
        Attack("a request byte by byte", _byte_by_byte(), {200}, group="endings"),
        _quick("half heads", silent(200, half_head)),
        _quick("half bodies", silent(200, half_body)),
        _quick("half bodies of 1 MB", silent(40, long_body + b" " * (MB // 2)), memory_mb=80, is_slow=True),
        _quick("half a chunk", silent(50, CHUNKED + b"ff\r\n{"), is_slow=True),
        _quick("silent connections", silent(500)),
        _quick("silent behind an answer", idle_behind_an_answer(200), CUT_OFF | {200}, is_slow=True),
        _quick("heads a byte now and then", drip(GET[:-2] + b"a: ", b"b"), is_slow=True),
        _quick("headers a line now and then", drip(GET[:-2], b"a: b\r\n"), is_slow=True),
        _quick("bodies a byte now and then", drip(long_body, b" "), is_slow=True),
        _quick("chunks a byte now and then", drip(CHUNKED, chunk(b" "))),
        _quick("trailers now and then", trailers_without_end(), is_slow=True),
        _quick("empty lines now and then", drip(b"", b"\r\n"), is_slow=True),
        _quick("readers that stopped", stopped_readers(SEATS + 2), frozenset({CUT})),
        _quick("slow readers", slow_readers(SEATS + 2), none, is_slow=True),
        Attack("resets in the head", left(200, _reset, half_head), none, group="endings"),
        Attack("resets in the body", left(200, _reset, half_body), none, group="endings"),
        Attack("resets before the answer", left(200, _reset, CHAT), none),
        Attack("resets in a stream", left(20, _reset, stream, 0.05), none),
        Attack("closes in a stream", left(20, _close, stream, 0.05), none),
        Attack("half closes before the answer", left(20, Connection.half_close, CHAT), none, group="endings"),
        Attack("half closes in the head", raw(half_head, half_close=True), CUT_OFF | {400}, group="endings"),
        Attack("half closes in the body", raw(half_body, half_close=True), CUT_OFF | {400}, group="endings"),
        Attack("1,900 idle connections", idle(1900), {200}, memory_mb=96),
        Attack("1,000 connections opened and closed", flood(1000), none),
        Attack("10,000 connections opened and closed", flood(10_000), none, is_slow=True),
    ]


def trailers_without_end() -> Act:
    """A whole body, and then trailers that never end."""
    return drip(CHUNKED + chunk(raw_chat()) + b"0\r\n", b"a: b\r\n")


def requests_at_once(body: bytes, count: int, path: str = "/v1/chat/completions", read_s: float = 1.0) -> Act:
    """The same request over many connections; they are left after a while, whether answered or not."""

    def act(client: Client) -> list[Answer]:
        connections = client.connect_many(count)
        for each in connections:
            each.send(head(path=path, length=len(body)) + body)
        answers = client.answers_of(connections, read_s)
        return [each for each in answers if each.status != OPEN]

    return act


def one(body: bytes, path: str = "/v1/chat/completions", read_s: float = 2.0) -> Act:
    """One request, left after a while if it is not answered by then."""
    return partial(_one, body=body, path=path, read_s=read_s)


def _one(client: Client, *, body: bytes, path: str, read_s: float) -> Sequence[Answer]:
    return requests_at_once(body, 1, path, read_s)(client)
