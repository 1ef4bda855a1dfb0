"""What a front end with the KV router pays for requests that other front ends take: their bookings, and KV events.

    python -m benchmarks.others_requests [--count 20000] [--burst 8] [--rounds 3] [--json FILE]

Another process publishes on the event plane, over a folder and sockets, as a front end or a worker does; this one
receives and applies it. CPU microseconds of the process that publishes and of the one that receives, the median of the
rounds, for each of

| row             | what it is                                                                         |
|-----------------|------------------------------------------------------------------------------------|
| booking, 16     | a request of 16 blocks: booked, its prompt computed, ended: three events           |
| booking, 64     | the same with 64 blocks                                                            |
| stored, 1       | an event of a worker that stored one block, as answers grow                        |
| stored, 16      | one of 16 blocks, as of a prompt                                                   |
| removed, 4      | an event of a worker that evicted 4 blocks                                         |

So many events as a burst leave together, a millisecond after the last: the turn of the loop is in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

from operators.kv import KvIndex, WorkerRank, kv_events
from operators.kv.events import EventFeed
from operators.kv.load import BOOKED, COMPUTED, ENDED, ActiveRequest, ActiveSequences, ReplicaSync
from operators.kv.load.ranks import Slot
from operators.kv.load.sequences import SequenceLoad
from pipeline.network import Event, Missed, Runtime, Scope
from pipeline.protocols.kv import (
    KV_EVENTS_TOPIC,
    KvEvent,
    KvRemoved,
    KvStored,
    RouterEvent,
    StoredBlock,
)

ENDPOINT = "bench/worker/generate"
SCOPE = Scope("bench", "worker")
WORKER = 4_503_599_627_370_497
ROWS = ("booking, 16", "booking, 64", "stored, 1", "stored, 16", "removed, 4")
_EVERY_S = 0.001
_LIVE = 32
"""Requests that are booked at a time, and blocks of a worker that follow each other before it removes them."""


@frozen
class Cost:
    """CPU microseconds of one booking or event."""

    publisher_us: float
    receiver_us: float


def publish_bookings(sync: ReplicaSync, blocks: int, count: int) -> Iterator[None]:
    """Publish the steps of so many requests; they overlap."""
    random, slot = Random(1), Slot(WorkerRank(WORKER, 0), 1, lazy=False)
    live: list[ActiveRequest] = []
    for number in range(count):
        request = ActiveRequest(f"chatcmpl-{random.getrandbits(128):032x}-{number}")
        request.slot = slot
        hashes = [random.getrandbits(64) for _ in range(blocks)]
        sync.publish(BOOKED, request, SequenceLoad(hashes, 16 * blocks))
        yield
        sync.publish(COMPUTED, request)
        live.append(request)
        if len(live) > _LIVE:
            sync.publish(ENDED, live.pop(0))


def kv_changes(row: str, count: int) -> Iterator[RouterEvent]:
    """Return so many events of a worker, all of which change its cache."""
    random, number = Random(1), 0
    kind, blocks = row.split(", ")
    parent: int | None = None
    names: list[int] = []
    for _ in range(count):
        stored = [StoredBlock(random.getrandbits(64), random.getrandbits(64)) for _ in range(int(blocks))]
        number += 1
        yield RouterEvent(WORKER, KvEvent(number, KvStored(parent, stored)))
        names += [block.block_hash for block in stored]
        parent = names[-1] if len(names) < _LIVE * len(stored) else None
        if kind == "removed":
            number += 1
            yield RouterEvent(WORKER, KvEvent(number, KvRemoved(names[-len(stored) :])))
            parent = None
            names.clear()


async def publish(url: str, row: str, count: int, burst: int) -> None:
    """Publish the row, and print the CPU seconds that it took."""
    async with Runtime.at(url) as runtime:
        steps: Iterator[object]
        if row.startswith("booking"):
            sync = ReplicaSync(runtime.events, ENDPOINT)
            steps = publish_bookings(sync, int(row.split(", ")[1]), count)
            after: Callable[[Any], object] = lambda _: None  # noqa: E731
        else:
            publisher = runtime.events.publisher(SCOPE, KV_EVENTS_TOPIC)
            steps, after = kv_changes(row, count), publisher.publish
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        begun_s = time.process_time()
        for done, step in enumerate(steps, 1):
            after(step)
            if done % burst == 0:
                await anyio.sleep(_EVERY_S)
        await anyio.sleep(0.05)  # what waits for the socket leaves
        print(time.process_time() - begun_s, flush=True)
        await asyncio.to_thread(sys.stdin.readline)


class Receiver:
    """A front end's share: the load book of its router, or its index."""

    def __init__(self, runtime: Runtime, row: str) -> None:
        self.received = 0
        self.sequences, self.index = ActiveSequences(), KvIndex()
        if row.startswith("booking"):
            sync = self.sync = ReplicaSync(runtime.events, ENDPOINT)
            sync.join(self.sequences, asyncio.get_running_loop().time)
            return
        feed = self.feed = EventFeed(self.index, _keeps_nothing)
        feed.add_worker(WORKER)

        def take(event: Event[RouterEvent] | Missed) -> None:
            if isinstance(event, Missed):
                return
            self.received += 1
            feed.receive(event.payload, event.publisher_id)

        kv_events(runtime.events, ENDPOINT).subscribe(take)

    async def run(self) -> None:
        """Apply what arrives, until cancelled."""
        if hasattr(self, "sync"):
            await self.sync.run(lambda: None)
        else:
            await self.feed.run()


async def _keeps_nothing(rank: WorkerRank, first_id: int | None) -> None:
    return None


async def receive(url: str, row: str, count: int, burst: int) -> Cost:
    """Return what the row costs both processes."""
    command = [sys.executable, "-m", "benchmarks.others_requests", "--publish", url, row]
    command += ["--count", str(count), "--burst", str(burst)]
    publisher_s = receiver_s = 0.0
    with ExitStack() as stack:
        child = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))  # noqa: ASYNC220
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            async with Runtime.at(url) as runtime, anyio.create_task_group() as tasks:
                receiver = Receiver(runtime, row)
                tasks.start_soon(receiver.run)
                await asyncio.to_thread(child.stdout.readline)
                await anyio.sleep(1.0)  # the stream to the other process is open
                begun_s = time.process_time()
                child.stdin.write("\n")
                child.stdin.flush()
                publisher_s = float(await asyncio.to_thread(child.stdout.readline))
                await anyio.sleep(0.2)
                receiver_s = time.process_time() - begun_s
                _check(receiver, row, count)
                tasks.cancel_scope.cancel()
        finally:
            child.kill()
    return Cost(publisher_s / count * 1e6, receiver_s / count * 1e6)


def _check(receiver: Receiver, row: str, count: int) -> None:
    """Raise SystemExit unless all has arrived and is applied."""
    if row.startswith("booking"):
        found, wanted = len(receiver.sequences), min(count, _LIVE)
    else:
        found, wanted = receiver.received, count * (2 if row.startswith("removed") else 1)
    if found != wanted:
        raise SystemExit(f"{row}: {found} of {wanted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--burst", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--publish", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.publish is not None:
        url, row = asked.publish
        asyncio.run(publish(url, row, asked.count, asked.burst))
        return
    turns: dict[str, list[Cost]] = {row: [] for row in ROWS}
    for _ in range(asked.rounds):
        for row in ROWS:
            with TemporaryDirectory() as folder:
                turns[row].append(asyncio.run(receive(f"file:{folder}", row, asked.count, asked.burst)))
    rows = {
        row: Cost(median(cost.publisher_us for cost in costs), median(cost.receiver_us for cost in costs))
        for row, costs in turns.items()
    }
    shown = Table("", "publisher µs", "receiver µs")
    for row, cost in rows.items():
        shown.add_row(row, f"{cost.publisher_us:.1f}", f"{cost.receiver_us:.1f}")
    Console().print(shown)
    if asked.json is not None:
        asked.json.write_text(json.dumps({row: asdict(cost) for row, cost in rows.items()}, indent=1))


if __name__ == "__main__":
    main()
