"""Connections of an attacker: raw bytes out, slowly or at once, and the bytes that come back."""

from __future__ import annotations

import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from attrs import define, field, frozen

CUT, OPEN = 0, -1
"""Instead of a status: the connection was closed without an answer, or is still open without one."""


@frozen
class Answer:
    """One response; `status` is `CUT` or `OPEN` if there is none."""

    status: int
    headers: dict[str, str] = field(factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@define(eq=False)
class Connection:
    """One connection. No call blocks longer than its `time_s`."""

    sock: socket.socket
    received: bytes = b""
    is_cut: bool = False

    def send(self, data: bytes, time_s: float = 10.0, *, reading: bool = True) -> int:
        """Send as much as the server takes in this time, and meanwhile read what it answers; return the bytes sent."""
        sent, deadline, view = 0, time.monotonic() + time_s, memoryview(data)
        events = selectors.EVENT_WRITE | (selectors.EVENT_READ if reading else 0)
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, events)
            while sent < len(data) and not self.is_cut and (left_s := deadline - time.monotonic()) > 0:
                for _, ready in selector.select(left_s):
                    if ready & selectors.EVENT_READ:
                        self._receive()
                    if ready & selectors.EVENT_WRITE:
                        sent += self._write(view[sent : sent + 262_144])
        return sent

    def _write(self, part: memoryview) -> int:
        try:
            return self.sock.send(part)
        except BlockingIOError:
            return 0
        except OSError:
            self._drain()
            return 0

    def _drain(self) -> None:
        """The server takes nothing more; an answer may have come before it closed."""
        while not self.is_cut:
            self._receive()

    def _receive(self, most: int = 262_144) -> None:
        try:
            part = self.sock.recv(most)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self.is_cut = not part
        self.received += part

    def read(self, time_s: float, until: Callable[[], object] = bool) -> None:
        """Read until the condition holds, the server closes the connection, or the time is over."""
        deadline = time.monotonic() + time_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, selectors.EVENT_READ)
            while not self.is_cut and not until() and (left_s := deadline - time.monotonic()) > 0:
                if selector.select(left_s):
                    self._receive()

    def answers(self, time_s: float = 10.0, *, most: int = 1) -> list[Answer]:
        """The next answers, interim ones left out; where one is missing a last one with `CUT` or `OPEN`."""
        self.read(time_s, lambda: len(list(parse(self.received, self.is_cut))) >= most)
        found = list(parse(self.received, self.is_cut))[:most]
        return found if len(found) == most else [*found, Answer(CUT if self.is_cut else OPEN)]

    def answer(self, time_s: float = 10.0) -> Answer:
        """The next answer."""
        return self.answers(time_s)[0]

    def half_close(self) -> None:
        """Send nothing more, and go on reading."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close it so that the server gets a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


@define
class Client:
    """All the connections of one attack."""

    host: str
    port: int
    connections: list[Connection] = field(factory=list)

    def connect(self, receive_buffer_bytes: int | None = None) -> Connection:
        """A new connection; with a small buffer the server soon cannot write any more."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(10)
        sock.connect((self.host, self.port))
        sock.setblocking(False)
        made = Connection(sock)
        self.connections.append(made)
        return made

    def connect_many(self, count: int) -> list[Connection]:
        return [self.connect() for _ in range(count)]

    def answers_of(self, connections: Iterable[Connection], time_s: float) -> list[Answer]:
        """What became of each of them by then."""
        deadline = time.monotonic() + time_s
        return [each.answer(max(0.0, deadline - time.monotonic())) for each in connections]

    def close(self) -> None:
        for each in self.connections:
            each.sock.close()


def parse(data: bytes, is_cut: bool) -> Iterator[Answer]:
    """The complete answers in these bytes; one whose end is that of its connection is complete once that is cut."""
    while data:
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end or not head.startswith(b"HTTP/1."):
            return
        status_line, *lines = head.decode("latin-1").split("\r\n")
        status = int(status_line.split(" ")[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if 100 <= status < 200:
            data = rest
            continue
        if "content-length" in headers:
            length = int(headers["content-length"])
            if len(rest) < length:
                return
            body, data = rest[:length], rest[length:]
        elif headers.get("transfer-encoding") == "chunked":
            body, whole, data = _dechunked(rest)
            if not whole:
                return
        elif status in (204, 304):
            body, data = b"", rest
        elif is_cut:
            body, data = rest, b""
        else:
            return
        yield Answer(status, headers, body)


def _dechunked(data: bytes) -> tuple[bytes, bool, bytes]:
    """The body, whether it is whole, and what follows."""
    body = b""
    while True:
        size_line, end, rest = data.partition(b"\r\n")
        if not end:
            return body, False, b""
        size = int(size_line.partition(b";")[0], 16)
        if len(rest) < size + 2:
            return body, False, b""
        if not size:
            return body, True, rest[2:]
        body, data = body + rest[:size], rest[size + 2 :]


def head(
    method: str = "POST", path: str = "/v1/chat/completions", *, length: int | None = None, lines: Iterable[str] = ()
) -> bytes:
    """The head of a request with a JSON body."""
    parts = [f"{method} {path} HTTP/1.1", "host: attacked", "content-type: application/json", *lines]
    if length is not None:
        parts.append(f"content-length: {length}")
    return "\r\n".join([*parts, "", ""]).encode("latin-1")


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    """One chunk of a chunked body."""
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)
