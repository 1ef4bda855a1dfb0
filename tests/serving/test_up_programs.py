"""`penstock up` as a user starts it: real processes, real signals, under load."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import openai
import pytest
from attrs import define, field

from tests.processes.load import right_answer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans")]

ROOT = Path(__file__).parents[2]
READY = re.compile(r"Serving \S+ at (\S+); admin at (\S+); runtime (\S+)")
START_S = 90.0
TOKENS = 40


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {}


@define(eq=False)
class Up:
    """A deployment that serves."""

    process: subprocess.Popen[str]
    url: str
    admin: str
    runtime: str

    def health(self) -> dict[str, dict[str, Any]]:
        """The state of each process by its name."""
        return {each["name"]: each for each in json.loads(self.page("/health"))["processes"]}

    def page(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"{self.admin}{path}", timeout=10) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as answer:
            with answer:
                return answer.read().decode()

    def processes(self) -> list[int]:
        """The processes of the deployment that run, this one's own among them."""
        found = []
        for each in Path("/proc").iterdir():
            if each.name.isdigit():
                try:
                    if f"--runtime={self.runtime}".encode() in (each / "cmdline").read_bytes().split(b"\0"):
                        found.append(int(each.name))
                except OSError:
                    continue
        return found


@contextmanager
def up(*options: str, command: str = "up", **variables: str) -> Iterator[Up]:
    """A deployment of two mock workers and two front ends; killed in the end, and nothing may be left of it."""
    environment = {
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
        "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "30",
        **variables,
    }
    fixed = ["--engine=mocker", "--engine-arg=speedup_ratio=0.5", "--workers=2", "--port=0", "--log-level=info"]
    with subprocess.Popen(
        [sys.executable, "-m", "serving", command, *fixed, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    ) as process:
        try:
            assert process.stdout is not None
            found = READY.match(process.stdout.readline())
            assert found is not None
            made = Up(process, *found.groups())
            yield made
        finally:
            process.kill()
            process.wait()
    ends_s = time.monotonic() + 5
    while made.processes() and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert made.processes() == []


@define(eq=False)
class Clients:
    """Clients of a deployment, each with one request after the other on connections that they keep."""

    url: str
    is_over: bool = False
    exact: int = 0
    others: list[str] = field(factory=list)

    async def one(self, number: int) -> None:
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            count = 0
            while not self.is_over:
                prompt = f"{number} {count}"
                count += 1
                try:
                    stream = await client.completions.create(
                        model="echo", prompt=prompt, max_tokens=TOKENS, stream=True, temperature=0
                    )
                    text = "".join([part.choices[0].text async for part in stream if part.choices])
                except openai.OpenAIError as error:
                    self.others.append(f"{prompt}: {type(error).__name__}: {error} {error.__cause__!r}")
                    continue
                if text == right_answer(prompt, TOKENS):
                    self.exact += 1
                else:
                    self.others.append(f"{prompt}: {text!r}")


@asynccontextmanager
async def clients(url: str, count: int) -> AsyncIterator[Clients]:
    made = Clients(url)
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(made.one, number)
        try:
            yield made
        finally:
            made.is_over = True


async def until_served_again(deployment: Up, name: str, starts: int) -> None:
    with anyio.fail_after(START_S):
        while True:
            state = (await anyio.to_thread.run_sync(deployment.health))[name]
            if state["starts"] > starts and state["is_ready"]:
                return
            await anyio.sleep(0.2)


async def until_workers_are_known(deployment: Up, count: int, front_ends: int = 2) -> None:
    """Wait until every front end knows so many workers: a ready one is announced, and seen with the next look."""
    pattern = re.compile(r"^dynamo_frontend_model_workers\{.*process=\"frontend-.*\} (\S+)$", re.MULTILINE)
    with anyio.fail_after(START_S):
        while True:
            page = await anyio.to_thread.run_sync(deployment.page, "/metrics")
            if [float(each) for each in pattern.findall(page)] == [count] * front_ends:
                return
            await anyio.sleep(0.2)


async def until_more_are_exact(load: Clients, count: int = 1) -> None:
    """Wait until the clients have got so many more answers."""
    wanted = load.exact + count
    with anyio.fail_after(START_S):
        while load.exact < wanted:  # noqa: ASYNC110 - the answers come from other processes
            await anyio.sleep(0.05)


async def test_a_rolling_restart_of_all_workers_and_front_ends_fails_no_request() -> None:
    with up("--frontends=2") as deployment:
        await until_workers_are_known(deployment, 2)
        async with clients(deployment.url, 8) as load:
            for name, state in deployment.health().items():
                os.kill(state["pid"], signal.SIGTERM)
                await until_more_are_exact(load)
                await until_served_again(deployment, name, state["starts"])
                await until_workers_are_known(deployment, 2)  # those that end next are not the only ones known
                await until_more_are_exact(load)
        assert load.others == []
        assert load.exact > 50
        assert all(state["starts"] == 2 for state in deployment.health().values())


async def test_killed_processes_are_replaced_and_other_requests_go_on() -> None:
    with up("--frontends=2") as deployment:
        await until_workers_are_known(deployment, 2)
        async with clients(deployment.url, 4) as load:
            for name in ("worker-1", "frontend-1"):
                state = deployment.health()[name]
                os.kill(state["pid"], signal.SIGKILL)
                await until_served_again(deployment, name, state["starts"])
            await until_workers_are_known(deployment, 2)
            failed = len(load.others)
            await until_more_are_exact(load, 20)
        assert len(load.others) == failed <= 4  # those of the front end that was killed
        assert deployment.health()["worker-1"]["last_end"] == "was ended by signal 9"


async def test_a_broker_that_is_killed_is_replaced_and_no_request_fails() -> None:
    with up("--frontends=2", "--broker=nats", PENSTOCK_RUNTIME_TOKEN="a-secret") as deployment:
        await until_workers_are_known(deployment, 2)
        async with clients(deployment.url, 4) as load:
            for starts in (1, 2):
                os.kill(deployment.health()["broker"]["pid"], signal.SIGKILL)
                await until_more_are_exact(load)
                await until_served_again(deployment, "broker", starts)
                await until_more_are_exact(load, 10)
        assert load.others == []


def test_the_first_signal_ends_all_in_order() -> None:
    with up("--frontends=2") as deployment:
        deployment.process.send_signal(signal.SIGINT)
        assert deployment.process.wait(timeout=30) == 0
        assert deployment.processes() == []
        assert not Path(deployment.runtime.removeprefix("file:")).exists()


def test_the_second_signal_ends_all_at_once() -> None:
    with up(DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="60") as deployment:
        deployment.process.send_signal(signal.SIGTERM)
        time.sleep(2.5)
        began = time.monotonic()
        deployment.process.send_signal(signal.SIGTERM)
        assert deployment.process.wait(timeout=30) == 0
        assert time.monotonic() - began < 15  # the grace would take 60 s
        assert deployment.processes() == []


def test_a_deployment_serves_though_nobody_reads_its_line() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "serving", "up", "--port=0", "--admin-port=0", "--log-format=json"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices, TemporaryDirectory() as folder:
        notices.bind(path := f"{folder}/notices")
        notices.settimeout(START_S)
        variables = {**os.environ, "NOTIFY_SOCKET": path}
        process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=variables)
        os.close(writer)
        try:
            assert "READY=1" in notices.recv(4096).decode()
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "Traceback" not in errors


def test_nothing_is_left_when_it_is_killed() -> None:
    with up() as deployment:
        assert len(deployment.processes()) == 3
        deployment.process.kill()


def test_metrics_of_all_processes_are_at_the_admin_address_alone() -> None:
    with up("--processes=2", command="serve") as deployment:
        anyio.run(until_workers_are_known, deployment, 2)
        for _ in range(6):
            with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none") as client:
                client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
        page = deployment.page("/metrics")
        samples = re.findall(r"^dynamo_frontend_requests_total\{.*process=\"([^\"]+)\".*\} (\S+)$", page, re.MULTILINE)
        assert sum(float(value) for _, value in samples) == 6
        assert {name.split("-")[0] for name, _ in samples} == {"frontend"}
        assert 'process="worker-1"' in page
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{deployment.url}/metrics", timeout=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine=none-such"], "--engine: "),
        (["--engine=mocker", "--engine-arg=block_size=-1"], "block_size"),
        (["--runtime=redis://a"], "runtime"),
    ],
)
def test_what_cannot_run_ends_the_command_with_the_message(options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "serving", "up", "--port=0", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False, cwd=ROOT)
    assert ran.returncode == 2
    assert message in ran.stderr.splitlines()[-1]
