"""The health of a process, from the health of its endpoints."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from engines import (
    EchoEngine,
    EngineConfig,
    GenerateContext,
    LLMEngine,
    ShutdownTimes,
    SystemHealth,
    Worker,
)
from engines.worker.health import is_healthy
from pipeline import (
    InvalidArgument,
)
from pipeline.network import Runtime
from pipeline.protocols import PreprocessedRequest
from pipeline.testing import OpenStreams
from tests.engines.worker.worlds import PROBED, TIMES, ScriptedSteps, collect, hosted


@pytest.mark.parametrize(
    ("ready", "targets", "required", "process_ready", "healthy"),
    [
        ({}, [], [], False, False),
        ({}, [], [], True, True),
        ({"a": True}, [], [], False, False),
        ({"a": False}, [], [], True, True),
        ({"a": True, "b": True}, ["a", "b"], [], False, True),
        ({"a": True, "b": False}, ["a", "b"], [], True, False),
        ({"a": True, "b": False}, ["a"], [], False, True),
        ({"a": True, "b": False}, ["a", "b"], ["a"], False, True),
        ({"a": True}, ["a"], ["a", "c"], True, False),
    ],
)
def test_required_endpoints_go_before_targets_before_the_process(
    ready: dict[str, bool], targets: list[str], required: list[str], process_ready: bool, healthy: bool
) -> None:
    assert is_healthy(ready, targets, required, process_ready) is healthy
    health = SystemHealth(process_ready=process_ready, required=required)
    for name, is_ready in ready.items():
        health.register(name, is_target=name in targets)
        health.set_ready(name, is_ready)
    assert (health.is_healthy, health.endpoints) == (healthy, ready)


def test_a_target_without_a_canary_is_ready_when_it_registers() -> None:
    health = SystemHealth()
    assert health.register("a", is_target=True)
    assert health.is_healthy


def test_a_probed_target_is_not_ready_until_its_canary_succeeds() -> None:
    health = SystemHealth()
    health.register("a", is_target=True, is_probed=True)
    assert not health.is_healthy
    health.set_ready("a", True)
    assert health.is_healthy


def test_an_endpoint_that_is_no_target_is_ready_but_does_not_make_the_process_healthy() -> None:
    health = SystemHealth()
    health.register("a")
    assert (health.endpoints, health.is_healthy) == ({"a": True}, False)
    health.set_process_ready(True)
    assert health.is_healthy


def test_a_second_registration_is_ignored() -> None:
    health = SystemHealth()
    health.register("a", is_target=True, is_probed=True)
    assert not health.register("a", is_target=True)
    assert health.endpoints == {"a": False}


def test_an_unregistered_endpoint_does_not_count() -> None:
    health = SystemHealth(process_ready=True)
    health.register("a", is_target=True, is_probed=True)
    assert not health.is_healthy
    health.forget("a")
    health.forget("a")
    health.set_ready("a", False)
    assert (health.is_healthy, health.endpoints) == (True, {})


@pytest.mark.parametrize(
    ("text", "healthy"), [(None, False), ("ready", True), (" Ready", True), ("notready", False), ("1", False)]
)
def test_the_environment_sets_the_initial_health(text: str | None, healthy: bool) -> None:
    environment = {} if text is None else {"DYN_SYSTEM_STARTING_HEALTH_STATUS": text}
    assert SystemHealth.from_environment(environment).is_healthy is healthy


# -- workers in the health of their process


class WatchedHealth(SystemHealth):
    """Records when it became healthy or not."""

    def __init__(self, *, process_ready: bool = False) -> None:
        super().__init__(process_ready=process_ready)
        self.changes: list[tuple[float, bool]] = []
        self._was_healthy = self.is_healthy

    def register(self, name: str, *, is_target: bool = False, is_probed: bool = False) -> bool:
        is_new = super().register(name, is_target=is_target, is_probed=is_probed)
        self._record()
        return is_new

    def set_ready(self, name: str, is_ready: bool) -> None:
        super().set_ready(name, is_ready)
        self._record()

    def forget(self, name: str) -> None:
        super().forget(name)
        self._record()

    def _record(self) -> None:
        if self.is_healthy is not self._was_healthy:
            self._was_healthy = self.is_healthy
            self.changes.append((anyio.current_time(), self.is_healthy))


class Sick(EchoEngine):
    """Answers every request but the canary's."""

    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        if request.is_probe:
            raise LookupError("broken")
        return super().generate(request, context)


@pytest.mark.parametrize(
    ("engine", "environment", "at_once", "later"),
    [
        (EchoEngine, {}, True, True),
        (ScriptedSteps, {}, False, False),
        (EchoEngine, PROBED, False, True),
        (Sick, PROBED, False, False),
        (Sick, {}, True, True),
        (ScriptedSteps, PROBED | {"DYN_HEALTH_CHECK_PAYLOAD": '{"token_ids": [1]}'}, False, True),
        (EchoEngine, PROBED | {"DYN_HEALTH_CHECK_PAYLOAD": "{}"}, False, False),
    ],
)
async def test_a_worker_is_healthy_when_its_target_is_ready(
    engine: type[LLMEngine], environment: dict[str, str], at_once: bool, later: bool
) -> None:
    """Without a canary this is at once, with one when its probe has succeeded."""
    async with Worker(engine(), environment=environment, times=TIMES) as worker:
        assert worker.health.is_healthy is at_once
        await anyio.sleep(9)
        assert worker.health.is_healthy is later
    assert worker.health.endpoints == {}


async def test_real_traffic_makes_a_probed_worker_ready(open_streams: OpenStreams) -> None:
    async with Worker(Sick(), environment=PROBED, times=TIMES) as worker:
        await collect(worker)
        assert worker.health.is_healthy
        await anyio.sleep(5)
        assert not worker.health.is_healthy


async def test_traffic_during_the_registration_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Runtime.in_process() as runtime:
        worker = Worker(Sick(), runtime=runtime, environment=PROBED, times=TIMES)
        register = runtime.discovery.register_model

        async def probed_at_once(model: Any) -> Any:
            await collect(worker)
            return await register(model)

        monkeypatch.setattr(runtime.discovery, "register_model", probed_at_once)
        async with worker:
            assert worker.health.is_healthy


async def test_a_worker_that_could_not_be_registered_leaves_no_trace_in_the_health() -> None:
    health = SystemHealth(process_ready=True)
    config = EngineConfig(model="another")
    async with Runtime.in_process() as runtime, hosted(ScriptedSteps(), runtime, health=health):
        with pytest.raises(InvalidArgument):
            await Worker(ScriptedSteps(config=config), runtime=runtime, environment={}, health=health).__aenter__()
        assert len(health.endpoints) == 1


async def test_a_worker_whose_id_is_taken_leaves_the_health_of_the_other_unchanged() -> None:
    health = WatchedHealth()
    async with Runtime.in_process() as runtime, hosted(EchoEngine(), runtime, worker_id=5, health=health):
        health.changes.clear()
        with pytest.raises(InvalidArgument, match="is served already"):
            await Worker(EchoEngine(), runtime=runtime, worker_id=5, environment={}, health=health).__aenter__()
        assert (health.is_healthy, health.changes) == (True, [])


async def test_a_worker_that_ends_is_not_ready_from_the_start_of_its_end() -> None:
    health = WatchedHealth(process_ready=True)
    times = ShutdownTimes(grace_s=20)
    async with Worker(EchoEngine(), environment=PROBED, health=health, times=times):
        await anyio.sleep(6)
    assert health.changes == [
        (0, False),
        (pytest.approx(4), True),
        (pytest.approx(6), False),
        (pytest.approx(26), True),
    ]


async def test_workers_may_share_what_is_known_of_their_health() -> None:
    health = SystemHealth()
    async with (
        Runtime.in_process() as runtime,
        Worker(EchoEngine(), runtime=runtime, environment=PROBED, health=health, times=TIMES),
        Worker(EchoEngine(), runtime=runtime, environment=PROBED, health=health, times=TIMES),
    ):
        async with Worker(Sick(), runtime=runtime, environment=PROBED, health=health, times=TIMES):
            await anyio.sleep(9)
            assert sorted(health.endpoints.values()) == [False, True, True]
            assert not health.is_healthy
        assert health.is_healthy
