"""One engine's start, drain and cleanup, each done once."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import EngineConfig, LLMEngine, WorkerState
from engines.publishing import EngineMetrics
from engines.worker.lifecycle import TRANSITIONS, Lifecycle, LifecycleEvent, after, owes_cleanup
from pipeline import ContractViolation, EngineShutdown, InvalidArgument, PenstockError
from pipeline.errors import BackendInvalidArgument, BackendUnknown

INIT, RUNNING, START_FAILED, STOPPED = WorkerState


class Noted(EngineMetrics):
    """Records the duration of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, float] = {}

    def took(self, step: str, seconds: float) -> None:
        assert step not in self.steps
        self.steps[step] = seconds


class Fake(LLMEngine):
    """Takes a second for each step of its life, then raises the error given for it."""

    def __init__(self, **fails: BaseException) -> None:
        self.fails = fails
        self.calls: list[str] = []

    async def start(self, worker_id: int) -> EngineConfig:
        await self._do("start")
        return EngineConfig(model=str(worker_id))

    async def drain(self) -> None:
        await self._do("drain")

    async def cleanup(self) -> None:
        await self._do("cleanup")

    def generate(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def _do(self, step: str) -> None:
        self.calls.append(step)
        await anyio.sleep(1)
        if step in self.fails:
            raise self.fails[step]


@pytest.mark.parametrize(("state", "event"), list(product(WorkerState, get_args(LifecycleEvent))))
def test_only_the_transitions_of_the_table_are_allowed(state: WorkerState, event: LifecycleEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert after(state, event) is TRANSITIONS[state, event]
    else:
        assert state is not INIT, "the first thing may be any"
        with pytest.raises(ContractViolation):
            after(state, event)


def test_every_state_can_be_cleaned_up_and_only_a_start_makes_it_owed() -> None:
    assert {after(state, "cleaned_up") for state in WorkerState} == {STOPPED}
    assert {state for state in WorkerState if owes_cleanup(state)} == {RUNNING, START_FAILED}


async def test_each_step_is_done_once_and_measured() -> None:
    engine, noted = Fake(), Noted()
    life = Lifecycle(engine)
    assert (life.state, (await life.start(7)).model, life.state) == (INIT, "7", RUNNING)
    life.measure(noted)
    await life.drain()
    for _ in range(2):
        await life.clean_up()
        assert life.state is STOPPED
    assert engine.calls == ["start", "drain", "cleanup"]
    assert noted.steps == pytest.approx({"model_load": 1, "drain": 1, "cleanup": 1})


async def test_an_engine_that_never_started_is_not_cleaned_up() -> None:
    engine = Fake()
    life = Lifecycle(engine)
    await life.drain()
    await life.clean_up()
    assert (life.state, engine.calls) == (STOPPED, [])


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (InvalidArgument("wrong", field="f"), InvalidArgument),
        (EngineShutdown("gone"), EngineShutdown),
        (RuntimeError("broken"), BackendUnknown),
        (ValueError("wrong"), BackendInvalidArgument),
    ],
)
async def test_a_start_that_fails_still_owes_its_cleanup(error: Exception, raised: type[PenstockError]) -> None:
    engine = Fake(start=error)
    life = Lifecycle(engine)
    with pytest.raises(raised, match=str(error)) as caught:
        await life.start(1)
    assert caught.value is error or caught.value.__cause__ is error
    assert life.state is START_FAILED
    await life.drain()
    await life.clean_up()
    assert (life.state, engine.calls) == (STOPPED, ["start", "cleanup"])


@pytest.mark.parametrize(
    ("errors", "raised", "message"),
    [
        ([ExceptionGroup("inner", [EngineShutdown("gone")])], EngineShutdown, "gone"),
        ([ValueError("wrong")], BackendInvalidArgument, "wrong"),
        ([ValueError("wrong"), ValueError("too")], BackendUnknown, "loading"),
    ],
)
async def test_an_error_that_came_alone_out_of_a_task_group_is_raised_as_itself(
    errors: list[Exception], raised: type[PenstockError], message: str
) -> None:
    with pytest.raises(raised, match=message):
        await Lifecycle(Fake(start=ExceptionGroup("loading", errors))).start(1)


async def test_a_start_that_is_cancelled_still_owes_its_cleanup() -> None:
    engine = Fake()
    life = Lifecycle(engine)
    with anyio.move_on_after(0.5):
        await life.start(1)
    assert life.state is START_FAILED
    await life.clean_up()
    assert engine.calls == ["start", "cleanup"]


async def test_an_engine_that_returns_no_config_breaks_the_contract() -> None:
    class Silent(Fake):
        async def start(self, worker_id: int) -> EngineConfig:
            await checkpoint()
            return None  # type: ignore[return-value]

    life = Lifecycle(Silent())
    with pytest.raises(ContractViolation, match="NoneType"):
        await life.start(1)
    assert life.state is START_FAILED


@pytest.mark.parametrize("first", ["start", "clean_up"])
async def test_there_is_one_start_only(first: str) -> None:
    life = Lifecycle(Fake())
    await (life.start(1) if first == "start" else life.clean_up())
    with pytest.raises(EngineShutdown):
        await life.start(1)


@pytest.mark.parametrize("step", ["drain", "cleanup"])
async def test_a_drain_or_cleanup_that_fails_is_logged_and_measured(
    step: str, caplog: pytest.LogCaptureFixture
) -> None:
    noted = Noted()
    life = Lifecycle(Fake(**{step: LookupError("broken")}))
    await life.start(1)
    life.measure(noted)
    await life.drain()
    await life.clean_up()
    assert life.state is STOPPED
    assert f"{step} of Fake failed" in caplog.text
    assert noted.steps.keys() == {"model_load", "drain", "cleanup"}


async def test_a_cleanup_that_is_cancelled_was_the_cleanup() -> None:
    engine, noted = Fake(), Noted()
    life = Lifecycle(engine)
    await life.start(1)
    life.measure(noted)
    with anyio.move_on_after(0.5):
        await life.clean_up()
    assert life.state is STOPPED
    assert noted.steps["cleanup"] == pytest.approx(0.5)
    await life.clean_up()
    assert engine.calls == ["start", "cleanup"]
