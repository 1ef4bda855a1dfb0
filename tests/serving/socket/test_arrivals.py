"""Arrivals: a few requests begin in each turn of the loop, in their order, and none is forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from serving.socket.arrivals import REQUEST_BYTES, TURN_BYTES, Arrivals
from serving.socket.connections import Message, Receive, Send
from serving.socket.cycle import Cycle
from serving.socket.http1 import Head
from tests.serving.socket.test_cycle import Written
from tests.serving.socket.worlds import GET, serve

A_TURN = TURN_BYTES // REQUEST_BYTES
"""How many requests without a body begin in a turn."""


async def turns_of(bodies_bytes: list[int]) -> list[list[int]]:
    """Return which requests begin in each turn, when all come in one."""
    arrivals, waiting = Arrivals(), dict[int, asyncio.Future[None]]()
    for index, body_bytes in enumerate(bodies_bytes):
        if (turn := arrivals.enter(body_bytes)) is not None:
            waiting[index] = turn
    turns = [[index for index in range(len(bodies_bytes)) if index not in waiting]]
    while waiting:
        await checkpoint()
        turns.append([index for index, turn in waiting.items() if turn.done()])
        waiting = {index: turn for index, turn in waiting.items() if not turn.done()}
    return turns


async def test_requests_that_come_together_begin_a_few_in_each_turn_in_their_order() -> None:
    arrivals = Arrivals()
    waiting = [turn for _ in range(A_TURN * 2 + 3) if (turn := arrivals.enter(0)) is not None]
    assert len(waiting) == A_TURN + 3
    for begun in (A_TURN, A_TURN + 3):
        await checkpoint()
        assert [turn.done() for turn in waiting] == [index < begun for index in range(len(waiting))]
    await checkpoint()
    assert arrivals.enter(0) is None


@given(bodies_bytes=st.lists(st.integers(0, 3 * TURN_BYTES), max_size=60))
async def test_a_turn_ends_with_the_request_that_reaches_its_bytes(bodies_bytes: list[int]) -> None:
    turns = await turns_of(bodies_bytes)
    assert [index for turn in turns for index in turn] == list(range(len(bodies_bytes)))
    sizes = [[REQUEST_BYTES + bodies_bytes[index] for index in turn] for turn in turns]
    assert all(sum(turn[:-1]) < TURN_BYTES for turn in sizes)
    assert all(sum(turn) >= TURN_BYTES for turn in sizes[:-1])


async def test_a_request_that_was_cancelled_while_it_waited_takes_the_place_of_none() -> None:
    arrivals = Arrivals()
    waiting = [turn for _ in range(A_TURN * 2 + 1) if (turn := arrivals.enter(0)) is not None]
    waiting[0].cancel()
    await checkpoint()
    assert all(turn.done() for turn in waiting)
    assert [turn.cancelled() for turn in waiting].count(True) == 1


async def test_when_all_that_waited_were_cancelled_the_next_begins_at_once() -> None:
    arrivals = Arrivals()
    waiting = [turn for _ in range(A_TURN + 4) if (turn := arrivals.enter(0)) is not None]
    for turn in waiting:
        turn.cancel()
    await checkpoint()
    assert arrivals.enter(0) is None


async def test_a_request_cancelled_before_its_turn_never_reaches_the_app_and_ends_its_connection() -> None:
    reached = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        reached.append(scope)

    channel, arrivals = Written(), Arrivals()
    task = asyncio.get_running_loop().create_task(Cycle(Head("1.1", keep_alive=True), channel).run(app, arrivals))
    arrivals.enter(TURN_BYTES)
    await checkpoint()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (reached, channel.was_broken) == ([], True)


async def test_an_app_sees_that_its_client_left_before_the_turn_of_its_request() -> None:
    seen = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        seen.append((await receive())["type"])

    arrivals, cycle = Arrivals(), Cycle(Head("1.1", keep_alive=True, length_bytes=2), Written())
    task = asyncio.get_running_loop().create_task(cycle.run(app, arrivals))
    arrivals.enter(TURN_BYTES)
    cycle.leave(is_gone=True)
    await task
    assert seen == ["http.disconnect"]


async def test_all_requests_of_a_crowd_are_answered_and_no_turn_begins_too_many() -> None:
    began: Counter[int] = Counter()
    turn = 0

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        began[turn] += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await checkpoint()

    async with serve(app) as served, anyio.create_task_group() as tasks:
        clients = [await served.connect() for _ in range(A_TURN * 4)]
        tasks.start_soon(count_turns)
        for client in clients:
            client.writer.write(GET)
        assert [(await client.answer()).status for client in clients] == [200] * len(clients)
        tasks.cancel_scope.cancel()
    assert began.total() == A_TURN * 4
    assert max(began.values()) <= A_TURN * 2  # a turn is counted in its middle
