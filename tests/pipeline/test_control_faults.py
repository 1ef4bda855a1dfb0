"""Stop, kill and release where foreign code raises or blocks: other threads, finalisers, signal handlers."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Context, Control, ReleaseOnce, ResponseStream, State, until_killed


class Panic(BaseException):
    """What some foreign libraries raise: no Exception, and no signal's doing either."""


ERRORS = [ValueError("boom"), Panic("boom"), SystemExit("boom"), KeyboardInterrupt("boom")]
INTERRUPTS = [SystemExit("boom"), KeyboardInterrupt("boom")]


def _failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


async def _turns() -> None:
    for _ in range(20):
        await checkpoint()


def _expect_logged(caplog: pytest.LogCaptureFixture, error: BaseException, logger: str) -> None:
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [(record.name, record.exc_info and record.exc_info[1]) for record in records] == [(logger, error)]


# -- what is brought home to the loop


@pytest.mark.parametrize("error", ERRORS, ids=repr)
async def test_a_stop_callback_that_raises_after_a_stop_in_another_thread_is_logged_and_ends_nothing(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """On trio the whole run ended with TrioInternalError."""
    control, calls = Control(), list[str]()
    control.on_stop(_failing(error))
    control.on_stop(lambda: calls.append("second"))
    await anyio.to_thread.run_sync(control.stop)
    await _turns()
    assert calls == ["second"]
    _expect_logged(caplog, error, "pipeline.loop")


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("read", [0, 1])
async def test_a_release_that_raises_after_a_drop_is_logged_and_ends_nothing(
    error: BaseException, read: int, caplog: pytest.LogCaptureFixture
) -> None:
    released: list[str] = []
    stream = _owning(ReleaseOnce(_failing(error)), ReleaseOnce(lambda: released.append("second")))
    for _ in range(read):
        await anext(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del stream
        await _turns()
    assert released == ["second"]
    _expect_logged(caplog, error, "pipeline.loop")


async def test_a_release_that_raises_in_a_cycle_collected_by_another_thread_is_logged_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error, released = Panic("boom"), list[int]()
    gc.disable()  # so that it is the other thread that collects
    try:
        cycle: dict[str, Any] = {
            "stream": _owning(ReleaseOnce(_failing(error)), ReleaseOnce(lambda: released.append(here())))
        }
        cycle["itself"] = cycle
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del cycle
            await anyio.to_thread.run_sync(gc.collect)
            await _turns()
    finally:
        gc.enable()
    assert released == [here()]
    _expect_logged(caplog, error, "pipeline.loop")


def here() -> int:
    return threading.get_ident()


async def test_a_finaliser_that_stops_a_request_in_another_thread_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class StopsWhenCollected:
        def __init__(self, control: Control) -> None:
            self.control, self.itself = control, self

        def __del__(self) -> None:
            self.control.stop()

    control, error = Control(), ValueError("boom")
    control.on_stop(_failing(error))
    gc.disable()
    try:
        StopsWhenCollected(control)
        await anyio.to_thread.run_sync(gc.collect)
        await _turns()
    finally:
        gc.enable()
    assert control.is_stopped
    _expect_logged(caplog, error, "pipeline.loop")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_release_that_raises_when_its_loop_has_finished_is_logged(
    backend: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> ReleaseOnce:
        return ReleaseOnce(_failing(error))

    once = anyio.run(main, backend=backend)
    once.release_soon()
    assert once.is_released
    _expect_logged(caplog, error, "pipeline.loop")


def test_what_a_release_raises_goes_to_the_caller_of_release() -> None:
    with pytest.raises(ValueError, match="boom"):
        ReleaseOnce(_failing(ValueError("boom"))).release()


def _owning(*owned: ReleaseOnce) -> ResponseStream[int]:
    async def items() -> AsyncGenerator[int, None]:
        yield 1
        yield 2

    return ResponseStream(items(), Context(None), *owned)


# -- callbacks that raise, in the thread that stops


@pytest.mark.parametrize("error", INTERRUPTS, ids=repr)
def test_an_interrupt_in_a_childs_callback_goes_to_the_caller_after_the_whole_subtree_is_stopped(
    error: BaseException,
) -> None:
    """The parent could not be stopped any more."""
    parent, first, second, calls = Control(), Control(), Control(), list[str]()
    parent.link_child(first)
    parent.link_child(second)
    first.on_stop(_failing(error))
    for name, control in (("first", first), ("second", second), ("parent", parent)):
        control.on_stop(partial(calls.append, name))
    with pytest.raises(type(error)) as caught:
        parent.stop()
    assert caught.value is error
    assert first.is_stopped
    assert second.is_stopped
    assert parent.is_stopped
    assert calls == ["first", "second", "parent"]
    parent.kill()
    assert parent.is_killed


def test_any_other_fault_of_a_callback_is_logged_and_reaches_neither_the_parent_nor_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parent, child, calls, error = Control(), Control(), list[str](), Panic("boom")
    parent.link_child(child)
    child.on_stop(_failing(error))
    parent.on_stop(lambda: calls.append("parent"))
    parent.stop()
    assert parent.is_stopped
    assert calls == ["parent"]
    _expect_logged(caplog, error, "pipeline.control")


# -- several threads


def test_after_a_kill_returns_the_subtree_is_killed_although_another_thread_is_held_up_in_a_callback() -> None:
    """The second kill returned while `is_killed` was False."""
    parent, first, second = Control(), Control(), Control()
    parent.link_child(first)
    parent.link_child(second)
    held_up, go_on = threading.Event(), threading.Event()

    def block() -> None:
        held_up.set()
        go_on.wait(10)

    first.on_kill(block)
    other = threading.Thread(target=parent.kill)
    other.start()
    try:
        assert held_up.wait(10)
        parent.kill()
        assert [control.is_killed for control in (parent, first, second)] == [True, True, True]
    finally:
        go_on.set()
        other.join()


def test_a_callback_that_kills_again_finds_the_whole_subtree_killed_and_the_order_kept() -> None:
    parent, child, calls = Control(), Control(), list[Any]()
    parent.link_child(child)

    def again() -> None:
        parent.kill()
        calls.append((parent.is_killed, child.is_killed))

    child.on_kill(again)
    child.on_kill(lambda: calls.append("child"))
    parent.on_kill(lambda: calls.append("parent"))
    parent.kill()
    assert calls == [(True, True), "child", "parent"]


def test_racing_kills_each_leave_the_whole_subtree_killed() -> None:
    for _ in range(20):
        parent, children = Control(), [Control() for _ in range(200)]
        for child in children:
            parent.link_child(child)
        start, wrong = threading.Barrier(3), list[str]()

        def run(
            verb: Callable[[Control], None],
            parent: Control = parent,
            children: list[Control] = children,
            start: threading.Barrier = start,
            wrong: list[str] = wrong,
        ) -> None:
            start.wait()
            verb(parent)
            state = State.KILLED if verb is Control.kill else State.STOPPED
            if parent.state < state or any(child.state < state for child in children):
                wrong.append(verb.__name__)

        threads = [threading.Thread(target=run, args=(v,)) for v in (Control.stop, Control.kill, Control.kill)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_a_child_linked_to_a_killed_parent_is_killed_when_the_link_is_made() -> None:
    parent, child, grandchild, calls = Control(), Control(), Control(), list[str]()
    child.link_child(grandchild)
    grandchild.on_kill(lambda: calls.append("grandchild"))
    child.on_kill(lambda: calls.append("child"))
    parent.kill()
    parent.link_child(child)
    assert child.is_killed
    assert calls == ["grandchild", "child"]


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from([State.STOPPED, State.KILLED])), max_size=5),
)
def test_a_stop_reaches_all_that_is_linked_below_and_nothing_else_and_calls_back_once(
    links: list[tuple[int, int]], verbs: list[tuple[int, State]]
) -> None:
    controls, expected = [Control() for _ in range(8)], [State.RUNNING] * 8
    calls: list[tuple[int, State]] = []
    for i, control in enumerate(controls):
        control.on_stop(partial(calls.append, (i, State.STOPPED)))
        control.on_kill(partial(calls.append, (i, State.KILLED)))
    for parent, child in links:
        controls[parent].link_child(controls[child])
    for at, state in verbs:
        controls[at].kill() if state is State.KILLED else controls[at].stop()
        for i in _reachable(at, links):
            expected[i] = max(expected[i], state)
        assert [control.state for control in controls] == expected
    wanted = [(i, s) for i in range(8) for s in (State.STOPPED, State.KILLED) if s <= expected[i]]
    assert sorted(calls) == wanted


def _reachable(start: int, links: list[tuple[int, int]]) -> set[int]:
    found, todo = set[int](), [start]
    while todo:
        at = todo.pop()
        if at not in found:
            found.add(at)
            todo += [child for parent, child in links if parent == at]
    return found


# -- signal handlers, which run in the loop's thread while the loop sleeps

LOOPS = {
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}


@pytest.fixture(params=LOOPS)
def real_loop(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return LOOPS[request.param]


@pytest.fixture
def on_alarm() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Takes what a signal handler of this thread calls, soon."""
    before = signal.getsignal(signal.SIGALRM)

    def arm(call: Callable[[], object]) -> None:
        signal.signal(signal.SIGALRM, lambda *_: call())
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("verb", [Control.stop, Control.kill])
def test_a_stop_from_a_signal_handler_wakes_a_loop_that_sleeps(
    real_loop: tuple[str, dict[str, Any]],
    on_alarm: Callable[[Callable[[], object]], None],
    verb: Callable[[Control], None],
) -> None:
    """Asyncio slept on until its next timer."""

    async def main() -> float:
        control, began_s = Control(), anyio.current_time()
        on_alarm(partial(verb, control))
        with anyio.move_on_after(60):
            await control.stopped()
        return anyio.current_time() - began_s

    assert anyio.run(main, backend=real_loop[0], backend_options=real_loop[1]) < 20


def test_a_kill_from_a_signal_handler_ends_a_stream_that_waits(
    real_loop: tuple[str, dict[str, Any]], on_alarm: Callable[[Callable[[], object]], None]
) -> None:

    async def waiting() -> AsyncGenerator[int, None]:
        yield 1
        await anyio.sleep(60)
        yield 2

    async def main() -> tuple[list[int], float]:
        request, began_s = Context(None), anyio.current_time()
        async with ResponseStream(until_killed(waiting(), request), request) as stream:
            on_alarm(request.kill)
            return [item async for item in stream], anyio.current_time() - began_s

    items, took_s = anyio.run(main, backend=real_loop[0], backend_options=real_loop[1])
    assert items == [1]
    assert took_s < 20


def test_a_callback_that_raises_in_a_signal_handler_ends_nothing(
    real_loop: tuple[str, dict[str, Any]],
    on_alarm: Callable[[Callable[[], object]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        control = Control()
        control.on_stop(_failing(ValueError("boom")))
        on_alarm(control.stop)
        with anyio.fail_after(5):
            await control.stopped()

    anyio.run(main, backend=real_loop[0], backend_options=real_loop[1])
    assert "boom" in caplog.text
