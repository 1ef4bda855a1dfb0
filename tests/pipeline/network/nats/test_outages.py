"""A broker that is away changes nothing but that nothing changes."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import anyio
import pytest
from nats.aio.client import Client

from pipeline import CannotConnect, Unavailable
from pipeline.network.discovery import Gone, Put
from pipeline.network.nats import NatsServer, NatsStore
from tests.pipeline.network.nats.worlds import GRACE_S, QUICK, TTL_S, ConfiguredServer, NatsWorld, own_server
from tests.pipeline.network.worlds import eventually, record_watch


@asynccontextmanager
async def own_stores(folder: Path) -> AsyncIterator[tuple[NatsServer, NatsStore, NatsStore]]:
    """Give a server of this test alone, and the stores of two processes there."""
    async with own_server(folder) as server:
        world = NatsWorld(server.url, folder)
        async with world.store() as owner, world.store() as other:
            yield server, owner, other


async def outage(server: NatsServer, how: str, lasts_s: float) -> None:
    """Have the server "killed", or "suspended", for so long."""
    if how == "killed":
        await server.kill()
        await anyio.sleep(lasts_s)
        await server.start()
    else:
        server.pause()
        await anyio.sleep(lasts_s)
        server.resume()


async def watched(store: NatsStore, count: int, prefix: str = "") -> list[Any]:
    """Return the list of the changes under the prefix, which grows with them, once it has so many."""
    received, _ = record_watch(store, prefix)
    await eventually(lambda: len(received) == count)
    return received


async def both_connected(*stores: NatsStore) -> None:
    await eventually(lambda: all(store._connection.is_connected for store in stores))


async def has_entries(store: NatsStore, wanted: dict[str, bytes]) -> None:
    """Wait until these are there, and no others: after an outage each owner writes its own again."""
    await read_as(store.entries, wanted)


async def read_as(read: Callable[[], Awaitable[object]], wanted: object) -> None:
    with anyio.fail_after(20):
        while await read() != wanted:  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def test_a_watch_goes_on_over_a_restart_and_repeats_nothing(tmp_path: Path) -> None:
    async with own_stores(tmp_path) as (server, owner, other):
        created = await owner.create("a/old", b"1")
        received = await watched(other, 1)
        await server.kill()
        await server.start()
        await both_connected(owner, other)
        await has_entries(other, {"a/old": b"1"})
        new = await owner.create("a/new", b"2")
        await eventually(lambda: len(received) == 2)
        replaced = await other.replace("a/old", b"3", created.revision)
        await eventually(lambda: len(received) == 3)
        await owner.delete("a/new")
        await eventually(lambda: Gone("a/new") in received)
        assert received == [
            Put("a/old", b"1", created.revision),
            Put("a/new", b"2", new.revision),
            Put("a/old", b"3", replaced.revision),
            Gone("a/new"),
        ]


async def test_what_changed_while_a_watch_was_cut_off_comes_as_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with own_stores(tmp_path) as (_, owner, other):
        may_connect, attempt = anyio.Event(), other._connection._attempt

        async def attempt_later(*arguments: Any) -> Any:
            await may_connect.wait()
            return await attempt(*arguments)

        monkeypatch.setattr(other._connection, "_attempt", attempt_later)
        for key in ("a/same", "a/changed", "a/deleted"):
            await owner.create(key, b"1")
        received = await watched(other, 3)
        other._connection.session_now().lose("cut")
        await owner.delete("a/deleted")
        known = await owner.get("a/changed")
        assert known is not None
        changed = await owner.replace("a/changed", b"2", known.revision)
        new = await owner.create("a/new", b"3")
        may_connect.set()
        await eventually(lambda: len(received) == 6)
        assert received[3:] == [
            Put("a/changed", b"2", changed.revision),
            Gone("a/deleted"),
            Put("a/new", b"3", new.revision),
        ]


async def test_a_message_that_a_watch_has_missed_is_noticed_and_made_up_for(
    world: NatsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.store() as owner, world.store() as other:
        received, _ = record_watch(other, "a")
        await owner.create("a/1", b"1")
        await eventually(lambda: len(received) == 1)
        dropped: list[Any] = []

        async def drop_one(client: Any, sid: int, subject: bytes, *rest: Any) -> None:
            if subject.endswith(b"a.2") and client is other._connection.session_now()._client and not dropped:
                dropped.append(subject)
            else:
                await process(client, sid, subject, *rest)

        process = Client._process_msg
        monkeypatch.setattr(Client, "_process_msg", drop_one)
        await owner.create("a/2", b"2")
        await owner.create("a/3", b"3")
        await eventually(lambda: {change.key for change in received} == {"a/1", "a/2", "a/3"})
        assert len(received) == 3
        assert dropped
        assert other._connection.sessions == 1


def unanswered(calls: list[None]) -> Callable[..., Awaitable[None]]:
    """Return a function whose calls, which are counted, never return."""

    async def call(*_: Any, **__: Any) -> None:
        calls.append(None)
        await anyio.sleep_forever()

    return call


async def vanish(store: NatsStore, key: str) -> None:
    """Remove the key from the server without a trace, as an old server does that finds it lapsed when it starts."""
    session = store._connection.session_now()
    await session.streams.purge(store._bucket.stream, store._bucket.subject(key))


async def test_a_held_key_that_vanishes_is_back_before_any_watch_notices(world: NatsWorld) -> None:
    async with world.store() as owner, world.store() as other:
        created = await owner.create("a/k", b"1")
        received = await watched(other, 1)
        await vanish(other, "a/k")
        while await other.get("a/k") is not None:  # renewed in between
            await vanish(other, "a/k")
        await read_as(partial(other.get, "a/k"), Put("a/k", b"1", created.revision))
        assert len(received) == 1


@pytest.mark.slow
async def test_a_key_that_lapses_without_notice_is_gone_because_it_is_silent(world: NatsWorld) -> None:
    async with world.store() as owner, world.store() as other:
        await owner.create("a/k", b"1")
        await owner.create("a/held", b"1")
        received = await watched(other, 2)
        renewed_s, _ = other._watches[""][0]._leases["a/k"]
        owner.abandon("a/k")
        await vanish(other, "a/k")
        await eventually(lambda: received[2:] == [Gone("a/k")])
        assert anyio.current_time() - renewed_s > TTL_S
        async with other._connection.calling() as session:
            await session.publish(other._bucket.subject("a/by-hand"), b"without a lease")
        await eventually(lambda: len(received) == 4)
        await anyio.sleep(GRACE_S + 1)
        assert len(received) == 4


async def test_a_bucket_that_is_deleted_under_way_is_made_and_filled_again(world: NatsWorld) -> None:
    async with world.store() as owner, world.store() as other, world.store() as third:
        await owner.create("a/k", b"1")
        received = await watched(other, 1)
        await third._connection.session_now().streams._api.delete_stream(third._bucket.stream)
        with suppress(Unavailable):
            await third.create("a/new", b"2")
        assert (await third.create("a/next", b"3")).outcome == "created"
        await eventually(lambda: "a/next" in {change.key for change in received})
        renewals = owner.renewals
        await eventually(lambda: owner.renewals > renewals)
        assert {"a/k", "a/next"} <= set(await third.entries())
        assert not [change for change in received if isinstance(change, Gone)]
        assert owner._connection.sessions == other._connection.sessions == third._connection.sessions == 1


async def test_a_bucket_without_times_to_live_is_refused(world: NatsWorld) -> None:
    async with world.objects() as objects:
        settings = {"name": f"KV_{world.bucket}", "subjects": [f"$KV.{world.bucket}.>"]}
        await objects._connection.session_now().streams.ensure_stream(settings)
    with pytest.raises(CannotConnect, match="allow_msg_ttl"):
        async with world.store():
            pass


@pytest.mark.slow
async def test_a_server_without_room_refuses_writes_and_removes_nothing(tmp_path: Path) -> None:
    more = {"jetstream": {"store_dir": str(tmp_path / "data"), "max_file_store": 2_000_000}}
    async with ConfiguredServer(tmp_path / "server", more=more) as server:
        world = NatsWorld(server.url, tmp_path)
        async with world.store() as owner, world.store() as other, world.objects() as objects:
            await owner.create("a/k", b"1")
            received, _ = record_watch(other, "a")
            (tmp_path / "file").write_bytes(bytes(3_000_000))
            with pytest.raises(Unavailable, match="insufficient resources"):
                await objects.put(tmp_path / "file")
            large = [key for key in (f"b/{number}" for number in range(5)) if await is_created(owner, key)]
            assert 0 < len(large) < 5
            await anyio.sleep(2 * GRACE_S)
            assert await other.entries("a") == {"a/k": b"1"}
            assert len(received) == 1
            for key in large:
                owner.abandon(key)
                await vanish(other, key)
            renewals = owner.renewals
            await eventually(lambda: owner.renewals > renewals)
            assert (await owner.create("b/small", b"2")).outcome == "created"
            await owner.delete("a/k")
            await eventually(lambda: received[1:] == [Gone("a/k")])
            assert owner._connection.sessions == other._connection.sessions == 1


async def is_created(store: NatsStore, key: str) -> bool:
    """Write a large value. Return False if the server has no room for it."""
    try:
        return (await store.create(key, bytes(500_000))).outcome == "created"
    except Unavailable:
        return False


async def lose_data(server: NatsServer) -> None:
    """Kill the server and its disk, and start an empty one in its place."""
    await server.kill()
    shutil.rmtree(server.folder / "jetstream")
    await server.start()


async def test_an_empty_server_is_filled_again_and_no_watch_notices(tmp_path: Path) -> None:
    async with own_stores(tmp_path) as (server, owner, other):
        created = await owner.create("a/k", b"1")
        replaced = await owner.replace("a/k", b"2", created.revision)
        received = await watched(other, 1)
        await lose_data(server)
        await eventually(lambda: owner._connection.sessions == other._connection.sessions == 2)
        await has_entries(other, {"a/k": b"2"})
        assert await other.get("a/k") == Put("a/k", b"2", replaced.revision)
        assert len(received) == 1
        await other.replace("a/k", b"3", replaced.revision)
        await eventually(lambda: len(received) == 2)


@pytest.mark.slow
async def test_an_owner_that_does_not_come_back_with_the_server_is_gone_after_a_lease_time(tmp_path: Path) -> None:
    async with own_stores(tmp_path) as (server, owner, other):
        await owner.create("a/lost", b"1")
        await other.create("a/kept", b"2")
        received = await watched(other, 2)
        owner.abandon("a/lost")
        await lose_data(server)
        await both_connected(other)
        await anyio.sleep(TTL_S - 0.5)
        assert len(received) == 2
        await eventually(lambda: received[2:] == [Gone("a/lost")])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "suspended"])
async def test_an_outage_longer_than_every_lease_removes_nothing(tmp_path: Path, how: str) -> None:
    async with own_stores(tmp_path) as (server, owner, other):
        await owner.create("a/k", b"1")
        await other.create("b/k", b"2")
        received = await watched(other, 2)
        for round_s in (1.5 * TTL_S, 3 * TTL_S):
            await outage(server, how, round_s)
            await both_connected(owner, other)
            await has_entries(other, {"a/k": b"1", "b/k": b"2"})
        late, _ = record_watch(owner)
        await anyio.sleep(GRACE_S + 1)
        assert len(received) == 2
        assert [change.key for change in late] == ["a/k", "b/k"]


@pytest.mark.slow
async def test_a_key_whose_owner_closed_during_an_outage_goes_after_it(tmp_path: Path) -> None:
    async with own_server(tmp_path) as server:
        world = NatsWorld(server.url, tmp_path)
        async with world.store() as other:
            async with world.store() as owner:
                await owner.create("a/k", b"1")
                received = await watched(other, 1)
                await server.kill()
                await eventually(lambda: not owner._connection.is_connected)
            await anyio.sleep(TTL_S + 1)
            assert len(received) == 1
            await server.start()
            await both_connected(other)
            await eventually(lambda: received[1:] == [Gone("a/k")])


@pytest.mark.slow
async def test_a_process_that_was_suspended_itself_takes_nobody_for_gone(world: NatsWorld) -> None:
    async with world.store() as owner, world.store() as other:
        await owner.create("a/k", b"1")
        received = await watched(other, 1)
        owner.abandon("a/k")
        blocked_s = TTL_S + 2 * QUICK.reconnect_max_s
        sleep(blocked_s)  # noqa: ASYNC251  # neither store's process gets to do anything
        try:
            await owner.create("b/k", b"2")
        except Unavailable:  # its connection was lost as it went on
            await owner.create("b/k", b"2")
        await eventually(lambda: len(received) == 2)
        assert received[1].key == "b/k"
        await eventually(lambda: received[2:] == [Gone("a/k")])


@pytest.mark.slow
async def test_servers_killed_and_suspended_again_and_again_lose_no_lease(tmp_path: Path) -> None:
    async with own_stores(tmp_path) as (server, owner, other):
        for number in range(50):
            await owner.create(f"a/{number}", b"1")
        received = await watched(other, 50)
        for number in range(8):
            how, lasts_s = ("killed", 0.4 * number) if number % 2 else ("suspended", 0.5 * number)
            await outage(server, how, lasts_s)
            await anyio.sleep(0.2 * number)
        await both_connected(owner, other)
        await anyio.sleep(GRACE_S + 1)
        assert len(await other.entries()) == 50
        assert len(received) == 50


@pytest.mark.slow
async def test_a_key_that_lapsed_around_an_election_has_its_time_to_come_back(world: NatsWorld) -> None:
    """The servers of a cluster that have no leader take no renewals, and drop what has lapsed when they have one."""
    async with world.store() as owner, world.store() as other:
        await owner.create("a/1", b"1")
        received = await watched(other, 1)
        messages = other._connection.session_now()
        owner.abandon("a/1")
        begun_s = anyio.current_time()
        await anyio.sleep(TTL_S / 2)
        await messages.publish(f"$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.KV_{world.bucket}", b"{}")
        await eventually(lambda: Gone("a/1") in received)
        assert anyio.current_time() - begun_s > 1.5 * TTL_S


@pytest.mark.slow
async def test_a_renewal_that_is_never_answered_is_not_the_last(
    world: NatsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of servers without a leader, while the connection is as ever."""
    async with world.store() as owner:
        await owner.create("a/1", b"1")
        streams = owner._connection.session_now().streams
        asked: list[None] = []

        async def refused(batch: list[Any]) -> list[None]:
            return [None] * len(batch)

        with monkeypatch.context() as silent:
            silent.setattr(streams, "store_all", refused)
            silent.setattr(streams._api, "get_msg", unanswered(asked))
            await eventually(lambda: bool(asked), 2 * TTL_S)
        before = owner.renewals
        await eventually(lambda: owner.renewals > before + 1, 2 * QUICK.call_timeout_s + 3 * TTL_S)
        assert await owner.get("a/1") is not None
        assert owner._connection.sessions == 1


@pytest.mark.slow
async def test_a_watch_whose_reader_is_never_answered_begins_again(
    world: NatsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.store() as owner, world.store() as other:
        await owner.create("a/1", b"1")
        api, asked = other._connection.session_now().streams._api, list[None]()

        with monkeypatch.context() as silent:
            silent.setattr(api, "add_consumer", unanswered(asked))
            received, _ = record_watch(other)
            await eventually(lambda: bool(asked))
        await eventually(lambda: len(received) == 1, 2 * QUICK.call_timeout_s + 2)
