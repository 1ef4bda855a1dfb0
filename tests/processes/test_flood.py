"""A slow reader of a flood holds up nobody else on its connection, and nothing piles up for it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack

import anyio
import pytest

from tests.processes.flood import CALM_S, ITEMS, STREAMS, TICK_S, Report
from tests.processes.worlds import ROOT, resident_bytes

pytestmark = pytest.mark.slow

GROWTH_MAX_BYTES = 48 * 1024 * 1024
"""For either process, from the begin of the flood. The items alone would be more than this many bytes at each."""
ATTEMPTS = 3
"""Runs, the calmest of which counts: other work on the machine delays tokens too."""


def started(opened: ExitStack, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.processes.flood", *arguments]
    process = opened.enter_context(
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    opened.callback(process.kill)
    return process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"{process.args!r} ended with {process.wait(timeout=10)}"
    return line


async def flooded(items: int) -> tuple[Report, list[int]]:
    """Return the report of the client, and by how many bytes the client and the worker grew at most."""
    with ExitStack() as opened:
        worker = started(opened, "worker")
        client = started(opened, "client", await anyio.to_thread.run_sync(line_of, worker), str(items))
        await anyio.to_thread.run_sync(line_of, client)
        processes = (client, worker)
        begun = [resident_bytes(each.pid) for each in processes]
        most = list(begun)

        async def watch() -> None:
            while True:
                for at, each in enumerate(processes):
                    most[at] = max(most[at], resident_bytes(each.pid))
                await anyio.sleep(0.02)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            report = Report(**json.loads(await anyio.to_thread.run_sync(line_of, client)))
            tasks.cancel_scope.cancel()
            return report, [after - before for before, after in zip(begun, most, strict=True)]
    raise AssertionError("a task group let a failure pass")


async def test_a_flood_that_is_read_slowly_delays_no_other_stream_and_takes_no_memory() -> None:
    reports = []
    for _ in range(ATTEMPTS):
        report, growth = await flooded(ITEMS)
        assert report.items == ITEMS
        assert max(growth) < GROWTH_MAX_BYTES, growth
        assert report.calm_gaps > 0.5 * STREAMS * CALM_S / TICK_S
        reports.append(report)
        if report.flooded_p99_ms <= 2 * report.calm_p99_ms:
            return
    pytest.fail("\n".join(map(str, reports)))
