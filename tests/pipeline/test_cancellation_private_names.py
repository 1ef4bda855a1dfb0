"""The private names of anyio that racing reads: they are there and mean what it thinks, and it can do without.

If the first tests fail after an update of anyio, racing has fallen back to a cancel scope for each
item: look what took the place of the names.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio._backends import _asyncio as anyio_on_asyncio
from anyio.lowlevel import checkpoint

from pipeline import Context, until_killed
from pipeline import cancellation as racing
from pipeline.errors import BackendCancelled

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

ON_ASYNCIO = pytest.mark.parametrize("anyio_backend", ["asyncio"])

NAMES: dict[str, dict[str, Any]] = {
    "_task_states": {"_states": None},
    "TaskState": {"anyio_on_asyncio": SimpleNamespace(CancelScope=anyio_on_asyncio.CancelScope)},
    "TaskState.cancel_scope": {
        "anyio_on_asyncio": SimpleNamespace(CancelScope=anyio_on_asyncio.CancelScope, TaskState=object)
    },
    "CancelScope._parent_scope": {
        "anyio_on_asyncio": SimpleNamespace(CancelScope=object, TaskState=anyio_on_asyncio.TaskState)
    },
}
"""Each name -> what racing sees of anyio without it."""


# -- with the installed anyio


def test_the_installed_anyio_has_the_names() -> None:
    assert racing._sees_shields()
    assert racing._cuts_tasks


@ON_ASYNCIO
async def test_the_names_lead_from_a_task_to_all_its_scopes() -> None:
    task = asyncio.current_task()
    with anyio.CancelScope() as outer, anyio.CancelScope(shield=True) as inner:
        assert racing._states[task].cancel_scope is inner
        assert racing._states[task].cancel_scope._parent_scope is outer
        assert inner.shield
        await checkpoint()
    assert racing._states[task].cancel_scope is not inner


@ON_ASYNCIO
async def test_a_shield_in_another_task_is_seen() -> None:
    cut = racing._ReadCanceller(asyncio.get_running_loop())
    cut.task = asyncio.current_task()
    assert not cut._is_shielded()
    with anyio.CancelScope(), anyio.CancelScope(shield=True), anyio.CancelScope():
        assert await asyncio.ensure_future(_ask(cut))


async def _ask(cut: Any) -> bool:
    return bool(cut._is_shielded())


def test_anyio_has_an_upper_bound() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    (bound,) = [one for one in project["dependencies"] if one.startswith("anyio")]
    assert "<5" in bound


# -- with an anyio that lacks one


@pytest.mark.parametrize("name", NAMES)
def test_each_missing_name_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for attribute, value in NAMES[name].items():
        monkeypatch.setattr(racing, attribute, value)
    assert not racing._sees_shields()


def test_a_missing_name_is_logged_when_racing_is_imported() -> None:
    code = "from anyio._backends import _asyncio; _asyncio.TaskState = None; from pipeline import cancellation; "
    command = [sys.executable, "-c", code + "print(cancellation._cuts_tasks)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("anyio ")
    assert "lacks private names that pipeline.cancellation reads" in done.stderr


def test_nothing_is_logged_with_the_installed_anyio() -> None:
    done = subprocess.run([sys.executable, "-c", "import pipeline"], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.fixture
def without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "_cuts_tasks", False)


async def kill_soon(context: Context[Any]) -> None:
    await anyio.sleep(1)
    context.kill()


async def test_a_kill_still_ends_a_source_that_waits(without_names: None) -> None:
    context, ended = Context(None), list[str]()

    async def items() -> AsyncIterator[int]:
        try:
            yield 0
            await anyio.sleep_forever()
        finally:
            ended.append("released")

    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon, context)
        assert [item async for item in until_killed(items(), context)] == [0]
    assert anyio.current_time() - began == pytest.approx(1)
    assert ended == ["released"]


async def test_what_a_source_shields_is_still_not_cut(without_names: None) -> None:
    context, done = Context(None), list[str]()

    async def items() -> AsyncIterator[int]:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(3)
            done.append("shielded")
        await anyio.sleep_forever()
        yield 0

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon, context)
        assert [item async for item in until_killed(items(), context)] == []
    assert done == ["shielded"]


async def test_the_cancellation_of_its_reader_still_goes_on_to_the_reader(without_names: None) -> None:
    context = Context(None)

    async def items() -> AsyncIterator[int]:
        await anyio.sleep_forever()
        yield 0

    with anyio.move_on_after(1) as scope:
        async for _ in until_killed(items(), context):
            pass
    assert scope.cancelled_caught


@ON_ASYNCIO
async def test_something_of_the_source_that_is_cancelled_still_does_not_cancel_the_reader(without_names: None) -> None:
    work = asyncio.get_running_loop().create_future()

    async def items() -> AsyncIterator[int]:
        await work
        yield 0

    asyncio.get_running_loop().call_soon(work.cancel)
    with pytest.raises(BackendCancelled):
        await anext(until_killed(items(), Context(None)))
