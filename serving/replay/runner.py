"""Replaying a trace: open a graph, drive it through the trace, make the report.

report = await run(my_graph, read_trace(path))                    any graph, in the running loop's time
report = await run_config(GraphConfig(...), trace, faults=...)    a standard graph with its workers, and their faults
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import anyio

from engines.mocker import Horizon
from pipeline.loop import Timer

from ..deployment import GraphConfig, HostOptions, acts_on_tokens, hosted_graph
from .arithmetic import Arithmetic
from .driver import LoadDriver, TokenGraph, recorded_outputs
from .faults import Fault, RollingRestart, plan_faults
from .observe import FleetRecorder, WorkerNumber
from .report import INTERRUPTED, Limits, Report, RequestReport, make_report, request_report
from .samples import INTERVAL_MS, Samples
from .schedule import Schedule
from .traces import Trace

GraphFactory = Callable[[], AbstractAsyncContextManager[TokenGraph]]


async def run(
    graph: GraphFactory,
    trace: Trace,
    *,
    speed_up: float = 1.0,
    sessions_at_a_time: int | None = None,
    limits: Limits | None = None,
    interval_ms: float = INTERVAL_MS,
    per_request: bool = False,
    settings: Mapping[str, Any] | None = None,
    on_progress: Callable[[int], object] = lambda ended: None,
    on_request: Callable[[RequestReport], object] | None = None,
    number_of: WorkerNumber = lambda worker_id, role: worker_id,
    stop_when: Callable[[], Awaitable[object]] | None = None,
) -> Report:
    """Return the report of a trace through the graph that the factory opens, and close the graph.

    `speed_up` divides the times between recorded arrivals, and think times. `sessions_at_a_time` replaces the arrivals:
    that many sessions run at a time. `limits` are those of goodput, `interval_ms` is that of the series, `per_request`
    adds every request, and `settings` are those of the report. `on_progress` is called after each request with the
    number of ended ones, `on_request` with its figures. `number_of` returns the number of a worker from its id in the
    graph. If `stop_when` returns before the end, open streams are closed, and the report is marked as interrupted and
    counts the requests that were never sent.

    Raise InvalidArgument for an invalid load, and the first error of the graph that is not a PenstockError.
    """
    schedule = Schedule.of(trace, speed_up=speed_up, sessions_at_a_time=sessions_at_a_time)
    samples = Samples(interval_ms, Arithmetic.of(trace.output_tokens))
    report_one = (lambda sample: None) if on_request is None else (lambda sample: on_request(request_report(sample)))
    async with graph() as opened:
        driver = LoadDriver(
            opened, schedule, samples, number_of=number_of, on_progress=on_progress, on_request=report_one
        )
        is_interrupted = await _run_driver(driver, stop_when)
    return _report(trace, schedule, samples, settings, is_interrupted, limits=limits, per_request=per_request)


async def run_config(
    config: GraphConfig,
    trace: Trace,
    *,
    environment: Mapping[str, str] | None = None,
    faults: Iterable[Fault | RollingRestart] = (),
    speed_up: float = 1.0,
    sessions_at_a_time: int | None = None,
    limits: Limits | None = None,
    interval_ms: float = INTERVAL_MS,
    per_request: bool = False,
    settings: Mapping[str, Any] | None = None,
    on_progress: Callable[[int], object] = lambda ended: None,
    gpus_per_worker: int = 1,
    gpus_per_prefill_worker: int | None = None,
    stop_when: Callable[[], Awaitable[object]] | None = None,
    step_by_step: bool = False,
) -> Report:
    """Return the report of a trace through a standard graph, whose workers fail and return by the fault script.

    Mock engines generate the answers that the trace has. `environment` is that of the graph, default empty. GPUs are
    for the costs; a prefill worker has as many as others by default. In virtual time on asyncio mock engines run ahead
    where that changes no figure; `step_by_step` prevents it. The other arguments are those of `run`. Raise as `run`
    does, and InvalidArgument for an invalid script.
    """
    script = plan_faults(faults, workers=config.workers, prefill_workers=config.prefill_workers)
    schedule = Schedule.of(trace, speed_up=speed_up, sessions_at_a_time=sessions_at_a_time)
    samples = Samples(interval_ms, Arithmetic.of(trace.output_tokens))
    environment = environment or {}
    horizon = None if step_by_step or acts_on_tokens(config, environment) else Horizon()
    hosting = HostOptions(environment, recorded=recorded_outputs(trace), horizon=horizon, is_closed=True)
    async with hosted_graph(config, hosting) as opened:
        fleet = FleetRecorder(opened.fleet, samples)
        driver = LoadDriver(
            opened.tokens,
            schedule,
            samples,
            number_of=fleet.number_of,
            is_packed=config.engine == "mocker",
            on_progress=on_progress,
        )
        stop = stop_when if stop_when is None or horizon is None else partial(_caught_up, stop_when, horizon)
        run_script = partial(fleet.run_script, script, driver.now_ms, horizon)
        is_interrupted = await _run_driver(driver, stop, run_script)
        fleet.record_preemptions()
    gpus = {"gpus_per_worker": gpus_per_worker, "gpus_per_prefill_worker": gpus_per_prefill_worker}
    return _report(trace, schedule, samples, settings, is_interrupted, limits=limits, per_request=per_request, **gpus)


async def _caught_up(stop_when: Callable[[], Awaitable[object]], horizon: Horizon) -> None:
    """Return after `stop_when`, once all tokens until then are recorded."""
    await stop_when()
    horizon.catch_up()
    await Timer().settle()


def _report(
    trace: Trace,
    schedule: Schedule,
    samples: Samples,
    settings: Mapping[str, Any] | None,
    is_interrupted: bool,
    **how: Any,
) -> Report:
    return make_report(
        samples,
        settings={**(settings or {}), **({INTERRUPTED: True} if is_interrupted else {})},
        unsent_requests=trace.requests - schedule.sent_requests if is_interrupted else schedule.unsent_requests,
        skipped_lines=len(trace.skipped),
        **how,
    )


async def _run_driver(
    driver: LoadDriver,
    stop_when: Callable[[], Awaitable[object]] | None,
    *others: Callable[[], Coroutine[Any, Any, None]],
) -> bool:
    """Run the driver beside the others, which end with it; return whether `stop_when` ended it early.

    Raise the errors of all of them.
    """
    is_interrupted = False

    async def interrupt(wait: Callable[[], Awaitable[object]]) -> None:
        nonlocal is_interrupted
        await wait()
        is_interrupted = True
        beside.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as beside:
            if stop_when is not None:
                beside.start_soon(interrupt, stop_when)
            for other in others:
                beside.start_soon(other)
            await driver.run()
            beside.cancel_scope.cancel()
    except ExceptionGroup as group:
        error = _first(group)
        raise error from error.__cause__
    return is_interrupted


def _first(error: Exception) -> Exception:
    """Return the first error of a group: the others followed from it, or came at the same moment."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
