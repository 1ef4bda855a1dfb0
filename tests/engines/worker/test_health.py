"""The health of a process, from the health of its endpoints."""

from __future__ import annotations

import pytest

from engines import SystemHealth
from engines.worker.health import is_healthy


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


def test_listeners_receive_only_changes_and_do_not_disturb_each_other(caplog: pytest.LogCaptureFixture) -> None:
    health, changes = SystemHealth(), list[bool]()

    def broken(_: bool) -> None:
        raise LookupError("broken")

    health.on_change(broken)
    forget = health.on_change(changes.append)
    health.register("a", is_target=True, is_probed=True)
    for is_ready in (True, True, False, True):
        health.set_ready("a", is_ready)
    assert changes == [True, False, True]
    forget()
    health.set_ready("a", False)
    assert changes == [True, False, True]
    assert "a health callback failed" in caplog.text
