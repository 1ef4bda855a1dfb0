"""Prefill workers, decode workers and a front end as programs, killed at random moments under load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Literal

import anyio
import pytest

from tests.ports import reserved_port
from tests.processes.load import Load
from tests.processes.worlds import MODEL, TOKEN, Deployment, Program, penstock

pytestmark = pytest.mark.slow

KILLS = 4
TRANSFER = ("bootstrap_port=9000", "kv_bytes_per_token=131072", "kv_transfer_bandwidth=1.0", "speedup_ratio=0.5")
"""A meeting point for both halves, and 13 ms on the way for 100 tokens."""


def worker(folder: Path, mode: Literal["prefill", "decode"], number: int, environment: dict[str, str]) -> Program:
    port = reserved_port()
    arguments = ["worker", "mocker", "--model-name", MODEL, "--disaggregation-mode", mode]
    command = penstock(*arguments, *(f"--engine-arg={argument}" for argument in TRANSFER))
    own = environment | {"DYN_SYSTEM_PORT": str(port)}
    return Program(f"{mode}-{number}", command, folder, own, health_url=f"http://127.0.0.1:{port}/health")


@contextmanager
def deployment(folder: Path) -> Iterator[Deployment]:
    """Yield two prefill workers, two decode workers and a front end, not started."""
    url, port = f"file:{folder / 'runtime'}", reserved_port()
    environment = {
        "PENSTOCK_RUNTIME": url,
        "PENSTOCK_RUNTIME_TOKEN": TOKEN,
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "4",  # in which the front end learns that a worker goes
    }
    hosts = [worker(folder, mode, n, environment) for mode in ("prefill", "decode") for n in range(2)]
    command = penstock("serve", "--port", str(port), "--router", "round-robin")
    front = Program("front-end", command, folder, environment, health_url=f"http://127.0.0.1:{port}/health")
    made = Deployment(folder, url, hosts, [front])
    try:
        yield made
    finally:
        made.end()


async def test_no_answer_is_wrong_or_lost_while_workers_of_both_halves_are_killed(tmp_path: Path) -> None:
    random = Random(7)
    with deployment(tmp_path) as every:
        await every.start()
        (front,) = every.front_ends
        load = Load(lambda: front, random, clients=8, tokens=(20, 60))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            for number in range(KILLS):
                await anyio.sleep(random.uniform(1.0, 3.0))
                victim = every.workers[number % 4]  # the other one of its half is there
                victim.kill()
                await anyio.sleep(random.uniform(0.5, 2.0))
                victim.start()
                await victim.ready()
                await every.all_known()  # or the next one that is killed is the only one known of its half
            load.is_over = True
        assert load.not_exact() == []
        assert load.counts()["exact"] > 50
        assert all(program.is_running for program in every.programs)


async def test_workers_that_end_in_order_one_after_the_other_lose_nothing(tmp_path: Path) -> None:
    random = Random(8)
    with deployment(tmp_path) as every:
        await every.start()
        (front,) = every.front_ends
        load = Load(lambda: front, random, clients=8, tokens=(20, 60))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            for each in every.workers:
                await anyio.sleep(1.0)
                assert await each.stop() == 0
                each.start()
                await each.ready()
                await every.all_known()
            load.is_over = True
        assert load.not_exact() == []
        assert "moves on" not in front.log.read_text(encoding="utf-8")
