"""Real vLLM servers on this machine: started, looked at, killed and ended with every process they made."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from attrs import define, field, frozen

T = TypeVar("T")

AT_A_TIME = 2
"""Servers that run at the same time: each takes about 3 GB of memory."""
START_S = 300
"""Time for a server to become ready; 30 to 80 s is usual on two busy cores."""
BLOCK_SIZE_TOKENS = 32
"""The smallest that vLLM takes on CPU."""
MODEL = "tiny"
"""Name under which the servers serve their model."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""What every server is started with; the development mode brings `/reset_prefix_cache`."""


def free_ports(number: int) -> list[int]:
    """Return ports that nothing listens on now."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def until(read: Callable[[], T], holds: Callable[[T], object], *, within_s: float, pause_s: float = 0.005) -> T:
    """Return the first value read that holds. Raise TimeoutError, with the last value, if none did in time."""
    deadline = time.monotonic() + within_s
    while True:
        value = read()
        if holds(value):
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {value!r} after {within_s} s")
        time.sleep(pause_s)


@frozen
class Role:
    """How servers of one kind are started."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(factory=dict)
    kv_events: bool = True
    """Whether the server publishes KV events, and replays them."""


AGGREGATED = Role()
BYTE_HASHES = Role(environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"})


def nixl(role: str, *extra: str) -> Role:
    """A server that hands KV blocks over by NIXL, as `kv_producer` or `kv_consumer`, through buffers on the CPU."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return Role(("--kv-transfer-config", json.dumps(transfer), *extra))


@define(eq=False)
class VllmServer:
    """One vLLM server: the HTTP process, its engine core and workers, as one process group."""

    python: str
    """Interpreter of the environment that has vLLM."""
    model: Path
    """Folder of the model."""
    log: Path
    """File that the output of all its processes is appended to."""
    role: Role = AGGREGATED
    port: int = 0
    events_port: int = 0
    replay_port: int = 0
    side_channel_port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _http: httpx2.Client = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.port, self.events_port, self.replay_port, self.side_channel_port = free_ports(4)
        self._http = httpx2.Client(base_url=self.url, timeout=60, trust_env=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        """The command of the server, without the interpreter and what makes it nice."""
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--block-size", str(BLOCK_SIZE_TOKENS), "--max-model-len", "8192"]
        command += ["--enable-scale-out", "--enable-prompt-tokens-details", "--enforce-eager"]
        if self.role.kv_events:
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self.events_port}",
                "replay_endpoint": f"tcp://*:{self.replay_port}",
                "topic": "",
            }
            command += ["--kv-events-config", json.dumps(events)]
        return [*command, *self.role.arguments]

    def start(self) -> None:
        """Start the server; return at once."""
        assert self._process is None, "it runs already"
        environment = ENVIRONMENT | dict(self.role.environment)
        environment |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["nice", "-n", "5", self.python, *self.command],
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until it answers `/health`. Raise RuntimeError, with the end of its log, if it does not start."""

        def ready() -> bool | None:
            if self._process is None or self._process.poll() is not None:
                return None
            with suppress(httpx2.TransportError):
                return self._http.get("/health", timeout=5).status_code == 200
            return False

        try:
            up = until(ready, lambda state: state is not False, within_s=START_S, pause_s=0.25)
        except TimeoutError:
            up = None
        if not up:
            raise RuntimeError(f"vLLM did not start:\n{self.log.read_text(errors='replace')[-4000:]}")

    def kill(self) -> None:
        """End all of its processes by SIGKILL: a machine that is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order within 15 s, and by SIGKILL what is left then. May be called twice."""
        self._http.close()
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
        finally:
            # The engine core and its workers outlive the HTTP process at times.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def runs(self) -> bool:
        return self._process is not None

    # -- what it shows

    def get(self, path: str) -> Any:
        return self._http.get(path).raise_for_status().json()

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> httpx2.Response:
        return self._http.post(path, json=body)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over all its labels; 0 if it is not there yet."""
        text = self._http.get("/metrics").raise_for_status().text
        lines = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, lines))

    @property
    def running(self) -> float:
        """Requests in the server's batch now."""
        return self.metric("vllm:num_requests_running")

    @property
    def reused_tokens(self) -> float:
        """Tokens of prompts that its own prefix cache had, since its start."""
        return self.metric("vllm:prefix_cache_hits_total")

    def forget(self) -> None:
        """Empty its prefix cache, once no request holds blocks any more."""
        until(lambda: self.post("/reset_prefix_cache").raise_for_status().json()["success"], bool, within_s=10)
        # An idle server keeps the event of it back until its scheduler takes a step.
        self.greedy([1], 1)

    def greedy(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Return the server's own greedy answer, not streamed."""
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": list(token_ids), "sampling_params": sampling, "stream": False}
        answer = self.post("/inference/v1/generate", body).raise_for_status().json()
        token_ids = answer["choices"][0]["token_ids"]
        return list(token_ids)


@define
class Servers:
    """The servers of a test run: at most two at a time, kept from test to test as long as they serve the same role."""

    python: str
    model: Path
    logs: Path
    _servers: list[VllmServer] = field(factory=list)
    _numbers: count[int] = field(factory=count)

    def take(self, *roles: Role) -> list[VllmServer]:
        """Return a ready server for each role, in order: those that run if they fit, and new ones beside them."""
        assert len(roles) <= AT_A_TIME, f"at most {AT_A_TIME} at a time"
        idle = [server for server in self._servers if server.runs]
        found: list[VllmServer | None] = []
        for role in roles:
            fits = next((server for server in idle if server.role == role), None)
            if fits is not None:
                idle.remove(fits)
            found.append(fits)
        kept = idle[: AT_A_TIME - len(roles)]
        for server in self._servers:
            if server not in kept and server not in found:  # also one that was killed: its client is open
                server.stop()
        self._servers = [*kept, *(server for server in found if server is not None)]
        taken = [self._new(role) if server is None else server for role, server in zip(roles, found, strict=True)]
        for server in taken:
            server.wait_until_ready()
        return taken

    def _new(self, role: Role) -> VllmServer:
        server = VllmServer(self.python, self.model, self.logs / f"vllm-{next(self._numbers)}.log", role)
        self._servers.append(server)
        server.start()
        return server

    def close(self) -> None:
        """End all of them, also where ending one fails."""
        with ExitStack() as stack:
            for server in self._servers:
                stack.callback(server.stop)
