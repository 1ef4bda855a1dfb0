"""Stop and kill: the state machine, children, waiting, callbacks, threads."""

from __future__ import annotations

import gc
import threading
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Context, Control, State

VERBS = {"stop": Control.stop, "kill": Control.kill}


def test_kill_also_counts_as_stopped() -> None:
    control = Control()
    control.kill()
    assert control.is_stopped
    assert control.is_killed


def test_stop_alone_is_not_a_kill() -> None:
    control = Control()
    control.stop()
    assert control.is_stopped
    assert not control.is_killed


def test_stop_generating_is_stop() -> None:
    context = Context(None)
    context.stop_generating()
    assert context.control.state is State.STOPPED


@given(st.lists(st.sampled_from(["stop", "kill"]), max_size=6))
def test_the_state_only_moves_forward(verbs: list[str]) -> None:
    """A stop after a kill does not undo it; repeated verbs change nothing."""
    control, seen = Control(), [State.RUNNING]
    for verb in verbs:
        VERBS[verb](control)
        seen.append(control.state)
    assert seen == sorted(seen)
    assert control.is_killed == ("kill" in verbs)


@pytest.mark.parametrize("verb", VERBS)
def test_children_change_in_link_order_and_before_their_parent(verb: str) -> None:
    parent, first, second = Control(), Control(), Control()
    order: list[str] = []
    for name, control in (("parent", parent), ("first", first), ("second", second)):
        control.on_stop(partial(order.append, name))
    parent.link_child(first)
    parent.link_child(second)
    VERBS[verb](parent)
    assert order == ["first", "second", "parent"]
    assert first.state is second.state is parent.state


@pytest.mark.parametrize("verb", VERBS)
def test_a_child_linked_late_catches_up(verb: str) -> None:
    parent, child = Control(), Control()
    VERBS[verb](parent)
    parent.link_child(child)
    assert child.state is parent.state


def test_a_kill_after_a_stop_reaches_the_children_too() -> None:
    parent, child = Control(), Control()
    parent.link_child(child)
    parent.stop()
    parent.kill()
    assert child.is_killed


def test_a_child_never_changes_its_parent_or_sibling() -> None:
    parent, child, sibling = Control(), Control(), Control()
    parent.link_child(child)
    parent.link_child(sibling)
    child.kill()
    assert parent.state is sibling.state is State.RUNNING


def test_a_cycle_of_children_ends() -> None:
    a, b = Control(), Control()
    a.link_child(b)
    b.link_child(a)
    a.stop()
    b.kill()
    assert a.is_killed
    assert b.is_killed


def test_a_chain_of_children_may_be_longer_than_the_stack() -> None:
    chain = [Control() for _ in range(5000)]
    for parent, child in pairwise(chain):
        parent.link_child(child)
    chain[0].kill()
    assert chain[-1].is_killed


def test_children_are_held_weakly_and_forgotten() -> None:
    parent = Control()
    for _ in range(1000):
        parent.link_child(Control())
    assert len(parent._children or ()) < 20


def test_a_stop_reaches_all_living_children_however_many() -> None:
    parent, children = Control(), [Control() for _ in range(1000)]
    for child in children:
        parent.link_child(child)
        parent.link_child(Control())
    parent.stop()
    assert all(child.is_stopped for child in children)


def test_retained_objects_live_as_long_as_the_control() -> None:
    class Held:
        pass

    import weakref

    control, held = Control(), Held()
    alive = weakref.ref(held)
    control.retain(held)
    del held
    gc.collect()
    assert alive() is not None
    del control
    gc.collect()
    assert alive() is None


def test_a_callback_runs_once_on_stop_or_kill() -> None:
    control, calls = Control(), []
    control.on_stop(lambda: calls.append("stop"))
    control.on_kill(lambda: calls.append("kill"))
    control.stop()
    control.stop()
    assert calls == ["stop"]
    control.kill()
    assert calls == ["stop", "kill"]


def test_a_callback_taken_back_does_not_run() -> None:
    control, calls = Control(), []
    forget = control.on_stop(lambda: calls.append("stop"))
    forget()
    forget()
    control.kill()
    assert calls == []


def test_a_callback_given_late_runs_at_once() -> None:
    control, calls = Control(), []
    control.kill()
    control.on_stop(lambda: calls.append("stop"))
    control.on_kill(lambda: calls.append("kill"))
    assert calls == ["stop", "kill"]


def test_a_failing_callback_does_not_keep_others_from_hearing(caplog: pytest.LogCaptureFixture) -> None:
    control, calls = Control(), []

    def fail() -> None:
        raise RuntimeError("boom")

    control.on_stop(fail)
    control.on_stop(lambda: calls.append("called"))
    control.stop()
    assert calls == ["called"]
    assert "boom" in caplog.text


async def test_waiting_for_a_stop_that_happened_returns_at_once() -> None:
    control = Control()
    control.stop()
    control.stop()
    with anyio.fail_after(0.001):
        await control.stopped()


async def test_stop_and_kill_wake_all_waiters_and_a_stop_does_not_end_a_wait_for_kill() -> None:
    control, woken = Control(), []

    async def wait(name: str, waiting: Any) -> None:
        await waiting()
        woken.append(name)

    async with anyio.create_task_group() as tasks:
        for name in ("a", "b"):
            tasks.start_soon(wait, name, control.stopped)
        tasks.start_soon(wait, "kill", control.killed)
        await anyio.wait_all_tasks_blocked()
        control.stop()
        await anyio.wait_all_tasks_blocked()
        assert sorted(woken) == ["a", "b"]
        control.kill()
    assert woken[-1] == "kill"


async def test_a_watched_control_is_freed_with_its_last_user_and_needs_no_collection() -> None:
    control = Control()
    forget, gone = control.on_stop(lambda: None), ref(control)
    gc.disable()
    try:
        del control
        assert gone() is None
    finally:
        gc.enable()
    forget()  # there is nothing to forget any more


async def test_what_keeps_both_its_control_and_what_takes_its_callback_back_needs_no_collection_either() -> None:
    class Watching:
        def __init__(self) -> None:
            self.control = Control()
            self.forget = self.control.on_stop(self.stopped)

        def stopped(self) -> None: ...

    watching = Watching()
    gone = ref(watching)
    gc.disable()
    try:
        watching.forget()
        del watching
        assert gone() is None
    finally:
        gc.enable()


async def test_what_takes_a_callback_back_takes_only_that_one_and_may_come_late() -> None:
    control, called = Control(), list[int]()
    takes_back = [control.on_stop(partial(called.append, number)) for number in range(3)]
    takes_back[1]()
    takes_back[1]()
    control.stop()
    takes_back[0]()
    assert called == [0, 2]


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    control = Control()
    with anyio.move_on_after(1):
        await control.stopped()
    assert not control._watchers


async def test_a_stop_from_another_thread_wakes_a_waiter_and_calls_back_in_the_loop() -> None:
    control, here, called_in = Control(), threading.get_ident(), []
    control.on_stop(lambda: called_in.append(threading.get_ident()))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(control.stopped)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(control.stop)
    while not called_in:
        await checkpoint()
    assert called_in == [here]


def test_racing_threads_leave_the_strongest_state_and_call_back_once() -> None:
    for _ in range(50):
        parent, child = Control(), Control()
        calls: list[int] = []
        parent.link_child(child)
        child.on_stop(partial(calls.append, 1))
        start = threading.Barrier(3)

        def run(verb: Any, start: threading.Barrier = start, parent: Control = parent) -> None:
            start.wait()
            verb(parent)

        threads = [threading.Thread(target=run, args=(verb,)) for verb in (Control.stop, Control.kill)]
        for thread in threads:
            thread.start()
        start.wait()
        for thread in threads:
            thread.join()
        assert parent.is_killed
        assert child.is_killed
        assert calls == [1]
