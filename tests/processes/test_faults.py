"""Processes are killed, paused and cut off while requests run: each client that could be served gets its tokens.

`CHAOS_ROUNDS=200` runs the long form, some half an hour for each kind of runtime, and `CHAOS_SEED`
draws other faults.
"""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from tests.processes.chaos import LEASE_TTL_S, under_load
from tests.processes.worlds import deployment

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "10"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + 60 * ROUNDS)]

KINDS = pytest.mark.parametrize("kind", ["nats", "file"])


@KINDS
async def test_random_faults_cost_no_client_of_a_living_front_end_a_token(kind: str, tmp_path: Path) -> None:
    with deployment(tmp_path, kind, router="kv" if kind == "nats" else "round-robin") as world:
        async with under_load(world, SEED) as chaos:
            faults = [chaos.kill_worker, chaos.kill_worker, chaos.kill_front_end, chaos.pause_worker]
            if world.broker is not None:
                faults.append(chaos.kill_broker)
            await chaos.rounds(ROUNDS, faults)
            await chaos.all_work()
            await chaos.only_the_living_are_registered()
        assert len(chaos.done) > 1


async def test_broken_connections_cost_no_client_a_token(tmp_path: Path) -> None:
    """A request fails only if four cuts have hit it, each at another worker: it moves on three times."""
    with deployment(tmp_path, "file", is_proxied=True) as world:
        async with under_load(world, SEED, moves_enough=3) as chaos:
            await chaos.cut_connection()
            await chaos.silence_connection()
            await chaos.rounds(ROUNDS // 2, [chaos.cut_connection, chaos.cut_connection, chaos.delay_connection])
        assert sum(each.passed_bytes for each in chaos.proxies) > 0


async def test_broken_connections_mixed_with_kills_cost_no_client_a_token(tmp_path: Path) -> None:
    """A request fails only if four faults have hit it: it moves on three times, and one worker is silent at most."""
    with deployment(tmp_path, "file", workers=5, is_proxied=True) as world:
        async with under_load(world, SEED, moves_enough=3) as chaos:
            await chaos.kill_in_silence()
            faults = [chaos.cut_connection, chaos.delay_connection, chaos.silence_meanwhile, chaos.kill_in_silence]
            await chaos.rounds(ROUNDS, [*faults, chaos.kill_worker, chaos.kill_front_end], settles=True)
            await chaos.all_are_used()
            await chaos.all_work()
            await chaos.only_the_living_are_registered()
        assert len(chaos.done) > 1


async def test_a_broker_that_dies_under_load_ends_no_stream_and_no_lease(tmp_path: Path) -> None:
    with deployment(tmp_path, "nats") as world:
        async with under_load(world, SEED) as chaos:
            workers = await world.living()
            for _ in range(3):
                await chaos.kill_broker()
                await anyio.sleep(1.0)
            assert world.broker is not None
            world.broker.kill()
            await anyio.sleep(LEASE_TTL_S + 5.0)  # every lease is over, and nobody is there to see it
            world.broker.start()
            await world.broker.ready()
            await anyio.sleep(1.0)
            assert await world.living() == workers
            await chaos.only_the_living_are_registered()
        assert chaos.load.not_exact() == []


@KINDS
async def test_a_killed_worker_is_registered_until_its_lease_ends(kind: str, tmp_path: Path) -> None:
    with deployment(tmp_path, kind) as world:
        async with under_load(world, SEED) as chaos:
            for worker in world.workers[:2]:
                worker.kill()
            await chaos.only_the_living_are_registered()
        assert len(await world.living()) == 2
        assert chaos.load.not_exact() == []


@KINDS
async def test_a_front_end_that_starts_among_dead_workers_fails_no_request(kind: str, tmp_path: Path) -> None:
    """Three times as many workers are announced and gone as are there, and as a request has attempts."""
    with deployment(tmp_path, kind, router="kv" if kind == "nats" else "round-robin") as world:
        async with under_load(world, SEED) as chaos:
            async with world.dead_workers(12) as dead:
                for front_end in world.front_ends:
                    await chaos.restart_front_end(front_end)
                    await anyio.sleep(2.0)
                assert await world.registered() == dead | await world.living()
            await chaos.only_the_living_are_registered()
