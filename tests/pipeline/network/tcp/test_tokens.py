"""Offered tokens between processes: those of one turn are one frame, and each stream gets its own in order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from threading import Thread
from typing import Any

import anyio
import msgspec
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Annotated, AsyncEngine, Context, Disconnected, Gate, PenstockError, ResponseStream, Take
from pipeline.network.tcp import framing
from pipeline.protocols import FinishReason, LLMEngineOutput
from pipeline.protocols.field_rules import U32_MAX
from pipeline.testing import OpenStreams
from pipeline.wire import items_of_token, stream_tokens_from_msgpack, stream_tokens_to_msgpack
from tests.pipeline.network.tcp.worlds import CALL_HEAD, OPTIONS, Pair, frame, pair, raw_caller, settled

Item = Annotated[LLMEngineOutput]
KIND: Any = Item
PAUSE = ["pause"]
"""A step in which all that was sent arrives."""
LAST = ["last"]
"""A step that yields the end of the answer."""


def offer(*token_ids: Any) -> list[Any]:
    """A step that offers these tokens, as a scheduler does in one turn, and yields those that are not taken."""
    return ["offer", *token_ids]


def give(*token_ids: int) -> list[Any]:
    """A step that yields an item of these tokens."""
    return ["give", *token_ids]


def fed(token_id: int) -> tuple[str, list[int]]:
    """A token that was taken."""
    return "fed", [token_id]


def read(*token_ids: int) -> tuple[str, list[int]]:
    """An item that was read."""
    return "read", list(token_ids)


class OfferingStream(ResponseStream[Item]):
    """Follows the steps of the payload."""

    def __init__(self, request: Context[Any]) -> None:
        super().__init__(self._items(request.payload), request)
        self._offer: Take = lambda *_: False
        self._gate = Gate()

    def feed(self, take: Take, gate: Gate) -> bool:
        self._offer, self._gate = take, gate
        return True

    async def _items(self, steps: list[Any]) -> AsyncGenerator[Item, None]:
        for what, *token_ids in steps:
            if what == "pause":
                await anyio.sleep(0.1)
            elif what == "last":
                yield Annotated(LLMEngineOutput([], finish_reason=FinishReason.STOP))
            elif what == "offer of a choice":
                assert self._offer(token_ids[0], 3)
            elif what == "give":
                yield Annotated(LLMEngineOutput(token_ids))
            else:
                for token_id in token_ids:
                    if not (self._gate.is_open and self._offer(token_id, None)):
                        yield Annotated(LLMEngineOutput([token_id]))


class OfferingEngine(AsyncEngine[Any, Item]):
    """An engine whose tokens are offered as the payload has it."""

    async def generate(self, request: Context[Any]) -> ResponseStream[Item]:
        return OfferingStream(request)


class Client:
    """Reads an answer to its end, and is fed with what may be taken."""

    def __init__(self, *, is_fed: bool = True) -> None:
        self.is_fed, self.gate = is_fed, Gate()
        self.seen: list[tuple[str, list[int]]] = []
        self.error: Exception | None = None
        self.on_take: Callable[[], object] = lambda: None
        self.index: int | None = None
        """Of the choice whose tokens are expected."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens, whichever way they came."""
        return [token_id for _, token_ids in self.seen for token_id in token_ids]

    def take(self, token_id: int, index: int | None) -> bool:
        assert index == self.index
        self.seen.append(("fed", [token_id]))
        self.on_take()
        return True

    async def read(self, engine: AsyncEngine[Any, Any], steps: list[Any], context: Context[Any] | None = None) -> None:
        try:
            async with await engine.generate(context or Context(steps)) as stream:
                if self.is_fed:
                    assert stream.feed(self.take, self.gate)
                async for item in stream:
                    self.seen.append(("read", item.data.token_ids))
        except PenstockError as error:
            self.error = error


async def answers(world: Pair, *scripts: list[Any]) -> list[Client]:
    """Return the clients of these answers, which were called together, at their ends."""
    _, engine = await world.serve(OfferingEngine(), KIND)
    clients = [Client() for _ in scripts]
    async with anyio.create_task_group() as tasks:
        for client, steps in zip(clients, scripts, strict=True):
            tasks.start_soon(client.read, engine, steps)
    await settled()
    assert (world.caller.open_calls, world.worker.open_calls) == (0, 0)
    return clients


def tokens_of(body: bytes) -> list[tuple[int, int]]:
    return list(stream_tokens_from_msgpack(body))


async def test_tokens_of_several_streams_in_one_turn_are_one_frame(open_streams: OpenStreams) -> None:
    steps = [give(1), PAUSE, offer(2), PAUSE, offer(3), PAUSE, LAST]
    async with pair() as world:
        await world.serve(OfferingEngine())
        peer = await raw_caller(world, window_items=10)
        head = CALL_HEAD | {"payload": steps, "has_short_items": True}
        peer.send(*(frame(framing.CALL, stream, head) for stream in (1, 2, 3)))
        await anyio.sleep(1)
        frames = [(stream, sorted(tokens_of(body))) for kind, stream, body in peer.frames() if kind == framing.TOKENS]
        assert frames == [(0, [(1, token), (2, token), (3, token)]) for token in (2, 3)]
        assert peer.kinds().count(framing.END) == 3


async def test_a_frame_of_many_tokens_is_no_longer_than_a_caller_takes(open_streams: OpenStreams) -> None:
    count = 20_000
    async with pair() as world:
        await world.serve(OfferingEngine())
        peer = await raw_caller(world, window_items=10**6, message_limit_bytes=1000)
        head = CALL_HEAD | {"payload": [give(U32_MAX), PAUSE, offer(*range(U32_MAX - count, U32_MAX)), PAUSE, LAST]}
        peer.send(frame(framing.CALL, 1, head | {"has_short_items": True}))
        await anyio.sleep(1)
        bodies = [body for kind, _, body in peer.frames() if kind == framing.TOKENS]
        assert max(map(len, bodies)) <= framing.HEADROOM_BYTES
        assert [token_id for body in bodies for _, token_id in tokens_of(body)] == list(range(U32_MAX - count, U32_MAX))


@pytest.mark.parametrize("has_short_items", [None, False])
async def test_a_caller_that_does_not_ask_for_them_gets_no_tokens_of_others(has_short_items: bool | None) -> None:
    head = CALL_HEAD | {"payload": [give(1), PAUSE, offer(2), PAUSE, LAST]}
    async with pair() as world:
        await world.serve(OfferingEngine())
        peer = await raw_caller(world)
        peer.send(frame(framing.CALL, 1, head if has_short_items is None else head | {"has_short_items": False}))
        await anyio.sleep(1)
        assert peer.kinds()[2:] == [framing.BEGUN, framing.ITEMS, framing.ITEMS, framing.ITEMS, framing.END]


async def test_lone_tokens_are_fed_and_those_that_came_with_others_are_read_in_order(open_streams: OpenStreams) -> None:
    script = [
        PAUSE, offer(1), PAUSE, offer(2), PAUSE, offer(3, 4), PAUSE, give(5), offer(6), PAUSE, offer(7), give(8),
        PAUSE, offer(9), PAUSE, offer(10), LAST,
    ]  # fmt: skip
    async with pair() as world:
        (client,) = await answers(world, script)
    assert client.error is None
    assert client.seen == [
        fed(1), fed(2), read(3, 4), read(5, 6), read(7, 8), fed(9), read(10), read(),
    ]  # fmt: skip


async def test_a_token_of_a_numbered_choice_keeps_its_number(open_streams: OpenStreams) -> None:
    async with pair() as world:
        _, engine = await world.serve(OfferingEngine(), KIND)
        client = Client()
        client.index = 3
        await client.read(engine, [PAUSE, ["offer of a choice", 7], PAUSE, LAST])
    assert (client.seen, client.error) == ([fed(7), read()], None)


def kill_in_a_thread(context: Context[Any]) -> None:
    """Kill a request from another thread; its callbacks run on the next turn of the loop."""
    killing = Thread(target=context.kill)
    killing.start()
    killing.join()


@pytest.mark.parametrize("kills", [Context.kill, kill_in_a_thread])
async def test_a_token_that_kills_another_request_is_the_last_of_their_frame(
    kills: Callable[[Context[Any]], None], open_streams: OpenStreams
) -> None:
    contexts = [Context[Any]([PAUSE, offer(1), PAUSE, LAST]) for _ in range(2)]
    clients = [Client(), Client()]
    async with pair() as world:
        _, engine = await world.serve(OfferingEngine(), KIND)
        for number, client in enumerate(clients):
            client.on_take = partial(kills, contexts[1 - number])
        async with anyio.create_task_group() as tasks:
            for client, context in zip(clients, contexts, strict=True):
                tasks.start_soon(client.read, engine, [], context)
        await anyio.sleep(1)
    assert sorted(client.seen for client in clients) == [[], [fed(1), read()]]


async def test_a_token_that_came_before_the_connection_was_lost_is_read_before_the_error() -> None:
    async with pair() as world:
        _, engine = await world.serve(OfferingEngine(), KIND)
        client = Client()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.read, engine, [PAUSE, offer(1), PAUSE, offer(2), PAUSE, PAUSE])
            await anyio.sleep(0.25)
            world.network.cut()
    assert client.seen == [fed(1), fed(2)]
    assert isinstance(client.error, Disconnected)


async def test_a_token_beside_a_broken_frame_is_read_before_the_error() -> None:
    async with pair() as world:
        _, engine = await world.serve(OfferingEngine(), KIND)
        client = Client()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.read, engine, [PAUSE, offer(1), PAUSE, PAUSE])
            await anyio.sleep(0.15)
            worker = world.network.links[1].handler
            worker.put(frame(framing.TOKENS, 0, [1, 2]), frame(99, 0))  # type: ignore[attr-defined]
    assert client.seen == [fed(1), read(2)]
    assert isinstance(client.error, Disconnected)


@pytest.mark.parametrize("token_id", [-1, U32_MAX + 1, 2**63, True, "a", None, 1.5])
async def test_what_is_no_token_id_ends_its_stream_and_no_other(token_id: Any, open_streams: OpenStreams) -> None:
    good = [PAUSE, offer(1), PAUSE, offer(2), PAUSE, offer(3), PAUSE, LAST]
    async with pair() as world:
        wrong, right = await answers(world, [PAUSE, offer(1), PAUSE, offer(token_id), PAUSE, LAST], good)
    assert (right.seen, right.error) == ([fed(1), fed(2), fed(3), read()], None)
    assert isinstance(wrong.error, PenstockError)
    assert wrong.seen == [fed(1)]


async def test_a_worker_sends_tokens_within_the_window_of_each_stream(open_streams: OpenStreams) -> None:
    async with pair(evolve(OPTIONS, window_items=4)) as world:
        await world.serve(OfferingEngine())
        peer = await raw_caller(world, window_items=4)
        steps = [give(0), PAUSE, *(step for each in range(1, 20) for step in (offer(each), PAUSE)), LAST]
        peer.send(frame(framing.CALL, 1, CALL_HEAD | {"payload": steps, "has_short_items": True}))
        await anyio.sleep(10)
        assert peer.kinds().count(framing.TOKENS) == 3, "the first was an item"
        used = sum(len(body) for kind, _, body in peer.frames() if kind == framing.ITEMS)
        peer.send(frame(framing.CREDIT, 1, [4, used]))  # all of it, and not a byte more
        await anyio.sleep(10)
        assert not peer.has_ended
        assert peer.kinds().count(framing.TOKENS) == 6, "one was yielded when there was no room"


u32 = st.integers(0, U32_MAX)


@given(st.lists(st.tuples(u32, u32), min_size=1))
def test_streams_and_tokens_come_out_as_they_went_in(given_tokens: list[tuple[int, int]]) -> None:
    assert tokens_of(stream_tokens_to_msgpack([number for each in given_tokens for number in each])) == given_tokens


@given(u32)
def test_a_token_left_to_the_reader_is_a_list_of_one_short_item(token_id: int) -> None:
    assert msgspec.msgpack.decode(items_of_token(token_id)) == [[[token_id], None]]


token_ids = st.integers(0, U32_MAX)
steps = st.one_of(
    st.just(PAUSE),
    st.lists(token_ids, min_size=1, max_size=3).map(lambda ids: offer(*ids)),
    st.lists(token_ids, min_size=1, max_size=3).map(lambda ids: give(*ids)),
)
scripts = st.lists(st.lists(steps, max_size=12), min_size=1, max_size=4)


@given(scripts, st.integers(1, 5), st.sampled_from([None, 1, 7, 40]), st.randoms(use_true_random=False))
async def test_any_mix_of_steps_brings_each_stream_its_tokens_in_order(
    given_scripts: list[list[Any]], window_items: int, chunk_bytes: int | None, random: Any
) -> None:
    async with pair(evolve(OPTIONS, window_items=window_items)) as world:
        world.network.chunk_bytes, world.network.delay_s = chunk_bytes, random.choice([0.0, 0.03])
        _, engine = await world.serve(OfferingEngine(), KIND)
        clients = [Client(is_fed=random.random() < 0.8) for _ in given_scripts]

        async def shuts_gates() -> None:
            while True:
                for client in clients:
                    client.gate.is_open = random.random() < 0.7
                await anyio.sleep(0.05)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shuts_gates)
            async with anyio.create_task_group() as reads:
                for client, script in zip(clients, given_scripts, strict=True):
                    reads.start_soon(client.read, engine, [*script, LAST])
            tasks.cancel_scope.cancel()
        await settled()
        for client, script in zip(clients, given_scripts, strict=True):
            assert client.error is None
            assert client.token_ids == [token_id for _, *ids in script for token_id in ids]
        assert (world.caller.open_calls, world.worker.open_calls) == (0, 0)


@given(scripts, st.sampled_from(["stop", "kill"]), st.integers(0, 8))
async def test_a_stop_or_kill_at_any_time_leaves_a_beginning_of_each_answer(
    given_scripts: list[list[Any]], how: str, after: int
) -> None:
    async with pair() as world:
        _, engine = await world.serve(OfferingEngine(), KIND)
        clients, contexts = [Client() for _ in given_scripts], [Context[Any]([*each, LAST]) for each in given_scripts]
        async with anyio.create_task_group() as tasks:
            for client, context in zip(clients, contexts, strict=True):
                tasks.start_soon(client.read, engine, [], context)
            await anyio.sleep(0.05 * after)
            getattr(contexts[0], how)()
        await anyio.sleep(2)  # this engine ends a pause in its own time
        for number, (client, script) in enumerate(zip(clients, given_scripts, strict=True)):
            wanted = [token_id for _, *ids in script for token_id in ids]
            assert client.token_ids == (wanted[: len(client.token_ids)] if number == 0 else wanted)
        assert (world.caller.open_calls, world.worker.open_calls) == (0, 0)
