"""The programs as processes that host engines: under load, with signals, in real time."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.ports import reserved_port
from tests.serving.worlds import post, program, until_it_drains

pytestmark = pytest.mark.slow  # each starts a program

MOCKER = ("--engine", "mocker", "--workers", "2")
PATIENT = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "60"}
"""A server that gives running answers that long."""
OWN = """
import anyio

from engines import EchoEngine
from pipeline import InvalidArgument

class Loud(EchoEngine):
    async def cleanup(self):
        print("cleaned up", flush=True)

class Slow(Loud):
    async def start(self, worker_id):
        print("starting", flush=True)
        await anyio.sleep(60)

async def made_slowly():
    print("starting", flush=True)
    try:
        await anyio.sleep(60)
    finally:
        print("cleaned up", flush=True)

class Broken(EchoEngine):
    async def start(self, worker_id):
        raise RuntimeError("no such device\\nat all")

class Hot(EchoEngine):
    async def start(self, worker_id):
        raise InvalidArgument("too slow", field="fan")

class Brief(Loud):
    async def background(self):
        raise RuntimeError("the scheduler broke")
"""


BROKEN = [
    "Error: RuntimeError: no such device at all",
    f"  own_engine.py:{OWN[: OWN.index('no such device')].count(chr(10)) + 1} in start",
    "  the whole traceback: --log-level debug",
]


def status_of(address: str, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_under_load_the_first_signal_lets_streams_finish_and_refuses_new_requests() -> None:
    streams = 20
    with program(*MOCKER, "--engine-arg", "speedup_ratio=0.5", variables=PATIENT) as (process, address):
        begun = []

        def read() -> str:
            with post(address, stream=True, max_tokens=400, ignore_eos=True) as response:
                first = response.read(1)
                begun.append(first)
                return (first + response.read()).decode()

        with ThreadPoolExecutor(streams) as clients:
            answers = [clients.submit(read) for _ in range(streams)]
            while len(begun) < streams:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            until_it_drains(address)
            with post(address) as refused:
                assert refused.status == 503
            texts = [answer.result() for answer in answers]
        assert all('"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n") for text in texts)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")


def test_under_load_the_second_signal_ends_at_once() -> None:
    with program(*MOCKER, variables=PATIENT) as (process, address), ExitStack() as open_streams:
        for _ in range(5):
            response = open_streams.enter_context(post(address, stream=True, max_tokens=100_000, ignore_eos=True))
            response.read(1)
        process.send_signal(signal.SIGTERM)
        until_it_drains(address)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
        assert time.monotonic() - began < 15


def test_the_mock_engine_answers_in_letters_and_shows_its_metrics() -> None:
    with program(*MOCKER, "--engine-arg", "speedup_ratio=100") as (_, address):
        with post(address, max_tokens=30) as response:
            answer = json.loads(response.read())
        text = answer["choices"][0]["message"]["content"]
        assert (len(text), text.isalpha(), answer["choices"][0]["finish_reason"]) == (30, True, "length")
        status, metrics = status_of(address, "/metrics")
        assert status == 200
        assert metrics.count("dynamo_component_model_load_time_seconds{") == 2
        assert metrics.count("dynamo_component_total_blocks{") == 2


@pytest.fixture
def own_engine(tmp_path: Path) -> Path:
    """A folder with an engine from outside this project."""
    (tmp_path / "own_engine.py").write_text(OWN)
    return tmp_path


def test_a_worker_hosts_an_engine_of_another_module_until_a_signal(own_engine: Path) -> None:
    worker, grace = ("worker", "own_engine:Loud"), {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "10"}
    with program("--namespace", "mine", command=worker, cwd=own_engine, variables=grace) as (process, address):
        with post(address) as response:
            assert json.loads(response.read())["choices"][0]["message"]["content"] == "hello"
        assert "dyn://mine.backend.generate/" in status_of(address, "/health")[1]
        process.send_signal(signal.SIGTERM)
        until_it_drains(address)
        with post(address) as refused:
            assert refused.status == 503
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output, errors) == (0, "cleaned up\n", "")


def test_the_second_signal_ends_a_worker_with_its_number() -> None:
    with program(command=("worker", "mocker")) as (process, address):
        process.send_signal(signal.SIGTERM)
        until_it_drains(address)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM


def ended(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The program that ended by itself."""
    return subprocess.run(
        [sys.executable, "-m", "serving", *command],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=30,
        check=False,
        env=os.environ | variables,
    )


@pytest.mark.parametrize(
    ("command", "code", "lines"),
    [
        (("worker", "own_engine:Broken", "--port", "0"), 1, BROKEN),
        (("serve", "--engine", "own_engine:Broken", "--port", "0", "--workers", "2"), 1, BROKEN),
        (("graph", "--engine", "own_engine:Broken"), 1, BROKEN),
        (("graph", "--engine", "own_engine:Hot"), 2, ["Error: fan: too slow"]),
        (("serve", "--engine", "absent:Engine"), 2, ["Error: --engine: ModuleNotFoundError: No module named 'absent'"]),
    ],
)
def test_an_engine_that_cannot_start_is_shown_with_its_class_and_place(
    own_engine: Path, command: tuple[str, ...], code: int, lines: list[str]
) -> None:
    done = ended(own_engine, *command)
    assert (done.returncode, done.stderr.splitlines()) == (code, lines)


@pytest.mark.parametrize("engine", ["own_engine:Broken", "absent:Engine"])
def test_the_whole_traceback_is_shown_where_it_is_wanted(own_engine: Path, engine: str) -> None:
    done = ended(own_engine, "graph", "--engine", engine, "--log-level", "debug")
    assert "Traceback (most recent call last)" in done.stderr


@pytest.mark.parametrize("command", [("worker", "own_engine:Brief"), ("serve", "--engine", "own_engine:Brief")])
def test_an_engine_that_breaks_ends_its_program_as_a_failure(own_engine: Path, command: tuple[str, ...]) -> None:
    done = ended(own_engine, *command, "--port", "0")
    assert done.returncode == 1
    assert "\nError: RuntimeError: the scheduler broke\n  own_engine.py:" in done.stderr
    assert done.stdout.endswith("cleaned up\n")


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--engine", "own_engine:Slow"),
        ("serve", "--engine", "own_engine:made_slowly"),
        ("worker", "own_engine:made_slowly"),
    ],
)
def test_a_signal_while_an_engine_starts_or_is_made_cancels_that_and_cleans_up(
    own_engine: Path, command: tuple[str, ...]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "serving", *command, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=own_engine,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=10)
    assert (process.returncode, output, errors) == (0, "cleaned up\n", "")


def test_a_status_port_that_is_taken_is_one_line_and_starts_nothing(own_engine: Path) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        done = ended(own_engine, "worker", "own_engine:Slow", "--port", "0", DYN_SYSTEM_PORT=str(port))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"DYN_SYSTEM_PORT={port}: port {port} on 0.0.0.0 is in use" in done.stderr


def test_the_status_of_a_worker_is_shown_where_it_is_wanted() -> None:
    port = reserved_port()
    with program(command=("worker", "echo"), variables={"DYN_SYSTEM_PORT": str(port)}) as _:
        address = f"127.0.0.1:{port}"
        status, body = status_of(address, "/health")
        assert (status, json.loads(body)["status"]) == (200, "ready")
        assert status_of(address, "/live")[0] == 200
        assert status_of(address, "/nowhere") == (404, "Route not found")
        assert "dynamo_component_model_load_time_seconds" in status_of(address, "/metrics")[1]
