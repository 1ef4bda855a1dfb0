"""The sending half of a stream: when frames leave, in how many writes, and who waits for whom."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.http.event_writer import BUFFER_BYTES, EventWriter

pytestmark = pytest.mark.anyio


class Client:
    """Takes what is sent; `breaks_after` writes it is gone."""

    def __init__(self, breaks_after: int | None = None) -> None:
        self.messages: list[MutableMapping[str, Any]] = []
        self.breaks_after = breaks_after
        self.gone = 0

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self.breaks_after is not None and len(self.messages) >= self.breaks_after:
            raise OSError("gone")
        self.messages.append(message)

    @property
    def writes(self) -> list[bytes]:
        return [message["body"] for message in self.messages if "body" in message]

    def writer(self, keep_alive_s: float | None = None) -> EventWriter:
        return EventWriter(self.send, [(b"a", b"b")], self._lose, keep_alive_s)

    def _lose(self) -> None:
        self.gone += 1


async def test_frames_that_are_there_together_leave_in_one_write() -> None:
    client = Client()
    writer = client.writer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        for frame in (b"1", b"2", b"3"):
            writer.put(frame)
        writer.commit()
        writer.finish()
    assert client.writes == [b"123"]


async def test_a_frame_that_is_alone_leaves_at_once() -> None:
    client = Client()
    writer = client.writer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        writer.commit()
        for frame in (b"1", b"2", b"3"):
            writer.put(frame)
            await anyio.wait_all_tasks_blocked()
        writer.finish()
    assert client.writes == [b"1", b"2", b"3", b""]
    assert [message.get("more_body") for message in client.messages] == [None, True, True, True, False]


async def test_nothing_is_sent_before_the_commit() -> None:
    client = Client()
    writer = client.writer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        writer.put(b"1")
        await anyio.sleep(10)
        assert client.messages == []
        writer.commit()
        writer.finish()
    assert client.messages[0] == {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
    assert client.writes == [b"1"]


async def test_without_a_commit_nothing_is_ever_sent() -> None:
    client = Client()
    writer = client.writer()
    writer.put(b"1")
    writer.finish()
    assert not await writer.run()
    assert client.messages == []


async def test_a_full_buffer_makes_the_reader_wait() -> None:
    client = Client()
    writer = client.writer()
    assert not writer.put(b"x")
    assert writer.put(b"x" * BUFFER_BYTES)
    waited = False

    async def read() -> None:
        nonlocal waited
        await writer.room()
        waited = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        assert not waited
        writer.commit()
        await anyio.wait_all_tasks_blocked()
        assert waited
        writer.finish()


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_a_client_that_breaks_off_is_noticed_once_and_nobody_waits(after: int) -> None:
    client = Client(breaks_after=after)
    writer = client.writer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        writer.commit()
        for _ in range(4):
            writer.put(b"x" * BUFFER_BYTES)
            with anyio.fail_after(1):
                await writer.room()
        writer.finish()
    assert client.gone == 1


async def test_comments_are_sent_only_while_there_is_nothing_else() -> None:
    client = Client()
    writer = client.writer(keep_alive_s=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        await anyio.sleep(2.5)
        assert writer.committed
        for _ in range(10):
            writer.put(b"x")
            await anyio.sleep(0.9)
        writer.finish()
    assert b"".join(client.writes) == b":\n\n:\n\n" + b"x" * 10


@given(st.lists(st.tuples(st.binary(max_size=20_000), st.booleans()), max_size=10))
def test_whatever_the_pace_all_frames_arrive_in_order(steps: list[tuple[bytes, bool]]) -> None:
    client = Client()

    async def main() -> None:
        writer = client.writer()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            writer.commit()
            for frame, pause in steps:
                writer.put(frame)
                await writer.room()
                if pause:
                    await anyio.wait_all_tasks_blocked()
            writer.finish()

    anyio.run(main)
    assert b"".join(client.writes) == b"".join(frame for frame, _ in steps)
    assert client.messages[-1]["more_body"] is False
