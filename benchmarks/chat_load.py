"""A closed load of chats over plain connections, and programs that are started, awaited and ended for it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import define, field

TOKENS = 64
"""Tokens of each answer."""
WORDS = 16
_READY_S = 60.0


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def running(command: Sequence[str], port: int, model: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in a process group of its own, and end all of it; it is there once chats are answered."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            wait_until_ready(process, port, model)
            yield process
        finally:
            os.killpg(process.pid, 15)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def wait_until_ready(process: subprocess.Popen[bytes], port: int, model: str) -> None:
    """Return once chats are answered. Raise SystemExit if the program ends before, or takes too long."""
    ends_s = time.monotonic() + _READY_S
    while time.monotonic() < ends_s:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        try:
            if asyncio.run(ChatStream(port, model).chat()) is not None:
                return
        except (OSError, asyncio.IncompleteReadError):
            pass
        time.sleep(0.2)
    raise SystemExit(f"{process.args!r} answered no chat within {_READY_S:g} s")


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Return the CPU seconds of all processes of its session, to the nanosecond."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text().rpartition(")")[2].split()[3])
            if session == process.pid:
                total += sum(
                    int((task / "schedstat").read_text().split()[0]) for task in (stat.parent / "task").iterdir()
                )
        except (OSError, ValueError):  # it has ended
            continue
    return total / 1e9


@define(eq=False)
class ChatStream:
    """One connection that sends chats one after the other."""

    port: int
    model: str
    number: int = 0
    _sent: int = 0
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = field(default=None)

    def _request(self) -> bytes:
        self._sent += 1
        words = " ".join(f"{self.number}-{self._sent}-{word}" for word in range(WORDS // 2))
        message = {"role": "user", "content": words}
        body = json.dumps({"model": self.model, "messages": [message], "max_tokens": TOKENS, "stream": True}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def chat(self) -> float | None:
        """Return the milliseconds to the first text; None if the chat was not answered with all its tokens."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        begun = time.perf_counter()
        self._acknowledge()
        writer.write(self._request())
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            writer.close()
            self._streams = None
            return None
        first_ms, answer = None, bytearray()
        while not answer.endswith(b"0\r\n\r\n"):
            if not (data := await reader.read(65_536)):
                raise ConnectionError("the connection ended within an answer")
            self._acknowledge()
            answer += data
            if first_ms is None and b'"content":"' in answer.replace(b'": "', b'":"'):
                first_ms = (time.perf_counter() - begun) * 1000
        return first_ms if b"[DONE]" in answer else None

    def _acknowledge(self) -> None:
        """Have the kernel acknowledge the next bytes at once: a server that waits for it is not measured by that.

        By default that takes up to 40 ms. The option lasts for one read.
        """
        if self._streams is not None:
            connection: socket.socket = self._streams[1].get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def load(ports: Sequence[int], streams: int, seconds: float, model: str) -> tuple[int, float, list[float]]:
    """Return the number of chats, the seconds that they took and the times to the first text."""
    times: list[float] = []
    opened = [ChatStream(ports[number % len(ports)], model, number) for number in range(streams)]
    begun = time.perf_counter()

    async def send(stream: ChatStream) -> None:
        while time.perf_counter() - begun < seconds:
            if (first_ms := await stream.chat()) is None:
                raise SystemExit("a chat was not answered whole")
            times.append(first_ms)

    await asyncio.gather(*(send(stream) for stream in opened))
    took_s = time.perf_counter() - begun
    for stream in opened:
        stream.close()
    return len(times), took_s, sorted(times)
