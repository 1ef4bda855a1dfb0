"""Background tasks that a worker runs beside its requests."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from engines.worker.lifecycle import Background
from pipeline.rx import AnyIOScheduler


async def test_what_runs_can_be_waited_for() -> None:
    async with AnyIOScheduler() as scheduler:
        background = Background(scheduler)
        for seconds in (3, 1, 2):
            background.run(partial(anyio.sleep, seconds))
        await background.idle()
        assert anyio.current_time() == pytest.approx(3)
        await background.idle()


async def test_what_runs_can_be_cancelled_one_by_one_or_all_together() -> None:
    async with AnyIOScheduler() as scheduler:
        background = Background(scheduler)
        cancels = [background.run(anyio.sleep_forever) for _ in range(3)]
        cancels[0]()
        await anyio.sleep(1)
        with anyio.move_on_after(1) as scope:
            await background.idle()
        assert scope.cancelled_caught, "the others run on"
        background.end()
        await background.idle()


async def test_two_may_wait_for_it() -> None:
    async with AnyIOScheduler() as scheduler, anyio.create_task_group() as tasks:
        background = Background(scheduler)
        background.run(partial(anyio.sleep, 1))
        with anyio.fail_after(2):
            for _ in range(2):
                tasks.start_soon(background.idle)
            await background.idle()


async def test_what_it_raises_is_logged_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        await anyio.sleep(1)
        raise LookupError("broken")

    async with AnyIOScheduler() as scheduler:
        background = Background(scheduler)
        background.run(fail)
        background.run(partial(anyio.sleep, 2))
        await background.idle()
    assert anyio.current_time() == pytest.approx(2)
    assert "broken" in caplog.text
