"""Programs whose engine keeps them from ending in order: it blocks the loop, sits in a thread or hangs.

Real processes, real signals.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.serving.worlds import program

pytestmark = pytest.mark.slow  # each program runs for some seconds


STUCK = """
import ctypes, hashlib, re, sys, threading, time

import anyio

from engines import EchoEngine, Worker
from pipeline.protocols import LLMEngineOutput

HOW = {
    "sleep": lambda: time.sleep(60),
    "expression": lambda: re.match("(a+)+$", "a" * 64 + "b"),
    "hash": lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9),
}

class Blocks(EchoEngine):
    def __init__(self, how: str = "sleep", at_once: bool = False):
        super().__init__()
        self.how, self.at_once = how, at_once

    async def start(self, worker_id):
        if self.at_once:
            print("blocked", flush=True)
            HOW[self.how]()
        return await super().start(worker_id)

    async def background(self):
        await anyio.sleep(0.5)
        print("blocked", flush=True)
        HOW[self.how]()

class Threaded(EchoEngine):
    async def generate(self, request, context):
        print("generating", flush=True)
        await anyio.to_thread.run_sync(time.sleep, 60)
        yield LLMEngineOutput.stop()

class Stubborn(EchoEngine):
    async def generate(self, request, context):
        print("generating", flush=True)
        while True:
            try:
                await anyio.sleep(60)
            except BaseException:
                pass
        yield LLMEngineOutput.stop()

class Litters(EchoEngine):
    async def cleanup(self):
        threading.Thread(target=time.sleep, args=(60,)).start()
        print("cleaned up", flush=True)

class Slow(EchoEngine):
    def __init__(self, cleanup_s: float = 0.0):
        super().__init__()
        self.cleanup_s = cleanup_s

    async def start(self, worker_id):
        print("starting", flush=True)
        await anyio.sleep(60)

    async def cleanup(self):
        await anyio.sleep(self.cleanup_s)
        print("cleaned up", flush=True)

if __name__ == "__main__":
    anyio.run(Worker(Blocks()).run, backend=sys.argv[1])
"""

SHORT = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0", "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stuck.py").write_text(STUCK)
    return tmp_path


@contextmanager
def started(*command: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that prints a line when it is so far."""
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() != ""
            yield process
        finally:
            process.kill()


@contextmanager
def pending_chat(address: str) -> Iterator[None]:
    """Send a chat, and keep its connection open without reading the answer."""
    body = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "hello"}]})
    with closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        yield


def ended(process: subprocess.Popen[str], *signals: signal.Signals) -> tuple[int, str, float]:
    """Sends the signals; the exit code, the errors, and the seconds it took from the last one."""
    time.sleep(0.1)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.3)
    began = time.monotonic()
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors, time.monotonic() - began


TWICE = (signal.SIGTERM, signal.SIGTERM)


@pytest.mark.parametrize("how", ["sleep", "expression", "hash"])
def test_a_second_signal_ends_a_worker_whose_engine_blocks_the_loop(how: str, folder: Path) -> None:
    """`re` holds the interpreter and looks for signals, a hash gives it away and looks for none."""
    worker = ("worker", "stuck:Blocks")
    with program("--engine-arg", f"how={how}", command=worker, cwd=folder) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline() == "blocked\n"
        code, errors, took_s = ended(process, *TWICE)
    assert (code, "signal 15 again" in errors) == (128 + signal.SIGTERM, True)
    assert took_s < 5


@pytest.mark.parametrize(("how", "code"), [("sleep", 911 % 256), ("hash", 911 % 256), ("expression", 1)])
def test_the_deadline_ends_a_worker_whose_engine_blocks_the_loop(how: str, code: int, folder: Path) -> None:
    """And shows where it is stuck. Native code that holds the interpreter leaves no other exit code than 1."""
    worker = ("worker", "stuck:Blocks")
    with program("--engine-arg", f"how={how}", command=worker, cwd=folder, variables=SHORT) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline() == "blocked\n"
        returned, errors, took_s = ended(process, signal.SIGTERM)
    assert returned == code
    assert "in background" in errors
    assert took_s < 8


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_second_signal_ends_a_program_of_ones_own_whose_engine_blocks_the_loop(backend: str, folder: Path) -> None:
    with started("stuck.py", backend, cwd=folder) as process:
        code, _, took_s = ended(process, *TWICE)
    assert code == 128 + signal.SIGTERM
    assert took_s < 5


@pytest.mark.parametrize("engine", ["Threaded", "Stubborn"])
def test_a_second_signal_ends_a_server_whose_engine_does_not_end(engine: str, folder: Path) -> None:
    with program("--engine", f"stuck:{engine}", cwd=folder) as (process, address), pending_chat(address):
        assert process.stdout is not None
        assert process.stdout.readline() == "generating\n"
        code, errors, took_s = ended(process, *TWICE)
    assert (code, "signal 15 again" in errors) == (128 + signal.SIGTERM, True)
    assert took_s < 8


def test_a_signal_ends_a_server_that_waits_for_a_thread_of_its_engine(folder: Path) -> None:
    with program("--engine", "stuck:Litters", cwd=folder) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "cleaned up\n"
        time.sleep(0.5)
        code, _, took_s = ended(process, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert took_s < 5


SERVE = ("-m", "serving", "serve", "--port", "0", "--engine")


@pytest.mark.parametrize(
    ("sent", "gap_s", "cleanup_s"),
    [(signal.SIGTERM, 0.3, 0.8), (signal.SIGTERM, 0.05, 0.0), (signal.SIGINT, 0.02, 0.0), (signal.SIGINT, 0.1, 0.0)],
)
def test_two_signals_while_the_engines_start_end_the_server_in_order(
    sent: signal.Signals, gap_s: float, cleanup_s: float, folder: Path
) -> None:
    """The second one comes during the cleanup, while the loop ends, or while the interpreter does."""
    with started(*SERVE, "stuck:Slow", "--engine-arg", f"cleanup_s={cleanup_s}", cwd=folder) as process:
        time.sleep(0.1)
        process.send_signal(sent)
        time.sleep(gap_s)
        process.send_signal(sent)
        output, errors = process.communicate(timeout=20)
    assert (process.returncode, output, errors) == (0, "cleaned up\n", "")


def test_two_signals_while_a_start_cannot_be_cancelled_end_the_server(folder: Path) -> None:
    with started(*SERVE, "stuck:Slow", "--engine-arg", "cleanup_s=60", cwd=folder) as process:
        code, errors, took_s = ended(process, *TWICE)
    assert (code, "signal 15 again" in errors) == (128 + signal.SIGTERM, True)
    assert took_s < 8


def test_two_signals_while_a_start_blocks_the_loop_end_the_server(folder: Path) -> None:
    with started(*SERVE, "stuck:Blocks", "--engine-arg", "at_once=true", cwd=folder) as process:
        code, _, took_s = ended(process, signal.SIGINT, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert took_s < 8
