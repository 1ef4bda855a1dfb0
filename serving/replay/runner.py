"""Replaying a trace: open a graph, drive it through, sum up.

report = await run(my_graph, read_trace(path))                    any graph, in the running loop's time
report = await run_config(GraphConfig(...), trace, faults=...)    a standard graph with its workers, and their faults
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import anyio

from ..deployment import GraphConfig, Hosting, hosted_graph
from .driver import Drive, TokenGraph, recorded_outputs
from .faults import Fault, RollingRestart, plan_faults
from .observe import Members, Numbered
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
    heard: Callable[[int], object] = lambda ended: None,
    noted: Callable[[RequestReport], object] | None = None,
    number_of: Numbered = lambda worker_id, role: worker_id,
    until: Callable[[], Awaitable[object]] | None = None,
) -> Report:
    """The report of the trace through the graph that the factory opens; it is closed again.

    Arrivals are as recorded, `speed_up` times as fast; or so many sessions at a time, whatever was recorded. `heard` is
    called after every request with how many have ended, `noted` with what there is to say of it; `number_of` numbers
    the workers that the graph names. When `until` returns first, what is open is closed, and the report is of what was
    done: it says so, and how much was never sent. Raises InvalidArgument for a load that cannot be, and what the graph
    raises that is no PenstockError.
    """
    schedule, samples = _schedule(trace, speed_up, sessions_at_a_time), Samples(interval_ms)
    told = (lambda sample: None) if noted is None else (lambda sample: noted(request_report(sample)))
    async with graph() as opened:
        drive = Drive(opened, schedule, samples, number_of=number_of, heard=heard, noted=told)
        is_interrupted = await _driven(drive, until)
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
    heard: Callable[[int], object] = lambda ended: None,
    gpus_per_worker: int = 1,
    gpus_per_prefill_worker: int | None = None,
    until: Callable[[], Awaitable[object]] | None = None,
) -> Report:
    """The report of the trace through a standard graph; its workers fail and return as the script says. Mock engines
    give the answers that the trace has.

    `until` is as in `run`. Raises as `run`, and InvalidArgument for a script that cannot be.
    """
    script = plan_faults(faults, workers=config.workers, prefill_workers=config.prefill_workers)
    schedule, samples = _schedule(trace, speed_up, sessions_at_a_time), Samples(interval_ms)
    async with hosted_graph(config, Hosting(environment or {}, recorded=recorded_outputs(trace))) as opened:
        members = Members(opened.fleet, samples)
        drive = Drive(opened.tokens, schedule, samples, number_of=members.number_of, heard=heard)
        is_interrupted = await _driven(drive, until, partial(members.disturb, script, drive.now_ms))
        members.note_preemptions()
    gpus = {"gpus_per_worker": gpus_per_worker, "gpus_per_prefill_worker": gpus_per_prefill_worker}
    return _report(trace, schedule, samples, settings, is_interrupted, limits=limits, per_request=per_request, **gpus)


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


async def _driven(
    drive: Drive, until: Callable[[], Awaitable[object]] | None, *others: Callable[[], Coroutine[Any, Any, None]]
) -> bool:
    """Drives while the others happen, and whether `until` ended it early; what of the others would come after the last
    request does not. Raises as `drive`, and what `until` and the others raise."""
    is_interrupted = False

    async def interrupt(wait: Callable[[], Awaitable[object]]) -> None:
        nonlocal is_interrupted
        await wait()
        is_interrupted = True
        beside.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as beside:
            if until is not None:
                beside.start_soon(interrupt, until)
            for other in others:
                beside.start_soon(other)
            await drive.run()
            beside.cancel_scope.cancel()
    except ExceptionGroup as group:
        error = _first(group)
        raise error from error.__cause__
    return is_interrupted


def _first(error: Exception) -> Exception:
    """The first error in a group: the others were cancelled for its sake, or failed at the same moment."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def check_load(trace: Trace, speed_up: float = 1.0, sessions_at_a_time: int | None = None) -> None:
    """Raises InvalidArgument for a load that cannot be, as running it would."""
    _schedule(trace, speed_up, sessions_at_a_time)


def _schedule(trace: Trace, speed_up: float, sessions_at_a_time: int | None) -> Schedule:
    if sessions_at_a_time is None:
        return Schedule.open_loop(trace, speed_up=speed_up)
    return Schedule.closed_loop(trace, sessions_at_a_time, speed_up=speed_up)
