"""ProcessGroup: stages, restarts, and the end in order; simulated programs, virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

import anyio
import pytest

from pipeline import InvalidArgument
from serving.processes import ProcessGroup, Program, ProgramState
from tests.serving.processes.worlds import RETRY, Life, Machine

BROKER = Program("broker", [], stage=0, is_awaited=True)
WORKER = Program("worker-1", [], stage=1, is_awaited=True)
FRONTEND = Program("front", [], stage=2)


@asynccontextmanager
async def running(machine: Machine, *programs: Program) -> AsyncIterator[ProcessGroup]:
    """A group that is ended with the block, if it was not before."""
    group = ProcessGroup(
        programs, machine.start, retry=RETRY, on_ready=lambda each, line: machine.note(each.name, line)
    )
    with anyio.fail_after(10_000):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.run)
            yield group
            group.end()
    assert not machine.running


async def test_a_stage_starts_when_the_one_below_serves_and_ends_before_it() -> None:
    machine = Machine(lambda name, _: Life(ready_s=2.0, stop_s=3.0))
    async with running(machine, FRONTEND, WORKER, BROKER):
        await anyio.sleep(10)
    assert machine.events == [
        (0, "broker", "start"),
        (2, "broker", "Serving m"),
        (2, "worker-1", "start"),
        (4, "worker-1", "Serving m"),
        (4, "front", "start"),
        (6, "front", "Serving m"),
        (13, "front", "gone"),
        (16, "worker-1", "gone"),
        (19, "broker", "gone"),
    ]


async def test_programs_of_one_stage_start_and_end_together() -> None:
    machine = Machine()
    two = Program("worker-2", [], stage=1)
    async with running(machine, WORKER, two):
        await anyio.sleep(5)
    assert machine.times_of("worker-1", "start") == machine.times_of("worker-2", "start") == [0]
    assert machine.times_of("worker-1", "gone") == machine.times_of("worker-2", "gone") == [6]


async def test_a_stage_does_not_wait_for_what_is_not_awaited() -> None:
    machine = Machine(lambda name, _: Life(ready_s=inf))
    async with running(machine, Program("worker-1", [], stage=1), FRONTEND):
        await anyio.sleep(5)
    assert machine.times_of("worker-1", "start") == machine.times_of("front", "start") == [0]
    assert machine.times_of("front", "gone") == [6]
    assert machine.times_of("worker-1", "gone") == [7]


async def test_the_states_show_what_serves_and_what_has_ended() -> None:
    machine = Machine(lambda name, start: Life(ready_s=1.0, ends_s=5.0 if start == 0 else inf, code=-9))
    async with running(machine, WORKER) as group:
        await anyio.sleep(2)
        assert group.states() == [ProgramState("worker-1", True, 1, "")]
        await anyio.sleep(3.5)
        assert group.states() == [ProgramState("worker-1", False, 1, "was ended by signal 9")]
        await anyio.sleep(2)
        assert group.states() == [ProgramState("worker-1", True, 2, "was ended by signal 9")]


async def test_a_program_that_fails_waits_twice_as_long_each_time_up_to_the_longest() -> None:
    machine = Machine(lambda name, _: Life(ready_s=inf, ends_s=0.0, code=1))
    async with running(machine, WORKER):
        await anyio.sleep(40)
    assert machine.times_of("worker-1", "start") == [0, 1, 3, 7, 15, 23, 31, 39]


async def test_what_served_long_enough_is_started_soon_again() -> None:
    machine = Machine(lambda name, start: Life(ready_s=0.0, ends_s=200.0 if start == 3 else 0.0, code=1))
    async with running(machine, WORKER):
        await anyio.sleep(209)
    assert machine.times_of("worker-1", "start") == [0, 1, 3, 7, 208]


async def test_the_time_of_a_start_does_not_count_as_served() -> None:
    machine = Machine(lambda name, _: Life(ready_s=inf, ends_s=200.0, code=1))
    async with running(machine, WORKER):
        await anyio.sleep(650)
    assert machine.times_of("worker-1", "start") == [0, 201, 403, 607]


async def test_a_program_that_ends_in_order_by_itself_is_replaced() -> None:
    machine = Machine(lambda name, start: Life(ends_s=5.0 if start == 0 else inf))
    async with running(machine, WORKER):
        await anyio.sleep(10)
        assert "worker-1" in machine.running
    assert machine.times_of("worker-1", "start") == [0, 6]


async def test_one_that_cannot_be_started_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(lambda name, start: Life(fails=OSError(12, "no memory") if start == 0 else None))
    async with running(machine, WORKER):
        await anyio.sleep(5)
        assert "worker-1" in machine.running
    assert "worker-1 cannot be started: [Errno 12] no memory; started again in 1 s" in caplog.text


async def test_usage_errors_at_the_start_end_the_group_in_order_with_the_message() -> None:
    wrong = Life(ready_s=inf, ends_s=1.0, code=2, lines=["loading", "Error: --engine: there is no engine echoo"])
    machine = Machine(lambda name, _: wrong if name == "worker-1" else Life())
    group = ProcessGroup([FRONTEND, WORKER, BROKER], machine.start, retry=RETRY)
    with anyio.fail_after(100), pytest.raises(InvalidArgument, match=r"^worker-1 cannot run: --engine: there is no"):
        await group.run()
    assert len(machine.times_of("worker-1", "start")) == 3
    assert machine.times_of("front", "start") == []
    assert machine.times_of("broker", "gone") != []
    assert not machine.running


async def test_a_usage_error_of_a_program_that_has_served_is_a_failure_like_others() -> None:
    machine = Machine(lambda name, _: Life(ready_s=0.0, ends_s=1.0, code=2))
    async with running(machine, WORKER):
        await anyio.sleep(60)
        assert len(machine.times_of("worker-1", "start")) > 4


async def test_usage_errors_that_are_not_in_a_row_do_not_end_the_group() -> None:
    machine = Machine(lambda name, start: Life(ready_s=inf, ends_s=0.0, code=1 if start % 3 == 2 else 2))
    async with running(machine, WORKER):
        await anyio.sleep(60)
        assert len(machine.times_of("worker-1", "start")) > 6


async def test_an_end_during_the_start_ends_what_was_started() -> None:
    machine = Machine(lambda name, _: Life(ready_s=inf))
    async with running(machine, BROKER, WORKER):
        await anyio.sleep(2)
    assert machine.events == [(0, "broker", "start"), (3, "broker", "gone")]


async def test_an_end_while_a_program_waits_to_be_started_again_starts_nothing() -> None:
    machine = Machine(lambda name, _: Life(ready_s=inf, ends_s=0.0, code=1))
    async with running(machine, WORKER):
        await anyio.sleep(7.5)
    assert machine.times_of("worker-1", "start") == [0, 1, 3, 7]


async def test_a_program_that_ignores_the_request_to_end_is_killed() -> None:
    machine = Machine(lambda name, _: Life(stop_s=inf))
    async with running(machine, Program("worker-1", [], end_s=20.0), FRONTEND):
        await anyio.sleep(5)
    assert machine.times_of("worker-1", "killed") == [5 + 60 + 20]


async def test_kill_ends_all_at_once_also_during_an_orderly_end() -> None:
    machine = Machine(lambda name, _: Life(stop_s=30.0))
    async with running(machine, WORKER, FRONTEND, BROKER) as group:
        await anyio.sleep(10)
        group.end()
        await anyio.sleep(5)
        group.kill()
        await anyio.sleep(1)
        assert not machine.running
    assert [what for _, _, what in machine.events[-3:]] == ["killed"] * 3
    assert machine.events[-1][0] == 15


async def test_kill_alone_is_an_end_too() -> None:
    machine = Machine()
    async with running(machine, WORKER, FRONTEND) as group:
        await anyio.sleep(10)
        group.kill()
        await anyio.sleep(30)
        assert len(machine.times_of("worker-1", "start")) == 1
        assert machine.times_of("worker-1", "killed") == [10]


async def test_a_cancellation_leaves_no_program() -> None:
    machine = Machine()
    with anyio.move_on_after(10):
        await ProcessGroup([WORKER, FRONTEND], machine.start, retry=RETRY).run()
    assert machine.times_of("front", "gone") == [10]
    assert not machine.running


async def test_a_program_that_is_being_started_when_the_end_begins_is_ended() -> None:
    machine = Machine()

    @asynccontextmanager
    async def slowly(program: Program) -> AsyncIterator[object]:
        await anyio.sleep(5)
        async with machine.start(program) as child:
            yield child

    group = ProcessGroup([WORKER], slowly, retry=RETRY)  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.run)
        await anyio.sleep(1)
        group.end()
    assert machine.events == [(5, "worker-1", "start"), (6, "worker-1", "gone")]
