"""A trace through a disaggregated graph whose workers die, return and restart, and every token of it checked.

    python -m benchmarks.chaos TRACE.jsonl --workers 6 --prefill-workers 3 --seed 7

Without a TRACE the load is made up: conversations of several turns, with shared beginnings. Each answer is compared
with that of an undisturbed engine; at the end nothing may be booked, held, running or waiting. Exit code 1 if anything
was lost, doubled or left over.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from time import perf_counter
from typing import cast

import anyio
from attrs import define

from engines.mocker import MockEngine
from pipeline.testing import run_in_virtual_time
from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.replay import (
    Fault,
    Report,
    RollingRestart,
    Samples,
    Schedule,
    Trace,
    first_requests,
    make_report,
    plan_faults,
    read_trace,
)
from serving.replay.driver import LoadDriver
from serving.replay.observe import FleetRecorder

from .chaos_load import chaos_script, conversation_load
from .chaos_watch import Death, Watch
from .ledger import AnswerRecord, Ledger

SETTLES_S = 30.0
"""After the last answer: what ends in the background has ended by then."""
_SHOWN = 10


@define
class Outcome:
    """What became of a trace. `problems` is empty if nothing was lost, doubled or left over."""

    report: Report
    ledger: Ledger
    problems: list[str]
    deaths: list[Death]

    @property
    def broken(self) -> dict[str, AnswerRecord]:
        """The requests that were not completed, by name."""
        return {name: record for name, record in self.ledger.records.items() if not record.is_complete}


def chaos_config(
    workers: int, prefill_workers: int, *, seed: int, meets: bool = True, **engine_args: str
) -> GraphConfig:
    """The graph: KV routers before both pools, transfers that take a while, and migrations enough for any request.

    With `meets` decode workers take the blocks while the prefill worker holds them, else its last chunk waits as long.
    """
    given = {"kv_bytes_per_token": "131072", "kv_transfer_bandwidth": "2", **engine_args}
    if meets:
        given["bootstrap_port"] = "9000"
    return GraphConfig(
        engine="mocker",
        engine_args=given,
        workers=workers,
        prefill_workers=prefill_workers,
        router="kv",
        migration_limit=100,
        seed=seed,
    )


async def chaos(config: GraphConfig, trace: Trace, faults: Iterable[Fault | RollingRestart]) -> Outcome:
    """The whole trace with all its faults. Raises InvalidArgument for a script that cannot be."""
    script = plan_faults(faults, workers=config.workers, prefill_workers=config.prefill_workers)
    schedule, samples = Schedule.open_loop(trace), Samples()
    async with hosted_graph(config, HostOptions()) as opened:
        exchange = cast(MockEngine, opened.workers[0].engine).exchange
        ledger = Ledger(config.deployment(config.modes[0]).token_ids or range(0))
        recorder, watch = FleetRecorder(opened.fleet, samples), Watch(opened, exchange)
        driver = LoadDriver(ledger >> opened.tokens, schedule, samples, number_of=recorder.number_of)
        await anyio.sleep(SETTLES_S)
        before = _tasks()
        async with anyio.create_task_group() as beside:
            beside.start_soon(watch.run, script, anyio.current_time())
            beside.start_soon(recorder.run_script, script, driver.now_ms)
            await driver.run()
        await anyio.sleep(SETTLES_S)
        recorder.record_preemptions()
        left = [*watch.left_over(), *_more(before, _tasks())]
    report = make_report(samples, unsent_requests=schedule.unsent_requests, series=False)
    return Outcome(report, ledger, [*_lost(trace, ledger), *_miscounted(report, ledger), *left], watch.deaths)


def _lost(trace: Trace, ledger: Ledger) -> list[str]:
    """What is wrong with the answers, and with which requests were sent: all but those behind one that was broken."""
    names = {turn.name for session in trace.sessions for turn in session.turns}
    found = [f"{name}: is not of the trace" for name in sorted(ledger.records.keys() - names)]
    found += [f"{name}: was sent twice" for name in ledger.twice]
    for session in trace.sessions:
        for turn in session.turns:
            if (record := ledger.records.get(turn.name)) is None:
                found.append(f"{turn.name}: was never sent")
            if record is None or not record.is_complete:
                break
    return found + [f"{name}: {what}" for name, record in ledger.records.items() for what in record.problems()]


def _miscounted(report: Report, ledger: Ledger) -> list[str]:
    """Return where the report and the records differ."""
    complete = sum(record.is_complete for record in ledger.records.values())
    counted = {"num_requests": len(ledger.records), "completed_requests": complete}
    return [
        f"the report has {name} {report.value(name)}, not {count}"
        for name, count in counted.items()
        if report.value(name) != count
    ]


def _tasks() -> Counter[str | None]:
    return Counter(task.name for task in anyio.get_running_tasks())


def _more(before: Counter[str | None], after: Counter[str | None]) -> list[str]:
    return [f"tasks {name}: {count} are left" for name, count in (after - before).items()]


def _summary(outcome: Outcome, took_s: float) -> str:
    report, deaths = outcome.report, outcome.deaths
    errors = Counter(record.error.type_name for record in outcome.broken.values() if record.error is not None)
    lines = [
        f"{report.num_requests:,} requests, {report.completed_requests:,} completed",
        " ".join([f"{len(outcome.broken)} not", *(f"{name}: {count}" for name, count in errors.items())]),
        f"{sum(len(record.tokens) for record in outcome.ledger.records.values()):,} tokens checked",
        f"{len(deaths)} deaths, {sum(death.sequences > 0 for death in deaths)} of workers with requests, "
        f"{sum(death.transfers > 0 for death in deaths)} while blocks were on their way",
        f"{report.migrations:,} migrations of {report.migrated_requests:,} requests",
        f"{report.preemptions:,} preemptions",
        f"{report.duration_ms / 1000:,.0f} s replayed in {took_s:,.0f} s",
        f"{len(outcome.problems)} problems",
    ]
    return "\n".join([*lines, *outcome.problems[:_SHOWN]])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description="A trace while workers die and return; every token is checked."
    )
    parser.add_argument("trace", type=Path, nargs="?", help="a file of mooncake rows")
    parser.add_argument("--requests", type=int, default=None, help="so many of them, 2000 where they are made up")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--prefill-workers", type=int, default=3)
    parser.add_argument("--deaths", type=int, default=100, help="in each pool, beside those behind the restart")
    parser.add_argument("--gpu-blocks", type=int, default=16384, help="of each worker, 64 tokens a block")
    parser.add_argument("--without-meetings", action="store_true", help="prefill workers publish no endpoint")
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # every migration is one
    rng = Random(arguments.seed)
    if arguments.trace is None:
        trace = conversation_load(arguments.requests or 2000, rng)
    else:
        trace = read_trace(arguments.trace)
        trace = trace if arguments.requests is None else first_requests(trace, arguments.requests)
    pools = arguments.workers, arguments.prefill_workers
    blocks = str(arguments.gpu_blocks)
    config = chaos_config(*pools, seed=arguments.seed, meets=not arguments.without_meetings, num_gpu_blocks=blocks)
    began_s = perf_counter()
    script = chaos_script(trace, *pools, deaths=arguments.deaths, rng=rng)
    outcome = run_in_virtual_time(chaos, config, trace, script, backend=arguments.backend)
    print(_summary(outcome, perf_counter() - began_s))
    sys.exit(1 if outcome.problems else 0)


if __name__ == "__main__":
    main()
