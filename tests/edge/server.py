"""A server under attack, measured from outside: memory, connections, requests, stalls."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field

from tests.serving.worlds import program

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("live_probe.py")
START_S = 30.0
COUNTS = 5
COUNT_EVERY_S = 0.02
SEATS = 8
"""Requests that the engine runs at a time: a few that are never released block all others."""
MOCK = ("--engine", "mocker", "--engine-arg", f"max_num_seqs={SEATS}", "--engine-arg", "speedup_ratio=100")
"""Options of a server with so many seats, and some milliseconds of work for a short chat."""
ECHO = ("--engine", "echo")
"""Options of a server whose answers the attacker chooses."""
MODEL = "echo"
_MB = 1024 * 1024
_GAUGE = re.compile(r"^dynamo_frontend_(?:inflight|queued)_requests(?:\{[^}]*\})? ([\d.e+]+)$", re.MULTILINE)


@define(eq=False)
class EdgeServer:
    """`penstock serve` as a process of its own."""

    process: subprocess.Popen[str]
    host: str
    port: int

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def rss_mb(self) -> float:
        """Return the memory that it holds now."""
        return self._status_mb("VmRSS")

    def peak_mb(self) -> float:
        """Return the most memory that it has held since `forget_peak`."""
        return self._status_mb("VmHWM")

    def forget_peak(self) -> None:
        """Reset the peak to the memory that is held now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def _status_mb(self, name: str) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
        assert found is not None, text
        return int(found[1]) / 1024

    def sockets(self) -> int:
        """Return the number of its open sockets, without those it is about to close: the lowest of some counts.

        A connection that this process has just closed is still open in the server for a moment.
        """
        lowest = self._sockets_now()
        for _ in range(COUNTS - 1):
            time.sleep(COUNT_EVERY_S)
            lowest = min(lowest, self._sockets_now())
        return lowest

    def _sockets_now(self) -> int:
        count = 0
        for each in Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                count += os.readlink(each).startswith("socket:")
            except FileNotFoundError:
                continue
        return count

    def open_requests(self, timeout_s: float = 10) -> int:
        """Return the number of requests that it counts as under way."""
        return round(sum(float(value) for value in _GAUGE.findall(self.get("/metrics", timeout_s)[1].decode())))

    def get(self, path: str, timeout_s: float = 10) -> tuple[int, bytes]:
        """Return status and body of a page, over a connection of its own."""
        with closing(http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)) as connection:
            connection.request("GET", path)
            with connection.getresponse() as response:
                return response.status, response.read()

    def chat(self, timeout_s: float = 10, **fields: Any) -> tuple[int, bytes]:
        """Return status and body of a short chat, over a connection of its own. `fields` are those of the request."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4} | fields
        with closing(http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)) as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            with connection.getresponse() as response:
                return response.status, response.read()

    @contextmanager
    def probed(self) -> Iterator[LiveProbe]:
        """Probe the server while the block runs; the samples are complete after it."""
        with subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROBE), self.host, str(self.port), str(self.process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                probe = LiveProbe()
                yield probe
                text, _ = process.communicate(timeout=30)
                probe.samples = [(sent, took, cpu_s) for sent, took, cpu_s in json.loads(text)]
            finally:
                process.kill()


@define
class LiveProbe:
    """The samples of the probe: when each request was sent, the seconds it took, and CPU time of the server in them."""

    samples: Sequence[tuple[float, float, float]] = field(factory=list)

    def longest_s(self, begin: float, end: float) -> float:
        """Return the longest answer that overlaps these times."""
        return max((took for took, _ in self._overlapping(begin, end)), default=0.0)

    def longest_worked_s(self, begin: float, end: float) -> float:
        """Return the longest part of such an answer in which the server worked."""
        return max((min(took, cpu_s) for took, cpu_s in self._overlapping(begin, end)), default=0.0)

    def _overlapping(self, begin: float, end: float) -> list[tuple[float, float]]:
        return [(took, cpu_s) for sent, took, cpu_s in self.samples if sent < end and sent + took > begin]


@contextmanager
def edge_server(variables: Mapping[str, Any], *options: str) -> Iterator[EdgeServer]:
    """Run a server with these environment variables, and options such as `MOCK`."""
    here = ("--host", "127.0.0.1")
    with program(*here, *options, cwd=ROOT, stderr=subprocess.DEVNULL, variables=variables) as (process, address):
        host, _, port = address.rpartition(":")
        server = EdgeServer(process, host, int(port))
        _warm_up(server)
        yield server


def _warm_up(server: EdgeServer) -> None:
    """Send ordinary requests first, so that their imports and allocations do not count for an attack."""
    for _ in range(8):
        assert server.chat()[0] == 200
        assert server.get("/metrics")[0] == 200
    deadline = time.monotonic() + START_S
    while server.open_requests():
        assert time.monotonic() < deadline
        time.sleep(0.02)
