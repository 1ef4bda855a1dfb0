"""Connections that are kept ahead of calls: opened, refused, lost, opened again, and given up."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import anyio
import pytest
from attrs import define, evolve, field

from pipeline import CannotConnect, Context, Disconnected
from pipeline.network.names import EndpointId, Instance
from pipeline.network.requests import KeptConnection
from pipeline.network.tcp import Address
from pipeline.testing import ScriptedEngine, Stall
from tests.pipeline.network.memory_network import MemoryListener
from tests.pipeline.network.tcp.worlds import OPTIONS, Pair, RawPeer, pair, settled
from tests.pipeline.network.worlds import WHERE


@define(eq=False)
class Watched:
    """A kept connection to the worker of a pair, and its states, with the second in which each began."""

    world: Pair
    begun_s: float = field(factory=anyio.current_time)
    states: list[tuple[float, str]] = field(factory=list)
    kept: KeptConnection = field(init=False)

    def __attrs_post_init__(self) -> None:
        instance = evolve(Instance.of(EndpointId.parse(WHERE), 1), transport=self.world.worker.transport)
        self.kept = self.world.caller.keep_connected(instance, self._note)
        self._note()

    @property
    def now(self) -> str:
        """The state now."""
        return self.kept.state

    def _note(self) -> None:
        if hasattr(self, "kept") and (not self.states or self.states[-1][1] != self.kept.state):
            self.states.append((round(anyio.current_time() - self.begun_s, 3), self.kept.state))


def refuse(world: Pair) -> MemoryListener:
    """Have the worker's address refuse connections from now on, and return what `accept` takes."""
    return world.network.listeners.pop(Address.parse(world.worker.transport["tcp"]))


def accept(world: Pair, listener: MemoryListener) -> None:
    """Have the address accept connections again."""
    world.network.listeners[listener.address] = listener


async def test_a_kept_connection_is_there_before_the_first_call_which_uses_it() -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1]))
        watched = Watched(world)
        assert watched.now == "connecting"
        await settled()
        assert watched.now == "connected"
        assert await (await engine.generate(Context(None))).collect() == [1]
        assert (world.network.dialled, watched.kept.losses) == (1, 0)


async def test_all_that_keep_a_connection_to_one_process_share_it() -> None:
    async with pair() as world:
        several = [Watched(world) for _ in range(3)]
        await settled()
        assert [each.kept.state for each in several] == ["connected"] * 3
        world.network.cut()
        assert [(each.kept.state, each.kept.losses) for each in several] == [("connecting", 1)] * 3
        await anyio.sleep(0.1)
        assert [each.kept.state for each in several] == ["connected"] * 3
        assert len(world.network.links) == 2


async def test_a_process_that_refuses_is_tried_again_ever_later() -> None:
    async with pair() as world:
        listener, watched = refuse(world), Watched(world)
        tries = list[float]()
        while anyio.current_time() - watched.begun_s < 25:
            before = world.network.dialled
            await anyio.sleep(0.01)
            if world.network.dialled > before:
                tries.append(anyio.current_time() - watched.begun_s)
        assert watched.states == [(0.0, "connecting"), (0.0, "unreachable")]
        pauses = [after - before for before, after in pairwise(tries)]
        assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0], abs=0.02)
        accept(world, listener)
        await anyio.sleep(5.1)
        assert watched.now == "connected"


async def test_a_process_is_tried_at_once_when_there_is_reason_to() -> None:
    """The next attempt would be made seconds later. However often it is asked for, there are two in a second."""
    async with pair() as world:
        listener, watched = refuse(world), Watched(world)
        await anyio.sleep(8)
        before = world.network.dialled
        for _ in range(100):
            watched.kept.retry()
            await anyio.sleep(0.01)
        assert world.network.dialled - before == 2
        accept(world, listener)
        await anyio.sleep(0.5)
        watched.kept.retry()
        await settled()
        assert watched.now == "connected"
        watched.kept.retry()
        await settled()
        assert len(world.network.links) == 2


async def test_a_process_that_is_announced_anew_is_tried_at_once() -> None:
    async with pair() as world:
        listener, watched = refuse(world), Watched(world)
        await anyio.sleep(8)
        accept(world, listener)
        Watched(world)  # its next life, say, while the one before is announced still
        await settled()
        assert watched.now == "connected"


async def test_a_process_whose_connections_end_at_once_is_not_tried_faster_for_that() -> None:
    async with pair() as world:
        watched = Watched(world)
        await settled()
        before = world.network.dialled
        for _ in range(1000):
            world.network.cut()
            watched.kept.retry()
            await anyio.sleep(0.01)
        assert world.network.dialled - before < 10 / 0.5 + 5


async def test_a_worker_that_accepts_late_is_not_lost_for_long() -> None:
    async with pair() as world:
        listener, watched = refuse(world), Watched(world)
        await anyio.sleep(0.3)
        accept(world, listener)
        await anyio.sleep(0.5)
        assert watched.now == "connected"


async def test_a_call_is_no_pause_longer_than_without_a_kept_connection() -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1]))
        listener, watched = refuse(world), Watched(world)
        await anyio.sleep(8)  # the next attempt is seconds away
        accept(world, listener)
        assert watched.now == "unreachable"
        assert await (await engine.generate(Context(None))).collect() == [1]
        assert watched.now == "connected"


async def test_a_process_that_does_not_answer_is_unreachable_until_it_does() -> None:
    async with pair() as world:
        world.network.delay_s = 0.6
        watched = Watched(world)
        await anyio.sleep(10)
        assert [state for _, state in watched.states] == ["connecting", "unreachable", "connected"]
        assert watched.states[1][0] == 0.5


async def test_a_half_open_connection_is_lost_and_what_does_not_answer_is_left_out() -> None:
    async with pair() as world:
        watched = Watched(world)
        await settled()
        world.network.freeze()
        world.network.is_reachable = False
        await anyio.sleep(OPTIONS.lost_after_s + OPTIONS.heartbeat_s + 10)
        assert [state for _, state in watched.states] == ["connecting", "connected", "connecting", "unreachable"]
        lost_s, out_s = watched.states[2][0], watched.states[3][0]
        assert OPTIONS.lost_after_s <= lost_s <= OPTIONS.lost_after_s + OPTIONS.heartbeat_s
        assert out_s == pytest.approx(lost_s + 0.5)
        world.network.is_reachable = True
        await anyio.sleep(OPTIONS.connect_timeout_s + 5)
        assert watched.now == "connected"


async def test_a_connection_that_had_lasted_is_made_again_at_once() -> None:
    async with pair() as world:
        watched = Watched(world)
        await anyio.sleep(60)
        world.network.cut()
        assert watched.now == "connecting"
        await settled()
        assert (watched.now, watched.kept.losses) == ("connected", 1)


async def test_a_process_whose_connections_end_at_once_is_tried_ever_later() -> None:
    async with pair() as world:
        watched = Watched(world)
        for _ in range(2000):
            await anyio.sleep(0.01)
            world.network.cut()
        assert 5 <= world.network.dialled <= 12
        await anyio.sleep(11)
        assert watched.now == "connected"
        world.network.cut()
        await settled()
        assert watched.now == "connected", "a connection that lasted begins anew"


async def test_losses_are_counted_before_the_calls_see_them() -> None:
    seen = list[int]()
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1, Stall()]))
        watched = Watched(world)
        async with await engine.generate(Context(None)) as stream:
            assert await stream.__anext__() == 1
            world.network.cut()
            seen.append(watched.kept.losses)
            await settled()
            with pytest.raises(Disconnected):
                await stream.__anext__()
        assert seen == [1]


@pytest.mark.parametrize("transport", [{}, {"tcp": "nowhere"}])
async def test_an_instance_without_an_address_is_unreachable(transport: dict[str, str]) -> None:
    async with pair() as world:
        instance = evolve(Instance.of(EndpointId.parse(WHERE), 1), transport=transport)
        kept = world.caller.keep_connected(instance, lambda: None)
        assert (kept.state, kept.losses) == ("unreachable", 0)
        kept.close()


# -- the end of it


async def test_a_connection_that_is_no_longer_kept_stays_and_is_not_made_again() -> None:
    async with pair() as world:
        watched = Watched(world)
        await settled()
        watched.kept.close()
        watched.kept.close()
        assert len(world.network.links) == 2
        world.network.cut()
        await anyio.sleep(60)
        assert (world.network.dialled, world.network.links) == (1, [])


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
async def test_an_attempt_that_nothing_wants_any_more_leaves_nothing_open(after_s: float) -> None:
    async with pair() as world:
        world.network.delay_s = 0.1
        watched = Watched(world)
        await anyio.sleep(after_s)
        is_connected = watched.now == "connected"
        watched.kept.close()
        await anyio.sleep(5)
        assert len(world.network.links) == (2 if is_connected else 0)
        assert world.network.dialled <= 1


async def test_an_attempt_that_a_call_waits_for_goes_on_when_it_is_no_longer_kept() -> None:
    async with pair() as world, anyio.create_task_group() as tasks:
        _, engine = await world.serve(ScriptedEngine([1]))
        world.network.delay_s = 0.1
        watched, answers = Watched(world), list[Any]()

        async def call() -> None:
            answers.extend(await (await engine.generate(Context(None))).collect())

        tasks.start_soon(call)
        await anyio.sleep(0.05)
        watched.kept.close()
        await anyio.sleep(5)
        assert answers == [1]
        assert world.network.dialled == 1


async def test_an_attempt_given_up_and_wanted_again_is_made_again_at_once() -> None:
    async with pair() as world:
        world.network.delay_s = 0.1
        first = Watched(world)
        await anyio.sleep(0.05)
        first.kept.close()
        again = Watched(world)
        await anyio.sleep(1)
        assert again.states == [(0.0, "connecting"), (pytest.approx(0.4), "connected")]


async def test_a_process_that_refuses_is_left_alone_when_no_longer_kept() -> None:
    async with pair() as world:
        refuse(world)
        watched = Watched(world)
        await anyio.sleep(1)
        watched.kept.close()
        dialled = world.network.dialled
        await anyio.sleep(60)
        assert world.network.dialled == dialled


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.15, 0.25, 1.0])
async def test_a_plane_that_is_closed_makes_no_more_attempts(after_s: float) -> None:
    async with pair() as world:
        world.network.delay_s = 0.1
        watched = Watched(world)
        await anyio.sleep(after_s)
        await world.caller.close()
        dialled = world.network.dialled
        await anyio.sleep(60)
        assert (world.network.dialled, world.network.links) == (dialled, [])
        watched.kept.close()
        with pytest.raises(CannotConnect, match="closed"):
            await (await world.serve(ScriptedEngine([1])))[1].generate(Context(None))


async def test_an_outage_is_logged_once_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with pair() as world:
        watched = Watched(world)
        await anyio.sleep(10)
        listener = refuse(world)
        world.network.cut()
        await anyio.sleep(60)
        accept(world, listener)
        await anyio.sleep(6)
        assert watched.now == "connected"
    lines = [record.message for record in caplog.records if "reach" in record.message]
    assert len(lines) == 2
    assert "cannot be reached" in lines[0]
    assert "nothing listens" in lines[0]
    assert "can be reached again" in lines[1]


async def test_peers_that_accept_and_say_nothing_are_unreachable() -> None:
    peers = list[RawPeer]()

    def silent() -> RawPeer:
        peers.append(RawPeer())
        return peers[-1]

    async with pair() as world:
        listener = await world.network.listen(Address("raw"), silent)
        instance = evolve(Instance.of(EndpointId.parse(WHERE), 9), transport={"tcp": str(listener.address)})
        kept = world.caller.keep_connected(instance, lambda: None)
        await anyio.sleep(0.6)
        assert kept.state == "unreachable"
        await anyio.sleep(OPTIONS.connect_timeout_s + 1)
        assert kept.state == "unreachable"
        assert len(peers) == 2
        kept.close()
        await listener.close()
