"""One connection to each other process: made, shared, lost, made again; and who is let in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from attrs import evolve

from pipeline import AsyncEngine, Cancelled, CannotConnect, Context, Disconnected
from pipeline.network.names import EndpointId, Instance
from pipeline.network.tcp import Address, LinkHandler, TcpRequestPlane, framing
from pipeline.network.tcp.machine import machine_id
from pipeline.testing import OpenStreams, ScriptedEngine, Stall, Wait
from tests.pipeline.network.tcp.worlds import (
    OPTIONS,
    Pair,
    RawPeer,
    hello,
    pair,
    proof,
    proves_itself,
    raw_caller,
    raw_worker,
    settled,
)
from tests.pipeline.network.worlds import WHERE, eventually

TOKEN = evolve(OPTIONS, token="secret")
KIND: Any = Any
"""What items are read as."""


async def answer(engine: AsyncEngine[Any, Any], payload: Any = None) -> list[Any]:
    return await (await engine.generate(Context(payload))).collect()


# -- one connection


async def test_calls_of_all_instances_share_one_connection_made_by_the_first() -> None:
    async with pair() as world, anyio.create_task_group() as tasks:
        engines = [(await world.serve(ScriptedEngine([n]), instance_id=n))[1] for n in (1, 2, 3)]
        assert world.network.dialled == 0
        world.network.delay_s = 0.1
        for engine in engines * 5:
            tasks.start_soon(answer, engine)
        await anyio.sleep(5)
        assert (world.network.dialled, len(world.network.links)) == (1, 2)


async def test_a_lost_connection_ends_its_calls_and_is_made_again_by_the_next() -> None:
    local = ScriptedEngine(lambda payload: [1, Stall()] if payload == "stalls" else [2])
    async with pair() as world:
        serving, engine = await world.serve(local)
        async with await engine.generate(Context("stalls")) as stream:
            assert await stream.__anext__() == 1
            world.network.cut()
            with pytest.raises(Disconnected, match=r"ns/comp/ep/1 was lost: .*the network was cut"):
                await stream.__anext__()
        assert await answer(engine) == [2]
        assert world.network.dialled == 2
        await eventually(lambda: local.open == serving.running == 0)


async def test_items_that_came_before_the_loss_are_read_before_the_error() -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1, 2, 3, Stall()]))
        async with await engine.generate(Context(None)) as stream:
            await settled()
            world.network.cut()
            assert [await stream.__anext__() for _ in range(3)] == [1, 2, 3]
            with pytest.raises(Disconnected):
                await stream.__anext__()


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_stopped_request_ends_without_an_error_when_its_connection_is_lost(how: str) -> None:
    async with pair() as world:
        _, engine = await world.serve(Deaf())
        request = Context[Any](None)
        async with await engine.generate(request) as stream:
            getattr(request, how)()
            world.network.cut()
            assert [item async for item in stream] == []


class Deaf(ScriptedEngine):
    """Ends at a kill only."""

    def __init__(self) -> None:
        super().__init__(lambda payload: [Stall()])

    async def generate(self, request: Context[Any]) -> Any:
        own = Context(request.payload, id=request.id)
        request.control.on_kill(own.kill)
        return await super().generate(own)


async def test_a_connection_lost_before_there_is_a_stream_is_a_disconnect() -> None:
    async with pair() as world:
        _, engine = await world.serve(Slow())
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                with pytest.raises(Disconnected):
                    await engine.generate(Context(None))

            tasks.start_soon(call)
            await anyio.sleep(1)
            world.network.cut()


@pytest.mark.parametrize("is_cut", [False, True], ids=["lost", "cut"])
async def test_a_request_stopped_before_its_worker_is_gone_is_cancelled(is_cut: bool) -> None:
    async with pair() as world, anyio.create_task_group() as tasks:
        serving, engine = await world.serve(Slow())
        request = Context[Any](None)

        async def call() -> None:
            with pytest.raises(Cancelled):
                await engine.generate(request)

        tasks.start_soon(call)
        await anyio.sleep(1)
        request.stop()
        await anyio.sleep(1)
        if is_cut:
            serving.cut()
        else:
            world.network.cut()


class Slow(ScriptedEngine):
    """Takes its time before there is a stream."""

    def __init__(self) -> None:
        super().__init__([1])

    async def generate(self, request: Context[Any]) -> Any:
        with anyio.move_on_after(10):
            await request.killed()
        return await super().generate(request)


# -- no connection


async def test_a_process_that_is_gone_cannot_be_connected_and_is_not_tried_at_each_call() -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1]))
        await world.worker.close()
        for _ in range(3):
            with pytest.raises(CannotConnect, match="nothing listens"):
                await answer(engine)
        assert world.network.dialled == 1
        await anyio.sleep(0.06)
        with pytest.raises(CannotConnect):
            await answer(engine)
        assert world.network.dialled == 2


async def test_attempts_to_reach_a_process_that_is_gone_become_rarer() -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1]))
        await world.worker.close()
        for _ in range(300):
            with pytest.raises(CannotConnect):
                await answer(engine)
            await anyio.sleep(0.01)
        assert 7 <= world.network.dialled <= 10


async def test_a_process_that_is_back_is_connected_after_the_backoff() -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1]))
        listener = world.network.listeners[_worker_address(world)]
        await listener.close()
        with pytest.raises(CannotConnect):
            await answer(engine)
        world.network.listeners[listener.address] = listener
        await anyio.sleep(0.5)
        assert await answer(engine) == [1]


async def test_an_attempt_ends_after_its_time() -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1]))
        world.network.is_reachable = False
        start = anyio.current_time()
        with pytest.raises(CannotConnect, match="too long"):
            await answer(engine)
        assert anyio.current_time() - start == pytest.approx(OPTIONS.connect_timeout_s)


@pytest.mark.parametrize("how", ["cancel", "kill"])
async def test_a_call_that_gives_up_does_not_end_the_attempt_of_others(how: str) -> None:
    async with pair() as world, anyio.create_task_group() as tasks:
        _, engine = await world.serve(ScriptedEngine([1]))
        world.network.delay_s = 1.0
        request, answers = Context[Any](None), list[Any]()

        async def other() -> None:
            answers.extend(await answer(engine))

        async def gives_up() -> None:
            with scope:
                try:
                    await engine.generate(request)
                except Cancelled:
                    assert how == "kill"

        scope = anyio.CancelScope()
        tasks.start_soon(gives_up)
        tasks.start_soon(other)
        await anyio.sleep(0.5)
        if how == "kill":
            request.kill()
        else:
            scope.cancel()
        await anyio.sleep(9)
        assert answers == [1]
        assert world.network.dialled == 1


@pytest.mark.parametrize(
    ("transport", "text"),
    [({}, "no address"), ({"unix": "/a", "host": "elsewhere"}, "no address"), ({"tcp": "here"}, "wrong address")],
)
async def test_an_instance_without_an_address_cannot_be_connected(transport: dict[str, str], text: str) -> None:
    async with pair() as world:
        instance = evolve(Instance.of(EndpointId.parse(WHERE), 1), transport=transport)
        with pytest.raises(CannotConnect, match=text):
            await answer(world.caller.engine(instance, KIND))


async def test_processes_that_are_gone_are_forgotten() -> None:
    async with pair() as world:
        for port in range(1, 50):
            instance = evolve(Instance.of(EndpointId.parse(WHERE), port), transport={"tcp": f"gone:{port}"})
            with pytest.raises(CannotConnect, match="nothing listens"):
                await answer(world.caller.engine(instance, KIND))
            await anyio.sleep(0.1)
        assert len(world.caller._outgoing._peers) < 5


async def test_an_instance_that_is_not_served_there_cannot_be_connected() -> None:
    async with pair() as world:
        instance = evolve(Instance.of(EndpointId.parse(WHERE), 1), transport=world.worker.transport)
        with pytest.raises(CannotConnect, match="ns/comp/ep/1 is not served here"):
            await answer(world.caller.engine(instance, KIND))


# -- another process at the address


@asynccontextmanager
async def successor(world: Pair) -> AsyncIterator[TcpRequestPlane]:
    """The next process at the worker's address, once the worker is gone."""
    port = _worker_address(world).port
    await world.worker.close()
    plane = TcpRequestPlane(world.scheduler, evolve(OPTIONS, port=port), network=world.network)
    await plane.open()
    yield plane
    await plane.close()


async def test_a_process_that_took_the_address_of_another_gets_no_call_of_its_instances() -> None:
    local = ScriptedEngine([2])
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1]))
        assert await answer(engine) == [1]
        async with successor(world) as plane:
            same, _ = await plane.serve(Instance.of(EndpointId.parse(WHERE), 1), local)
            assert same.transport["tcp"] == world.worker.transport["tcp"]
            for _ in range(3):
                with pytest.raises(CannotConnect, match="another process is there now"):
                    await answer(engine)
                await anyio.sleep(1)
            assert local.requests == []
            assert world.network.links == [], "it has no connection that nobody uses"
            assert await answer(world.caller.engine(same, KIND)) == [2]


async def test_processes_one_after_another_at_an_address_have_their_own_state() -> None:
    async with pair() as world:
        old = evolve(Instance.of(EndpointId.parse(WHERE), 1), transport=world.worker.transport)
        gone = world.caller.keep_connected(old, bool)
        await settled()
        assert gone.state == "connected"
        async with successor(world) as plane:
            present = world.caller.keep_connected(evolve(old, transport=plane.transport), bool)
            await anyio.sleep(1)
            assert (gone.state, present.state) == ("unreachable", "connected")
            dialled = world.network.dialled
            await anyio.sleep(60)
            assert 10 <= world.network.dialled - dialled <= 14, "it is tried as one that refuses"
            assert (gone.state, present.state, present.losses) == ("unreachable", "connected", 0)


async def test_of_two_addresses_the_one_with_the_process_is_taken() -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1]))
        other = TcpRequestPlane(world.scheduler, OPTIONS, network=world.network)
        path = Address(path="/run/reused")
        listener = await world.network.listen(path, other._accept)
        transport = {**world.worker.transport, "unix": path.path, "host": machine_id()}
        instance = evolve(Instance.of(EndpointId.parse(WHERE), 1), transport=transport)
        assert await answer(world.caller.engine(instance, KIND)) == await answer(engine) == [1]
        await listener.close()
        await other.close()


async def test_where_either_is_not_named_any_process_at_the_address_will_do() -> None:
    async with pair() as world:
        named, _ = await world.worker.serve(Instance.of(EndpointId.parse(WHERE), 1), ScriptedEngine([1]))
        unnamed = evolve(named, transport={"tcp": named.transport["tcp"]})
        assert await answer(world.caller.engine(unnamed, KIND)) == [1]
        peer = RawPeer()
        listener = await world.network.listen(Address("raw"), lambda: peer)
        elsewhere = evolve(named, transport={"tcp": str(listener.address), "process": "any"})
        kept = world.caller.keep_connected(elsewhere, bool)
        await proves_itself(peer)
        assert kept.state == "connected", "a version that states no name"
        await listener.close()


async def test_a_closed_plane_makes_no_connection() -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1]))
        await world.caller.close()
        with pytest.raises(CannotConnect, match="closed"):
            await answer(engine)


async def test_a_connection_that_is_made_while_its_plane_closes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as world, anyio.create_task_group() as tasks:
        _, engine = await world.serve(ScriptedEngine([1]))
        dial = world.network.dial

        async def dial_and_come_late(address: Address, handler: LinkHandler) -> None:
            await dial(address, handler)
            with anyio.CancelScope(shield=True):  # the link is there, and it is not yet the turn of the attempt's task
                await anyio.sleep(1)

        monkeypatch.setattr(world.network, "dial", dial_and_come_late)
        tasks.start_soon(_raises_cannot_connect, engine)
        await anyio.sleep(0.5)
        await world.caller.close()
        await anyio.sleep(1)
        assert world.network.links == []


async def _raises_cannot_connect(engine: AsyncEngine[Any, Any]) -> None:
    with pytest.raises(CannotConnect):
        await answer(engine)


async def test_a_caller_that_arrives_while_the_plane_closes_is_sent_away() -> None:
    async with pair() as world:
        address, peer = _worker_address(world), RawPeer()
        listener = world.network.listeners[address]
        await world.worker.close()
        world.network.listeners[address] = listener  # the system accepted the connection before
        await world.network.dial(address, peer)
        await settled()
        assert (peer.has_ended, peer.received_bytes) == (True, b"")
        assert world.worker._incoming == set()


# -- heartbeat


async def test_a_half_open_connection_is_noticed_by_both_sides(open_streams: OpenStreams) -> None:
    local = ScriptedEngine([1, Stall()])
    async with pair() as world:
        serving, engine = await world.serve(local)
        async with await engine.generate(Context(None)) as stream:
            assert await stream.__anext__() == 1
            start = anyio.current_time()
            world.network.freeze()
            with pytest.raises(Disconnected, match="silent"):
                await stream.__anext__()
            waited_s = anyio.current_time() - start
            assert OPTIONS.lost_after_s - OPTIONS.heartbeat_s <= waited_s <= OPTIONS.lost_after_s + OPTIONS.heartbeat_s
        await anyio.sleep(OPTIONS.heartbeat_s)
        assert (serving.running, local.open, world.network.links) == (0, 0, [])


async def test_a_silent_connection_that_answers_is_kept() -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([Wait(1000), 1]))
        assert await answer(engine) == [1]
        assert world.network.dialled == 1


async def test_a_side_that_says_it_will_be_silent_for_longer_is_kept() -> None:
    async with pair(evolve(OPTIONS, heartbeat_s=50, lost_after_s=200), OPTIONS) as world:
        _, engine = await world.serve(ScriptedEngine([Wait(1000), 1]))
        assert await answer(engine) == [1]
        assert world.network.dialled == 1


async def test_a_slow_transfer_is_no_silence() -> None:
    async with pair() as world:
        world.network.bytes_per_s = 1000
        _, engine = await world.serve(ScriptedEngine(lambda payload: [len(payload)]))
        assert await answer(engine, "a" * 100_000) == [100_000]
        assert anyio.current_time() > 90


# -- who is let in


@pytest.mark.parametrize(("worker", "caller"), [("secret", "secret"), ("", "")])
async def test_sides_with_one_token_connect(worker: str, caller: str) -> None:
    async with pair(evolve(OPTIONS, token=worker), evolve(OPTIONS, token=caller)) as world:
        assert await answer((await world.serve(ScriptedEngine([1])))[1]) == [1]


@pytest.mark.parametrize(("worker", "caller"), [("secret", "other"), ("secret", ""), ("", "secret")])
async def test_without_the_token_no_call_is_taken(worker: str, caller: str, caplog: pytest.LogCaptureFixture) -> None:
    local = ScriptedEngine([1])
    async with pair(evolve(OPTIONS, token=worker), evolve(OPTIONS, token=caller)) as world:
        _, engine = await world.serve(local)
        with pytest.raises(CannotConnect, match="does not know the token"):
            await answer(engine)
    assert local.requests == []
    assert "does not know the token" in caplog.text
    assert "secret" not in caplog.text


async def test_the_token_is_never_sent_and_not_proved_to_those_without_it() -> None:
    async with pair(TOKEN) as world:
        peer = await raw_caller(world, "wrong")
        assert peer.kinds() == [framing.HELLO, framing.ERROR]
        assert peer.has_ended
        assert b"secret" not in peer.received_bytes
        right = await raw_caller(world, "secret")
        assert right.kinds() == [framing.HELLO, framing.PROOF]
        assert b"secret" not in right.received_bytes


async def test_a_proof_serves_one_connection_and_one_side_only() -> None:
    async with pair(TOKEN) as world:
        first = await raw_caller(world, "secret")
        replayed = RawPeer()
        await world.network.dial(_worker_address(world), replayed)
        replayed.send(hello())
        await settled()
        replayed.send(proof(first, "secret"))
        await settled()
        assert replayed.kinds()[-1] == framing.ERROR
        mirrored = RawPeer()
        await world.network.dial(_worker_address(world), mirrored)
        mirrored.send(hello())
        await settled()
        mirrored.send(proof(mirrored, "secret", is_caller=False))
        await settled()
        assert mirrored.kinds()[-1] == framing.ERROR


def _worker_address(world: Pair) -> Address:
    return Address.parse(world.worker.transport["tcp"])


async def test_a_worker_without_the_token_gets_no_call() -> None:
    peers: list[RawPeer] = []

    def accept() -> RawPeer:
        peers.append(RawPeer())
        peers[-1].send(hello())
        return peers[-1]

    async with pair(TOKEN) as world, raw_worker(world, accept) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(_expect_no_token, engine)
        await settled()
        peers[0].send(proof(peers[0], "wrong", is_caller=False))
        await settled()
        assert peers[0].kinds() == [framing.HELLO, framing.PROOF, framing.ERROR]


async def _expect_no_token(engine: AsyncEngine[Any, Any]) -> None:
    with pytest.raises(CannotConnect, match="does not know the token"):
        await engine.generate(Context("secret payload"))


@pytest.mark.parametrize("version", [0, 2, 2**40])
async def test_another_version_is_named_to_both_sides(version: int, caplog: pytest.LogCaptureFixture) -> None:
    async with pair() as world:
        peer = await raw_caller(world, version=version)
        assert peer.kinds() == [framing.HELLO, framing.ERROR]
        assert f"speaks version {version}" in peer.frames()[1][2].decode(errors="replace")
        assert f"speaks version {version} of the request plane, this process version 1" in caplog.text


async def test_a_side_that_proves_nothing_in_time_is_disconnected() -> None:
    async with pair() as world:
        silent, talks = RawPeer(), RawPeer()
        for peer in (silent, talks):
            await world.network.dial(_worker_address(world), peer)
        talks.send(hello())
        await anyio.sleep(OPTIONS.connect_timeout_s + 0.1)
        assert silent.has_ended
        assert talks.has_ended


async def test_a_long_frame_is_not_taken_from_a_side_that_has_proved_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with pair() as world:
        peer = RawPeer()
        await world.network.dial(_worker_address(world), peer)
        peer.send(hello(more="a" * 1024)[:100])
        await settled()
        assert peer.has_ended
        assert "MessageTooLarge" in caplog.text


async def test_few_may_be_there_without_having_proved_anything() -> None:
    async with pair() as world:
        peers = [RawPeer() for _ in range(300)]
        for peer in peers:
            await world.network.dial(_worker_address(world), peer)
        await settled()
        assert sum(peer.has_ended for peer in peers) == 300 - 256
        await anyio.sleep(OPTIONS.connect_timeout_s + 0.1)
        assert all(peer.has_ended for peer in peers)
        assert await answer((await world.serve(ScriptedEngine([1])))[1]) == [1]


async def test_faults_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with pair() as world:
        for _ in range(50):
            peer = RawPeer()
            await world.network.dial(_worker_address(world), peer)
            peer.send(b"GET / HTTP/1.1\r\n\r\n")
            await settled()
            assert peer.has_ended
        assert len(caplog.records) == 10
        await anyio.sleep(11)
        await raw_caller(world, version=7)
        assert "40 more such warnings" in caplog.text
