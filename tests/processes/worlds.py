"""Builders for tests with real processes: programs of a deployment, their broker, and what is known of each process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import cast

import anyio
from attrs import Factory, define, evolve, field, frozen

from pipeline.network import EndpointId, Instance, Runtime
from pipeline.network.tcp import TcpOptions
from tests.ports import reserved_port

ROOT = Path(__file__).parents[2]
TOKEN = "a-secret-of-the-tests"
MODEL = "mock"
START_TIMEOUT_S = 60.0
"""Seconds for a program to start while all others do, on a machine with two cores."""


_MODEL_WORKERS = re.compile(r"^dynamo_frontend_model_workers\{[^}]*\} (\S+)$", re.MULTILINE)
"""Of a front end: workers whose cards it uses, for each model and role."""


@frozen
class Size:
    """What a process holds at one moment."""

    resident_bytes: int
    open_files: int


@define(eq=False)
class Program:
    """A process that a test starts, ends in every way there is, and starts again with the same arguments."""

    name: str
    command: Sequence[str]
    folder: Path
    """Where its output goes: `NAME.log`, of all its lives."""
    environment: Mapping[str, str] = Factory(dict)
    """What is added to the variables of the test."""
    health_url: str = ""
    """Answers 200 once the process is ready."""
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0
    """How often it was started."""
    is_paused: bool = False

    def start(self) -> None:
        """Start the process; see `ready`."""
        assert self.process is None, f"{self.name} runs"
        self.lives += 1
        with self.log.open("ab") as log:
            log.write(f"--- life {self.lives} of {self.name}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the process is ready. Raise AssertionError, with its output, if it ends or is not in time."""
        with anyio.move_on_after(timeout_s):
            while not await self.is_healthy():
                assert self.is_running, self.last_lines()
                await anyio.sleep(0.05)
            return
        raise AssertionError(f"{self.name} is not ready after {timeout_s:g} s:\n{self.last_lines()}")

    async def is_healthy(self) -> bool:
        """Return whether the process answers that it is ready."""
        return await anyio.to_thread.run_sync(self._is_healthy)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.health_url, timeout=10) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    async def state(self) -> dict[str, object]:
        """Return what `/health` has, whether or not the process is ready."""
        loaded: dict[str, object] = json.loads(await self.page("/health"))
        return loaded

    async def page(self, path: str) -> str:
        """Return a page of the server that `/health` is of, whatever its status."""

        def read() -> bytes:
            try:
                with urllib.request.urlopen(self.health_url.removesuffix("/health") + path, timeout=30) as response:
                    return bytes(response.read())
            except urllib.error.HTTPError as answer:
                with answer:
                    return answer.read()

        return (await anyio.to_thread.run_sync(read)).decode()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def last_lines(self, count: int = 40) -> str:
        lines = (
            self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:] if self.log.exists() else []
        )
        return "\n".join(lines)

    def kill(self) -> None:
        """End the process at once (`SIGKILL`), and what it has started."""
        if self.process is not None:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=10)
        self.process, self.is_paused = None, False

    async def stop(self, timeout_s: float = 60.0) -> int:
        """End the process in order (`SIGTERM`). Return its exit code; raise AssertionError if it takes too long."""
        assert self.process is not None
        self.process.terminate()
        ended = self.process
        await until(lambda: ended.poll() is not None, timeout_s, f"{self.name} ends")
        self.process = None
        return ended.returncode

    def pause(self) -> None:
        """Stop the process as it is (`SIGSTOP`): its connections stay open, and it does nothing."""
        os.killpg(self.pid, signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        """Let a paused process go on, if it is there yet."""
        if self.is_paused:
            self.is_paused = False
            os.killpg(self.pid, signal.SIGCONT)

    def size(self) -> Size:
        """Return what the process holds now."""
        return Size(resident_bytes(self.pid), len(os.listdir(f"/proc/{self.pid}/fd")))


def resident_bytes(pid: int) -> int:
    """Return the memory of a process that is in use."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def penstock(*arguments: str) -> list[str]:
    """Return the command of a program of ours, from this checkout."""
    return [sys.executable, "-m", "serving", *arguments]


def nats_server(folder: Path, port: int) -> Program:
    """Return a NATS server whose data survive its death."""
    monitor = reserved_port()
    command = [
        *(str(Path(sys.executable).parent / "nats-server"), "--addr", "127.0.0.1", "--port", str(port)),
        *("--jetstream", "--store_dir", str(folder / "nats"), "--http_port", str(monitor)),
    ]
    return Program("nats", command, folder, health_url=f"http://127.0.0.1:{monitor}/healthz")


@define(eq=False)
class Deployment:
    """Workers and front ends of one runtime, and its broker if it has one."""

    folder: Path
    runtime: str
    """URL of the runtime."""
    workers: list[Program]
    front_ends: list[Program]
    broker: Program | None = None
    addresses: list[tuple[str, int]] = field(factory=list)
    """Where workers are announced, in their order, if that is not where they listen: on the same port of 127.0.0.1."""
    in_rotation: list[Program] = field(factory=list)
    """Front ends that clients send to, as a load balancer would."""

    @property
    def programs(self) -> list[Program]:
        return [*([self.broker] if self.broker else []), *self.workers, *self.front_ends]

    async def start(self) -> None:
        """Start all programs, and wait until each is ready and each front end knows every worker."""
        if self.broker is not None:
            self.broker.start()
            await self.broker.ready()
        for each in (*self.workers, *self.front_ends):
            each.start()
        for each in (*self.workers, *self.front_ends):
            await each.ready()
        await self.all_known()
        self.in_rotation = list(self.front_ends)

    async def all_known(self) -> None:
        """Wait until each front end may send requests to every worker that runs."""
        living = await self.living()
        for each in self.front_ends:
            with anyio.fail_after(START_TIMEOUT_S):
                while not await self._knows(each, living):  # noqa: ASYNC110
                    await anyio.sleep(0.05)

    async def _knows(self, front_end: Program, living: set[int]) -> bool:
        """Return whether a front end knows these workers, and the cards of all that it knows: those come later."""
        known = await self.known_to(front_end)
        cards = sum(float(each) for each in _MODEL_WORKERS.findall(await front_end.page("/metrics")))
        return living <= known and cards >= len(known)

    def end(self) -> None:
        """Kill what runs."""
        for each in self.programs:
            each.kill()

    async def living(self) -> set[int]:
        """Return the ids of the workers that run."""
        return {
            int(name.rpartition("/")[2])
            for worker in self.workers
            if worker.is_running and not worker.is_paused
            for name in cast(dict[str, str], (await worker.state())["endpoints"])
        }

    async def known_to(self, front_end: Program) -> set[int]:
        """Return the ids of the workers that a front end knows, whether or not it can reach them."""
        instances = cast(list[str], (await front_end.state())["instances"])
        return {int(instance.rpartition("/")[2]) for instance in instances}

    async def registered(self) -> set[int]:
        """Return the ids of the workers that a process which comes now would send requests to."""
        async with Runtime.at(self.runtime, tcp=TcpOptions(token=TOKEN)) as runtime:
            return {each.instance_id for each in await runtime.discovery.instances(f"dynamo-{MODEL}/backend/generate")}

    @asynccontextmanager
    async def dead_workers(self, count: int) -> AsyncIterator[set[int]]:
        """Announce so many workers, with cards as those that are there, at addresses that refuse; yield their ids."""
        where = f"dynamo-{MODEL}/backend/generate"
        transport = {"tcp": f"127.0.0.1:{reserved_port()}"}
        async with Runtime.at(self.runtime, tcp=TcpOptions(token=TOKEN)) as runtime:
            card = (await runtime.discovery.models(where))[0]
            ids = set(range(1, count + 1))
            for one in ids:
                instance = evolve(Instance.of(EndpointId.parse(where), one), transport=transport)
                await runtime.discovery.register(instance)
                await runtime.discovery.register_model(evolve(card, instance_id=one))
            yield ids

    def logs(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the whole output of each program of ours."""
        for each in (*self.workers, *self.front_ends):
            yield each.name, each.log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def deployment(
    folder: Path,
    kind: str,
    *,
    workers: int = 4,
    front_ends: int = 2,
    step_ms: float = 20.0,
    router: str = "round-robin",
    variables: Mapping[str, str] | None = None,
    runtime_folder: Path | None = None,
    is_proxied: bool = False,
) -> Iterator[Deployment]:
    """Yield a deployment of mock engines that is not started; what runs is killed at the end.

    `kind` is `nats` or `file`, `step_ms` about the time of a token. `runtime_folder` is the shared folder of `file`.
    With `is_proxied` workers are announced at `addresses`, where the test has to run a proxy for each.
    """
    broker_port = reserved_port()
    shared = runtime_folder or folder / "runtime"
    broker = nats_server(folder, broker_port) if kind == "nats" else None
    runtime = f"nats://127.0.0.1:{broker_port}" if broker else f"file:{shared}"
    environment = {
        "PENSTOCK_RUNTIME": runtime,
        "PENSTOCK_RUNTIME_TOKEN": TOKEN,
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
        "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "30",
        "PENSTOCK_LOG_LEVEL": "info",
        **(variables or {}),
    }

    addresses: list[tuple[str, int]] = []

    def worker(number: int) -> Program:
        port = reserved_port()
        arguments = ["worker", "mocker", "--model-name", MODEL, "--engine-arg", f"speedup_ratio={6.0 / step_ms:g}"]
        own = {**environment, "DYN_SYSTEM_PORT": str(port), "PENSTOCK_PORT": str(reserved_port())}
        command = penstock(*arguments)
        if is_proxied:
            addresses.append((f"127.0.0.{10 + number}", reserved_port()))
            host, announced = addresses[-1]
            command = [sys.executable, "-m", "tests.processes.announced_elsewhere", host, str(announced), *arguments]
        return Program(f"worker-{number}", command, folder, own, health_url=f"http://127.0.0.1:{port}/health")

    def front_end(number: int) -> Program:
        port = reserved_port()
        arguments = ["serve", "--port", str(port), "--router", router]
        return Program(
            f"front-end-{number}",
            penstock(*arguments),
            folder,
            environment,
            health_url=f"http://127.0.0.1:{port}/health",
        )

    hosts, front = [worker(n) for n in range(workers)], [front_end(n) for n in range(front_ends)]
    made = Deployment(folder, runtime, hosts, front, broker, addresses)
    try:
        yield made
    finally:
        made.end()


async def until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Wait until the condition holds. Raise AssertionError if it does not in time."""
    with anyio.move_on_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - what a process does raises no event here
            await anyio.sleep(0.05)
        return
    raise AssertionError(f"{what}: not within {timeout_s:g} s")
