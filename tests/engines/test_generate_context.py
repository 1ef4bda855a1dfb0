"""What an engine sees of a request's life, and contexts for tests of engines."""

from __future__ import annotations

import anyio
import pytest

from engines import GenerateContext
from engines.conformance import cancelling_context, mock_context
from engines.llm import FirstToken
from pipeline import Context


async def test_it_shows_and_moves_the_requests_own_life() -> None:
    request = Context("payload", id="mine")
    context = GenerateContext(request)
    assert (context.id, context.inner, context.metadata) == ("mine", request, {})
    assert (context.is_stopped, context.is_killed) == (False, False)
    context.stop()
    await context.stopped()
    assert (request.is_stopped, context.is_stopped, context.is_killed) == (True, True, False)
    context.kill()
    await context.killed()
    assert (request.is_killed, context.is_killed) == (True, True)
    assert repr(context) == "GenerateContext(id='mine', state=killed)"


async def test_a_stop_wakes_stop_waiters_and_not_kill_waiters() -> None:
    context = GenerateContext(Context(None))
    with anyio.move_on_after(5) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(context.stopped)
            await anyio.wait_all_tasks_blocked()
            context.stop()
    assert not scope.cancelled_caught
    with anyio.move_on_after(5) as scope:
        await context.killed()
    assert scope.cancelled_caught


def test_it_takes_two_parts_in_order_and_metadata_by_name() -> None:
    first_token = FirstToken()
    context = GenerateContext(Context(None), first_token, metadata={"tenant": "a"})
    assert context.metadata == {"tenant": "a"}
    context.notify_first_token()
    assert first_token.is_fired


def test_the_first_token_may_be_notified_without_a_waiter() -> None:
    GenerateContext(Context(None)).notify_first_token()


def test_the_first_token_fires_once_for_early_waiters_and_at_once_for_late_ones() -> None:
    first_token, fired = FirstToken(), list[str]()
    first_token.on_fire(lambda: fired.append("early"))
    first_token.on_fire(lambda: fired.append("early too"))
    assert fired == []
    first_token.fire()
    first_token.fire()
    first_token.on_fire(lambda: fired.append("late"))
    assert fired == ["early", "early too", "late"]


def test_a_mock_context_is_neither_stopped_nor_killed() -> None:
    context = mock_context("mine")
    assert (context.id, context.is_stopped, context.is_killed) == ("mine", False, False)
    assert mock_context().id != mock_context().id


async def test_a_cancelling_context_stops_itself_after_its_time() -> None:
    async with cancelling_context(5.0) as context:
        await anyio.sleep(4.9)
        assert not context.is_stopped
        await context.stopped()
        assert anyio.current_time() == pytest.approx(5.0)
        assert not context.is_killed


async def test_a_cancelling_context_forgets_its_stop_at_the_end() -> None:
    async with cancelling_context(5.0) as context:
        pass
    await anyio.sleep(10)
    assert not context.is_stopped


async def test_a_cancelling_context_lets_errors_pass_as_they_are() -> None:
    with pytest.raises(KeyError):
        async with cancelling_context(5.0):
            raise KeyError
