"""A schedule driven by a real loop's clock: nothing polls, and both loops see the same."""

from __future__ import annotations

import math

import anyio
import pytest

from serving.replay import Report, Samples, Schedule, SyntheticLoad, make_report
from serving.replay.schedule import DueRequest

LOAD = SyntheticLoad(64, 5, 40, turns=2, inter_turn_delay_ms=35, request_rate=20)


async def replay(schedule: Schedule) -> tuple[Report, int]:
    """Return the report, and how often the loop looked at the schedule. Each request takes its own time."""
    samples, start_s, looks = Samples(interval_ms=500), anyio.current_time(), 0
    samples.worker_joined(0, 0)
    changed = anyio.Event()

    def now_ms() -> float:
        return (anyio.current_time() - start_s) * 1000

    async def serve(due: DueRequest) -> None:
        sample = samples.arrived(due.name, due.due_ms, input_tokens=due.input_tokens)
        sample.routed(0, now_ms())
        for at in range(due.turn.output_tokens):
            await anyio.sleep((3 + (due.session_index * 7 + at) % 11) / 1000)
            sample.tokens(now_ms())
        samples.ended(sample, now_ms())
        schedule.ended(due, now_ms())
        changed.set()

    async with anyio.create_task_group() as tasks:
        while not schedule.finished:
            looks += 1
            for due in schedule.take_due(now_ms()):
                tasks.start_soon(serve, due)
            next_ms, changed = schedule.next_due_ms(), anyio.Event()
            wait_s = math.inf if next_ms is None else start_s + next_ms / 1000 - anyio.current_time()
            if not schedule.finished:
                with anyio.move_on_after(wait_s):
                    await changed.wait()
    return make_report(samples), looks


async def test_an_open_loop_sends_at_the_recorded_times() -> None:
    trace = LOAD.make()
    report, looks = await replay(Schedule.open_loop(trace))
    assert (report.num_requests, report.completed_requests) == (80, 80)
    assert report.total_output_tokens == 400
    assert report.queue_wait.max == pytest.approx(0, abs=1e-6)
    assert looks <= 2 * 80 + 40 + 1


async def test_a_closed_loop_has_its_sessions_in_flight() -> None:
    report, _ = await replay(Schedule.closed_loop(LOAD.make(), 4))
    assert report.completed_requests == 80
    assert report.series is not None
    assert max(report.series.running) <= 4
    assert report.ttft.max == pytest.approx(13)


async def test_the_same_replay_gives_the_same_report() -> None:
    first, _ = await replay(Schedule.open_loop(LOAD.make(), speed_up=3))
    again, _ = await replay(Schedule.open_loop(LOAD.make(), speed_up=3))
    assert (first.num_requests, first.total_output_tokens) == (again.num_requests, again.total_output_tokens)
    assert first.ttft.mean == pytest.approx(again.ttft.mean)
    assert first.duration_ms == pytest.approx(again.duration_ms)
