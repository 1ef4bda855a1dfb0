"""Timers that wake late, as those of real time do: the engine that is simulated is not slower for that."""

from __future__ import annotations

from itertools import count

import anyio
import pytest

from engines import as_engine
from engines.mocker import MockEngine, MockEngineArgs, rank
from pipeline import Context
from pipeline.loop import Timer
from pipeline.protocols import PreprocessedRequest, StopConditions

TOKENS = 50


class LateTimer(Timer):
    """A timer of real time that wakes so late."""

    late_s = 0.0

    @property
    def is_exact(self) -> bool:
        return False

    async def wait_until(self, deadline_s: float) -> None:
        await super().wait_until(deadline_s + self.late_s)


@pytest.fixture(autouse=True)
def _late_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "Timer", LateTimer)
    monkeypatch.setattr(LateTimer, "late_s", 0.0)


async def times_s(engine: MockEngine, pauses_s: tuple[float, ...] = (0.0,)) -> list[float]:
    """Return how long answers take that are asked for one after the other, each after a pause."""
    found = list[float]()
    async with as_engine(engine) as served:
        for number, pause_s in enumerate(pauses_s):
            await anyio.sleep(pause_s)
            prompt = [number * 1000 + position for position in range(100)]  # nothing of it is cached
            payload = PreprocessedRequest(prompt, stop_conditions=StopConditions(max_tokens=TOKENS))
            begun_s = anyio.current_time()
            await (await served.generate(Context(payload))).collect()
            found.append(anyio.current_time() - begun_s)
    return found


async def late_s(monkeypatch: pytest.MonkeyPatch, timer_late_s: float, speedup_ratio: float = 1.0) -> float:
    """Return by how much an answer takes longer than with timers that wake in time."""
    args = MockEngineArgs(speedup_ratio=speedup_ratio)
    in_time_s = (await times_s(MockEngine(args)))[0]
    monkeypatch.setattr(LateTimer, "late_s", timer_late_s)
    return (await times_s(MockEngine(args)))[0] - in_time_s


@pytest.mark.parametrize("timer_late_s", [0.0005, 0.001, 0.004])
async def test_an_answer_is_late_by_one_timer_however_many_steps_it_has(
    timer_late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await late_s(monkeypatch, timer_late_s) == pytest.approx(timer_late_s)


async def test_steps_shorter_than_what_is_slept_take_their_time_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await late_s(monkeypatch, 0.0008, speedup_ratio=20.0) == pytest.approx(0.0008, abs=0.0008)


async def test_a_pause_of_the_process_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second in which nothing runs is no second of steps: but for the limit the answer is that much later."""
    in_time_s = (await times_s(MockEngine(MockEngineArgs())))[0]
    waits = count()

    async def wait_until(self: LateTimer, deadline_s: float) -> None:
        await Timer.wait_until(self, deadline_s + (1.0 if next(waits) == TOKENS // 2 else 0.0))

    monkeypatch.setattr(LateTimer, "wait_until", wait_until)
    late_s = (await times_s(MockEngine(MockEngineArgs())))[0] - in_time_s
    assert late_s == pytest.approx(1.0 - rank.LATE_MAX_S)


async def test_no_step_begins_before_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes a moment after the last step, or after none, is computed from then on."""
    monkeypatch.setattr(LateTimer, "late_s", 0.001)
    first_s, *later_s = await times_s(MockEngine(MockEngineArgs()), (0.0, 0.0, 0.002, 0.004, 10.0))
    assert later_s == pytest.approx([first_s] * 4, abs=0.0002)
