"""The contract of a store and of its watches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.network.discovery import Change, Gone, Put, Written
from pipeline.network.events import Fanout
from pipeline.network.inprocess import InProcessStore
from pipeline.rx import AnyIOScheduler, Subject

TTL_S = 10.0


@asynccontextmanager
async def opened() -> AsyncIterator[InProcessStore]:
    async with AnyIOScheduler() as scheduler:
        store = InProcessStore(scheduler, TTL_S)
        yield store
        await store.close()
        assert store.watchers == 0


def record(store: InProcessStore, prefix: str = "") -> tuple[list[Any], Any]:
    received: list[Any] = []
    return received, store.watch(prefix).subscribe(received.append, on_completed=lambda: received.append("completed"))


async def test_a_key_is_created_once() -> None:
    async with opened() as store:
        assert await store.create("a/k", b"1") == Written("created", 0)
        assert await store.create("a/k", b"2") == Written("exists", 0)
        assert await store.get("a/k") == Put("a/k", b"1", 0)


async def test_of_many_creators_one_wins() -> None:
    async with opened() as store:
        outcomes: list[str] = []

        async def create(number: int) -> None:
            outcomes.append((await store.create("a/k", b"%d" % number)).outcome)

        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(create, number)
        assert sorted(outcomes) == ["created"] + ["exists"] * 15


async def test_replacing_wants_the_revision_that_holds() -> None:
    async with opened() as store:
        assert (await store.replace("a/k", b"1", 0)).outcome == "missing"
        await store.create("a/k", b"1")
        assert await store.replace("a/k", b"2", 0) == Written("created", 1)
        assert await store.replace("a/k", b"3", 0) == Written("retry", 1)
        await store.delete("a/k")
        assert (await store.replace("a/k", b"3", 1)).outcome == "missing"
        assert await store.get("a/k") is None
        await store.delete("a/k")


async def test_watchers_receive_changes_of_their_bucket_only() -> None:
    async with opened() as store:
        first, second, other = record(store, "a")[0], record(store, "a")[0], record(store, "b")[0]
        await store.create("a/k", b"1")
        await store.create("b/k", b"2")
        assert first == second == [Put("a/k", b"1", 0)]
        assert other == [Put("b/k", b"2", 0)]


async def test_a_watch_begins_with_what_is_there() -> None:
    """The value once, then the update."""
    async with opened() as store:
        await store.create("a/k", b"1")
        received, _ = record(store, "a")
        assert received == [Put("a/k", b"1", 0)]
        await store.replace("a/k", b"2", 0)
        await store.delete("a/k")
        assert received[1:] == [Put("a/k", b"2", 1), Gone("a/k")]


async def test_entries_have_full_keys() -> None:
    async with opened() as store:
        for key in ("b/x", "a/y", "a/x", "ab/x"):
            await store.create(key, key.upper().encode())
        assert list((await store.entries("a")).items()) == [("a/x", b"A/X"), ("a/y", b"A/Y")]
        assert len(await store.entries()) == 4


async def test_a_disposed_watch_receives_nothing_more_and_is_released() -> None:
    async with opened() as store:
        received, watching = record(store)
        assert store.watchers == 1
        watching.dispose()
        assert store.watchers == 0
        await store.create("a/k", b"1")
        assert received == []


async def test_a_held_key_does_not_lapse() -> None:
    async with opened() as store:
        await store.create("a/k", b"1")
        await anyio.sleep(10 * TTL_S)
        assert await store.get("a/k") is not None


async def test_an_abandoned_key_lapses_within_its_time() -> None:
    async with opened() as store:
        await store.create("a/k", b"1")
        received, _ = record(store)
        store.abandon("a/k")
        store.abandon("a/k")
        await anyio.sleep(TTL_S - 1)
        assert await store.get("a/k") is not None
        await anyio.sleep(2)
        assert received == [Put("a/k", b"1", 0), Gone("a/k")]


async def test_writing_an_abandoned_key_renews_it() -> None:
    async with opened() as store:
        await store.create("a/k", b"1")
        store.abandon("a/k")
        await store.replace("a/k", b"2", 0)
        await anyio.sleep(10 * TTL_S)
        assert await store.get("a/k") == Put("a/k", b"2", 1)


async def test_closing_removes_everything_and_completes_watches() -> None:
    async with opened() as store:
        await store.create("a/k", b"1")
        received, _ = record(store)
        await store.close()
        await store.close()
        assert received == [Put("a/k", b"1", 0), Gone("a/k"), "completed"]
        late, _ = record(store)
        assert late == ["completed"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30), st.integers(0, 30))
async def test_a_watch_has_no_gap_and_no_duplicate(writes: list[tuple[str, bool]], joins_at: int) -> None:
    """Whenever it begins, what it record adds up to what is there."""
    async with opened() as store:
        seen: dict[str, Any] = {}

        def follow(change: Change) -> None:
            if isinstance(change, Gone):
                del seen[change.key]
            else:
                assert int(seen.get(change.key, -1)) < int(change.value)  # numbers grow
                seen[change.key] = change.value

        for number, (key, present) in enumerate(writes):
            if number == joins_at:
                store.watch().subscribe(follow)
            if not present:
                await store.delete(key)
            elif (known := await store.get(key)) is None:
                await store.create(key, b"%d" % number)
            else:
                await store.replace(key, b"%d" % number, known.revision)
        if joins_at < len(writes):
            assert seen == await store.entries()


# -- the fan-out below it


def test_what_a_listener_causes_comes_after_what_is_under_way() -> None:
    fanout: Fanout[int] = Fanout()
    first, second = Subject[int](), Subject[int]()
    order: list[tuple[str, int]] = []

    def cause(item: int) -> None:
        order.append(("first", item))
        if item < 3:
            fanout.push(item + 1)

    first.subscribe(cause)
    second.subscribe(lambda item: order.append(("second", item)))
    fanout.add(first)
    fanout.add(second)
    fanout.push(1)
    assert order == [(name, item) for item in (1, 2, 3) for name in ("first", "second")]


def test_a_change_during_the_first_items_comes_after_them() -> None:
    fanout: Fanout[str] = Fanout()
    listener, heard_items = Subject[str](), list[str]()

    def react(item: str) -> None:
        heard_items.append(item)
        if item == "a":
            fanout.push("a is gone")

    listener.subscribe(react)
    fanout.add(listener, first=["a", "b"])
    assert heard_items == ["a", "b", "a is gone"]


def test_a_watcher_that_joins_while_an_item_is_delivered_does_not_receive_it() -> None:
    fanout: Fanout[int] = Fanout()
    early, late, heard_items = Subject[int](), Subject[int](), list[int]()
    late.subscribe(heard_items.append)

    def join(item: int) -> None:
        if item == 1:
            fanout.add(late)

    early.subscribe(join)
    fanout.add(early)
    fanout.push(1)
    fanout.push(2)
    assert heard_items == [2]


def test_a_watcher_that_leaves_while_an_item_is_delivered_does_not_receive_it() -> None:
    fanout: Fanout[int] = Fanout()
    first, second, heard_items = Subject[int](), Subject[int](), list[int]()
    second.subscribe(heard_items.append)
    fanout.add(first)
    leaving = fanout.add(second)
    first.subscribe(lambda _: leaving.dispose())
    fanout.push(1)
    assert heard_items == []
    assert len(fanout) == 1


def test_a_listeners_error_stays_its_own(caplog: pytest.LogCaptureFixture) -> None:
    fanout: Fanout[int] = Fanout()
    broken, sound, heard_items = Subject[int](), Subject[int](), list[int]()

    def fail(_: int) -> None:
        raise LookupError("broken")

    broken.subscribe(fail)
    sound.subscribe(heard_items.append)
    fanout.add(broken)
    fanout.add(sound)
    fanout.push(1)
    fanout.push(2)
    assert heard_items == [1, 2]
    assert "a listener failed" in caplog.text


def test_a_listeners_error_at_the_end_stays_its_own_too(caplog: pytest.LogCaptureFixture) -> None:
    fanout: Fanout[int] = Fanout()
    broken, sound, ends = Subject[int](), Subject[int](), list[str]()

    def fail() -> None:
        raise LookupError("broken")

    broken.subscribe(on_completed=fail)
    sound.subscribe(on_completed=lambda: ends.append("sound"))
    fanout.add(broken)
    fanout.add(sound)
    fanout.complete()
    late = Subject[int]()
    late.subscribe(lambda item: ends.append(str(item)), on_completed=lambda: ends.append("late"))
    fanout.add(late, first=[1])
    assert ends == ["sound", "late"]
    assert len(fanout) == 0
    assert "a listener failed" in caplog.text
