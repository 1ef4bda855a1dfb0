"""The contract of a store and of its watches, for every kind of store, and the fan-out below the watches."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipeline.network.discovery import Change, Gone, Put
from pipeline.network.events import Fanout
from pipeline.rx import Subject
from tests.pipeline.network.worlds import STORE_KINDS, TTL_S, StoreWorld, eventually, record_watch

LAPSED_S = 3.0
"""Seconds within which an abandoned key is gone, from one before the end of its time."""


@pytest.fixture(params=STORE_KINDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> StoreWorld:
    return StoreWorld(request.param, tmp_path)


async def test_a_key_is_created_once(world: StoreWorld) -> None:
    async with world.store() as store:
        created = await store.create("a/k", b"1")
        assert created.outcome == "created"
        again = await store.create("a/k", b"2")
        assert (again.outcome, again.revision) == ("exists", created.revision)
        assert await store.get("a/k") == Put("a/k", b"1", created.revision)


async def test_of_many_creators_one_wins(world: StoreWorld) -> None:
    async with world.store() as store:
        outcomes: list[str] = []

        async def create(number: int) -> None:
            outcomes.append((await store.create("a/k", b"%d" % number)).outcome)

        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(create, number)
        assert sorted(outcomes) == ["created"] + ["exists"] * 15


async def test_replacing_wants_the_revision_that_holds(world: StoreWorld) -> None:
    async with world.store() as store:
        assert (await store.replace("a/k", b"1", 0)).outcome == "missing"
        first = (await store.create("a/k", b"1")).revision
        replaced = await store.replace("a/k", b"2", first)
        assert replaced.outcome == "created"
        assert replaced.revision > first
        late = await store.replace("a/k", b"3", first)
        assert (late.outcome, late.revision) == ("retry", replaced.revision)
        await store.delete("a/k")
        assert (await store.replace("a/k", b"3", replaced.revision)).outcome == "missing"
        assert await store.get("a/k") is None
        await store.delete("a/k")


async def test_watchers_receive_changes_of_their_bucket_only(world: StoreWorld) -> None:
    async with world.store() as store:
        first, second, other = (record_watch(store, prefix)[0] for prefix in ("a", "a", "b"))
        in_a = await store.create("a/k", b"1")
        in_b = await store.create("b/k", b"2")
        await eventually(lambda: first == second == [Put("a/k", b"1", in_a.revision)])
        await eventually(lambda: other == [Put("b/k", b"2", in_b.revision)])


async def test_a_watch_begins_with_what_is_there(world: StoreWorld) -> None:
    """The value once, then the update."""
    async with world.store() as store:
        created = await store.create("a/k", b"1")
        received, _ = record_watch(store, "a")
        await eventually(lambda: received == [Put("a/k", b"1", created.revision)])
        replaced = await store.replace("a/k", b"2", created.revision)
        await eventually(lambda: received[1:] == [Put("a/k", b"2", replaced.revision)])
        await store.delete("a/k")
        await eventually(lambda: received[2:] == [Gone("a/k")])


async def test_a_quiet_store_repeats_nothing(world: StoreWorld) -> None:
    async with world.store() as store:
        await store.create("a/k", b"1")
        received, _ = record_watch(store)
        await anyio.sleep(3 * TTL_S)
        assert len(received) == 1


async def test_entries_have_full_keys(world: StoreWorld) -> None:
    async with world.store() as store:
        for key in ("b/x", "a/y", "a/x", "ab/x"):
            await store.create(key, key.upper().encode())
        assert list((await store.entries("a")).items()) == [("a/x", b"A/X"), ("a/y", b"A/Y")]
        assert len(await store.entries()) == 4


ODD_KEYS = [
    *("a", "A", "a/", "a//b", "a/.", "a/..", "../a", "a%2fb", "a b", "a\n", "a\0", "a*", "a>", "ä/☃", "a" * 190),
    *("a/" * 100, "a/" * 100 + "b", "ä" * 1000, "CON", "a.", "a~", "%", "lock"),
]
"""Names with a meaning of their own somewhere, and long ones."""


async def test_keys_are_any_text(world: StoreWorld) -> None:
    async with world.store() as store:
        for number, key in enumerate(ODD_KEYS):
            assert (await store.create(f"b/{key}", b"%d" % number)).outcome == "created", key
        assert await store.entries("b") == {f"b/{key}": b"%d" % number for number, key in enumerate(ODD_KEYS)}
        for key in ODD_KEYS:
            await store.delete(f"b/{key}")
        assert await store.entries() == {}


async def test_values_are_any_bytes(world: StoreWorld) -> None:
    async with world.store() as store:
        for value in (b"", b"\n", b"\0\xff\n{}", bytes(range(256)) * 4000):
            await store.create("a/k", value)
            assert (await store.entries()) == {"a/k": value}
            await store.delete("a/k")


async def test_a_disposed_watch_receives_nothing_more_and_is_released(world: StoreWorld) -> None:
    async with world.store() as store:
        received, watching = record_watch(store)
        assert store.watchers == 1
        watching.dispose()
        assert store.watchers == 0
        await store.create("a/k", b"1")
        await anyio.sleep(1)
        assert received == []


async def test_a_watch_after_others_have_ended_begins_with_what_is_there_then(world: StoreWorld) -> None:
    async with world.store() as store:
        await store.create("a/old", b"1")
        _, watching = record_watch(store)
        await anyio.sleep(1)
        watching.dispose()
        await store.delete("a/old")
        created = await store.create("a/new", b"2")
        received, _ = record_watch(store)
        await eventually(lambda: bool(received))
        await anyio.sleep(1)
        assert received == [Put("a/new", b"2", created.revision)]


async def test_a_held_key_does_not_lapse(world: StoreWorld) -> None:
    async with world.store() as store:
        await store.create("a/k", b"1")
        await anyio.sleep(10 * TTL_S)
        assert await store.get("a/k") is not None


async def test_an_abandoned_key_lapses_within_its_time(world: StoreWorld) -> None:
    async with world.store() as store:
        begun_s = anyio.current_time()
        created = await store.create("a/k", b"1")
        received, _ = record_watch(store)
        store.abandon("a/k")
        store.abandon("a/k")
        await anyio.sleep(TTL_S - 1)
        assert await store.get("a/k") is not None or anyio.current_time() - begun_s >= TTL_S  # or this is late
        await eventually(lambda: received == [Put("a/k", b"1", created.revision), Gone("a/k")], LAPSED_S)
        await anyio.sleep(1)
        assert len(received) == 2
        assert (await store.get("a/k"), await store.entries()) == (None, {})


async def test_writing_an_abandoned_key_renews_it(world: StoreWorld) -> None:
    async with world.store() as store:
        created = await store.create("a/k", b"1")
        store.abandon("a/k")
        replaced = await store.replace("a/k", b"2", created.revision)
        await anyio.sleep(10 * TTL_S)
        assert await store.get("a/k") == Put("a/k", b"2", replaced.revision)


async def test_a_key_that_lapsed_can_be_created_again(world: StoreWorld) -> None:
    """With another revision where a writer may still know the old one."""
    async with world.store() as store:
        await store.create("a/k", b"1")
        store.abandon("a/k")
        await anyio.sleep(TTL_S + 2)
        assert (await store.create("a/k", b"2")).outcome == "created"
        await anyio.sleep(3 * TTL_S)
        assert await store.entries() == {"a/k": b"2"}


async def test_closing_removes_everything_and_completes_watches(world: StoreWorld) -> None:
    async with world.store() as store:
        created = await store.create("a/k", b"1")
        received, _ = record_watch(store)
        await store.close()
        await store.close()
        assert received == [Put("a/k", b"1", created.revision), Gone("a/k"), "completed"]
        late, _ = record_watch(store)
        assert late == ["completed"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30), st.integers(0, 30))
async def test_a_watch_has_no_gap_and_no_duplicate(
    world: StoreWorld, writes: list[tuple[str, bool]], joins_at: int
) -> None:
    """Whenever it begins, what it receives adds up to what is there."""
    async with evolve(world, folder=world.folder / uuid4().hex).store() as store:
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
            there = await store.entries()
            await eventually(lambda: seen == there)


# -- several stores of one deployment


@pytest.fixture(params=[kind for kind in STORE_KINDS if kind != "memory"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> StoreWorld:
    return StoreWorld(request.param, tmp_path)


async def test_what_one_store_writes_all_receive(shared: StoreWorld) -> None:
    async with shared.store() as writer, shared.store() as reader:
        first = await writer.create("a/k", b"1")
        received, _ = record_watch(reader)
        await eventually(lambda: received == [Put("a/k", b"1", first.revision)])
        second = await writer.replace("a/k", b"2", first.revision)
        await eventually(lambda: received[1:] == [Put("a/k", b"2", second.revision)])
        third = await writer.create("b/k", b"3")
        await eventually(lambda: received[2:] == [Put("b/k", b"3", third.revision)])
        await writer.delete("a/k")
        await eventually(lambda: received[3:] == [Gone("a/k")])
        await writer.close()
        await eventually(lambda: received[4:] == [Gone("b/k")])


async def test_of_many_stores_one_creates_a_key_and_one_replaces_it(shared: StoreWorld) -> None:
    async with shared.store() as first, shared.store() as second, shared.store() as third:
        outcomes: list[str] = []
        stores = (first, second, third)

        async def create(number: int) -> None:
            outcomes.append((await stores[number % 3].create("a/k", b"%d" % number)).outcome)

        async def replace(number: int, revision: int) -> None:
            outcomes.append((await stores[number % 3].replace("a/k", b"%d" % number, revision)).outcome)

        async with anyio.create_task_group() as tasks:
            for number in range(9):
                tasks.start_soon(create, number)
        assert sorted(outcomes) == ["created"] + ["exists"] * 8
        outcomes.clear()
        known = await first.get("a/k")
        assert known is not None
        async with anyio.create_task_group() as tasks:
            for number in range(9):
                tasks.start_soon(replace, number, known.revision)
        assert sorted(outcomes) == ["created"] + ["retry"] * 8


async def test_a_key_lives_as_long_as_its_last_writer(shared: StoreWorld) -> None:
    async with shared.store() as first, shared.store() as second:
        created = await first.create("a/k", b"1")
        await second.replace("a/k", b"2", created.revision)
        await anyio.sleep(3 * TTL_S)
        await first.close()
        assert await second.entries() == {"a/k": b"2"}
        second.abandon("a/k")
        await anyio.sleep(TTL_S + 2)
        assert await second.entries() == {}


async def test_a_key_that_another_store_has_deleted_stays_deleted(shared: StoreWorld) -> None:
    async with shared.store() as first, shared.store() as second:
        await first.create("a/k", b"1")
        await second.delete("a/k")
        await anyio.sleep(3 * TTL_S)
        assert await second.entries() == {}
        assert (await second.create("a/k", b"2")).outcome == "created"


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
