"""The store over NATS: the contract of every store, and what only this one has."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.pipeline.network.test_store as contract
from pipeline import InvalidArgument
from pipeline.errors import MessageTooLarge
from pipeline.network.discovery import Gone, Put
from pipeline.network.nats import NatsConnection, NatsStore
from pipeline.network.nats.broker_messages import Delivered, Position
from pipeline.network.nats.kv_watch import Delivery
from pipeline.network.runtime import LEASE_TTL_S
from pipeline.rx import AnyIOScheduler
from tests.pipeline.network.nats.worlds import TTL_S, NatsWorld
from tests.pipeline.network.test_store import (  # noqa: F401  # run here, with the fixtures below
    test_a_disposed_watch_receives_nothing_more_and_is_released,
    test_a_held_key_does_not_lapse,
    test_a_key_is_created_once,
    test_a_key_lives_as_long_as_its_last_writer,
    test_a_key_that_another_store_has_deleted_stays_deleted,
    test_a_key_that_lapsed_can_be_created_again,
    test_a_quiet_store_repeats_nothing,
    test_a_watch_after_others_have_ended_begins_with_what_is_there_then,
    test_a_watch_begins_with_what_is_there,
    test_a_watch_has_no_gap_and_no_duplicate,
    test_an_abandoned_key_lapses_within_its_time,
    test_closing_removes_everything_and_completes_watches,
    test_entries_have_full_keys,
    test_keys_are_any_text,
    test_of_many_creators_one_wins,
    test_of_many_stores_one_creates_a_key_and_one_replaces_it,
    test_replacing_wants_the_revision_that_holds,
    test_values_are_any_bytes,
    test_watchers_receive_changes_of_their_bucket_only,
    test_what_one_store_writes_all_receive,
    test_writing_an_abandoned_key_renews_it,
)
from tests.pipeline.network.worlds import eventually, record_watch


@pytest.fixture
def world(world: NatsWorld, monkeypatch: pytest.MonkeyPatch) -> NatsWorld:
    monkeypatch.setattr(contract, "TTL_S", TTL_S)
    monkeypatch.setattr(contract, "LAPSED_S", 20.0)
    return world


@pytest.fixture
def shared(world: NatsWorld) -> NatsWorld:
    return world


async def test_a_revision_is_stable_over_renewals(world: NatsWorld) -> None:
    async with world.store() as owner, world.store() as other:
        created = await owner.create("a/k", b"1")
        received, _ = record_watch(other)
        await eventually(lambda: owner.renewals >= 1 and bool(received))
        assert await other.get("a/k") == Put("a/k", b"1", created.revision)
        assert (await other.replace("a/k", b"2", created.revision)).outcome == "created"
        await eventually(lambda: [change.value for change in received] == [b"1", b"2"])


async def test_watches_of_one_prefix_share_a_reader_and_the_second_begins_with_what_is_there(world: NatsWorld) -> None:
    async with world.store() as store:
        created = await store.create("a/k", b"1")
        first, watching = record_watch(store, "a")
        await eventually(lambda: first == [Put("a/k", b"1", created.revision)])
        second, _ = record_watch(store, "a/")
        assert second == first
        watching.dispose()
        await store.delete("a/k")
        await eventually(lambda: second[1:] == [Gone("a/k")])
        assert len(first) == 1


async def test_a_value_that_no_message_holds_is_refused(world: NatsWorld) -> None:
    async with world.store() as store:
        with pytest.raises(MessageTooLarge):
            await store.create("a/k", bytes(1024 * 1024))
        assert (await store.create("a/k", bytes(1024 * 1024 - 512))).outcome == "created"
        with pytest.raises(InvalidArgument):
            await store.create("k" * 20_000, b"")
        assert await store.get("a/none") is None


async def test_long_keys_come_and_go_like_others(world: NatsWorld) -> None:
    keys = ["a/" + "ä" * 1000, "a/" + "ä" * 1001, "a/b/" + "x" * 2000]
    async with world.store() as owner, world.store() as other:
        received, _ = record_watch(other, "a")
        for count, key in enumerate(keys, 1):
            await owner.create(key, b"1")
            await eventually(lambda: len(received) == count)  # noqa: B023
        assert [change.key for change in received] == keys
        assert await other.entries("a/" + "ä" * 1000) == {keys[0]: b"1"}
        assert sorted(await other.entries("a")) == sorted(keys)
        for key in keys:
            await other.delete(key)
        await eventually(lambda: received[3:] == [Gone(key) for key in keys])


@pytest.mark.parametrize("ttl_s", [0, -1, 1000, 0.5])
def test_a_lease_that_would_hide_outages_or_that_the_server_cannot_keep_is_refused(ttl_s: float) -> None:
    connection = NatsConnection("nats://127.0.0.1:1", AnyIOScheduler())
    with pytest.raises(InvalidArgument):
        NatsStore(connection, ttl_s)


def test_a_bucket_has_a_plain_name() -> None:
    with pytest.raises(InvalidArgument):
        NatsStore(NatsConnection("nats://127.0.0.1:1", AnyIOScheduler()), 10, bucket="a.b")


ANY_BYTES = st.binary(max_size=40)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["Penstock-Revision", "Penstock-Writer", "Penstock-Key", "KV-Operation", "Nats-Marker-Reason", "x"]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_categories=["Cs"]), max_size=20),
    max_size=3,
)
TOKENS = st.text(
    st.characters(exclude_characters=" .*>\t\r\n\0\x0b\x0c", exclude_categories=["Cs", "Zs", "Cc"]),
    min_size=1,
    max_size=8,
)


@settings(max_examples=10)
@given(st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=3), ANY_BYTES, HEADERS), min_size=1, max_size=10))
async def test_what_others_put_into_the_bucket_never_ends_a_watch(
    world: NatsWorld, caplog: pytest.LogCaptureFixture, writes: list[tuple[list[str], bytes, dict[str, str]]]
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with world.store() as owner, world.store() as other:
        received, watching = record_watch(other)
        async with other._connection.calling() as session:
            for tokens, value, headers in writes:
                subject = ".".join([f"$KV.{world.bucket}", *tokens])
                await session.publish(subject, value, headers=headers)
        created = await owner.create("sound/k", b"1")
        await eventually(lambda: Put("sound/k", b"1", created.revision) in received)
        assert (await other.entries("sound")) == {"sound/k": b"1"}
        assert "completed" not in received
        watching.dispose()
        assert other._connection.sessions == 1


async def test_a_renewal_whose_answer_was_lost_keeps_the_key(world: NatsWorld) -> None:
    async with world.store() as store:
        await store.create("a/k", b"1")
        store._leases._held["a/k"].sequence += 1000  # the number that the store knows is not the stored one
        renewed = store.renewals
        await eventually(lambda: store.renewals > renewed)
        assert "a/k" in store._leases
        assert await store.entries() == {"a/k": b"1"}


@pytest.mark.parametrize(
    ("message", "is_broken"),
    [
        (Delivered("s", b"", {}, Position(2, 5, 0)), False),
        (Delivered("s", b"", {}, Position(3, 5, 0)), True),
        (Delivered("s", b"", {}, Position(1, 5, 0)), True),
        (Delivered("s", b"", {"Status": "100", "Nats-Last-Consumer": "1"}, is_control=True), False),
        (Delivered("s", b"", {"Status": "100", "Nats-Last-Consumer": "2"}, is_control=True), True),
        (Delivered("s", b"", {"Status": "409"}, is_control=True), True),
    ],
)
async def test_a_reader_of_a_stream_notices_what_is_missing(message: Delivered, is_broken: bool) -> None:
    taken: list[int] = []
    delivery = Delivery(lambda _, position: taken.append(position.number))
    delivery.receive(Delivered("s", b"", {}, Position(1, 4, 1)))
    assert not delivery.is_complete
    delivery.receive(message)
    assert delivery.is_broken == is_broken
    assert delivery.is_complete == (not is_broken)
    assert taken == ([1, 2] if message.position == Position(2, 5, 0) else [1])


@pytest.mark.slow
async def test_a_thousand_keys_of_one_process_are_renewed_in_time(world: NatsWorld) -> None:
    """Within the lease time of programs; all of them stay."""
    async with world.store(ttl_s=LEASE_TTL_S) as owner, world.store(ttl_s=LEASE_TTL_S) as other:
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(create, owner, range(number, 1000, 100))
        assert len(await other.entries()) == 1000
        renewed = owner.renewals
        await eventually(lambda: owner.renewals >= renewed + 1000, within_s=LEASE_TTL_S)
        assert len(await other.entries()) == 1000


async def create(store: NatsStore, numbers: Any) -> None:
    for number in numbers:
        assert (await store.create(f"v1/instances/ns/backend/generate/{number:x}", bytes(500))).outcome == "created"
