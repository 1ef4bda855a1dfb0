"""The sending half of a stream: when frames leave, in how many writes, and which side waits for the other."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BackendUnknown
from pipeline.protocols import BackendOutput, FinishReason
from serving.http.generation.reply import BUFFER_BYTES, PIECE_BYTES, ReplyWriter, StreamedReply
from serving.http.request import Headers, RequestRecord
from serving.http.side_task import SideTask, Work, task_starter
from serving.openai import AnswerForm, ChatChunks
from tests.serving.openai.usage_counts import usage_count


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

    def writer(self, keep_alive_s: float | None = None) -> ReplyWriter:
        return ReplyWriter(self.send, [(b"a", b"b")], self._lose, task_starter(), keep_alive_s)

    def _lose(self) -> None:
        self.gone += 1


async def test_frames_that_are_there_together_leave_in_one_write() -> None:
    client = Client()
    writer = client.writer()
    for frame in (b"1", b"2", b"3"):
        writer.put(frame)
    writer.commit()
    writer.finish()
    await writer.sent()
    assert client.writes == [b"123"]


async def test_a_frame_that_is_alone_leaves_at_once() -> None:
    client = Client()
    writer = client.writer()
    writer.commit()
    for frame in (b"1", b"2", b"3"):
        writer.put(frame)
        await anyio.wait_all_tasks_blocked()
    writer.finish()
    await writer.sent()
    assert client.writes == [b"1", b"2", b"3", b""]
    assert [message.get("more_body") for message in client.messages] == [None, True, True, True, False]


async def test_nothing_is_sent_before_the_commit() -> None:
    client = Client()
    writer = client.writer()
    writer.put(b"1")
    await anyio.sleep(10)
    assert client.messages == []
    writer.commit()
    writer.finish()
    await writer.sent()
    assert client.messages[0] == {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
    assert client.writes == [b"1"]


async def test_without_a_commit_nothing_is_ever_sent() -> None:
    client = Client()
    writer = client.writer()
    writer.put(b"1")
    writer.finish()
    await writer.sent()
    await writer.close()
    await anyio.sleep(1)
    assert not writer.committed
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
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        assert not waited
        writer.commit()
        await anyio.wait_all_tasks_blocked()
        assert waited
        writer.finish()
        await writer.sent()


async def test_a_whole_answer_leaves_in_pieces_and_closes_with_the_last() -> None:
    client, body = Client(), bytes(range(256)) * 1000
    writer = client.writer()
    writer.put_whole([body[:100_000], body[100_000:100_001], body[100_001:]], [(b"a", b"b")])
    await writer.sent()
    assert b"".join(client.writes) == body
    assert max(map(len, client.writes)) <= PIECE_BYTES
    assert [message["more_body"] for message in client.messages[1:]] == [True] * (len(client.writes) - 1) + [False]


async def test_an_answer_that_waits_has_no_task_of_its_own() -> None:
    client, started = Client(), 0
    start = task_starter()

    def counted(work: Any) -> Any:
        nonlocal started
        started += 1
        return start(work)

    writer = ReplyWriter(client.send, [], lambda: None, counted, None)
    writer.commit()
    await anyio.sleep(1)
    assert started == 0
    for _ in range(3):
        writer.put(b"x")
        await anyio.wait_all_tasks_blocked()
    assert started == 3
    assert client.writes == [b"x"] * 3


async def test_a_task_that_another_connection_starts_has_the_context_of_its_request(anyio_backend_name: str) -> None:
    """On trio a system task has none of a request."""
    of_request, seen = ContextVar("of_request", default="none"), list[str]()

    async def work() -> None:
        seen.append(of_request.get())

    of_request.set("this")
    start = task_starter()
    of_request.set("another")
    start(work())
    await anyio.wait_all_tasks_blocked()
    assert seen == ["this" if anyio_backend_name == "asyncio" else "none"]


async def test_closing_ends_a_write_that_is_under_way() -> None:
    cancelled = False

    async def send(_: MutableMapping[str, Any]) -> None:
        nonlocal cancelled
        try:
            await anyio.sleep_forever()
        finally:
            cancelled = True

    writer = ReplyWriter(send, [], lambda: None, task_starter(), None)
    writer.commit()
    writer.put(b"x")
    await anyio.wait_all_tasks_blocked()
    assert writer.write is not None
    await writer.close()
    assert (cancelled, writer.write) == (True, None)
    writer.put(b"y")
    await anyio.wait_all_tasks_blocked()
    assert writer.write is None


async def test_a_failure_of_the_server_is_kept_and_ends_the_sending() -> None:
    gone = 0

    async def send(_: MutableMapping[str, Any]) -> None:
        raise RuntimeError("invalid header")

    def lose() -> None:
        nonlocal gone
        gone += 1

    writer = ReplyWriter(send, [], lose, task_starter(), None)
    writer.commit()
    writer.put(b"x" * BUFFER_BYTES)
    with anyio.fail_after(1):
        await writer.room()
        await writer.sent()
    assert str(writer.failure) == "invalid header"
    assert gone == 1


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_a_client_that_breaks_off_is_reported_once_and_nothing_waits(after: int) -> None:
    client = Client(breaks_after=after)
    writer = client.writer()
    writer.commit()
    for _ in range(4):
        writer.put(b"x" * BUFFER_BYTES)
        with anyio.fail_after(1):
            await writer.room()
    writer.finish()
    with anyio.fail_after(1):
        await writer.sent()
    assert client.gone == 1


async def test_comments_are_sent_only_while_there_is_nothing_else() -> None:
    client = Client()
    writer = client.writer(keep_alive_s=1)
    await anyio.sleep(2.5)
    assert writer.committed
    for _ in range(10):
        writer.put(b"x")
        await anyio.sleep(0.9)
    writer.finish()
    await writer.sent()
    await writer.close()
    assert b"".join(client.writes) == b":\n\n:\n\n" + b"x" * 10


# -- parts that the server takes at once


class Direct(Client):
    """A client whose server also takes parts at once, unless it is paused; `raises` is what it raises then."""

    def __init__(self, *, takes_parts: bool = True) -> None:
        super().__init__()
        self.takes_parts = takes_parts
        self.at_once = self.tasks = 0
        self.raises: Exception | None = None
        self._may_write = anyio.Event()
        self._may_write.set()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self._may_write.wait()
        await super().send(message)

    def write_first(self, headers: Headers, body: bytes, *, is_last: bool) -> bool:
        return self._write(body, {"type": "http.response.start", "status": 200, "headers": headers}, is_last=is_last)

    def write_part(self, body: bytes, *, start: Any = None, is_last: bool = False) -> bool:
        assert start is None
        return self._write(body, is_last=is_last)

    def _write(self, body: bytes, *before: MutableMapping[str, Any], is_last: bool) -> bool:
        if self.raises is not None:
            raise self.raises
        if not self._may_write.is_set():
            return False
        self.at_once += 1
        self.messages += [*before, {"type": "http.response.body", "body": body, "more_body": not is_last}]
        return True

    def pause(self) -> None:
        if self._may_write.is_set():
            self._may_write = anyio.Event()

    def resume(self) -> None:
        self._may_write.set()

    def writer(self, keep_alive_s: float | None = None) -> ReplyWriter:
        return ReplyWriter(self.send, [], self._lose, self._start(), keep_alive_s, **self.writers())

    def writers(self) -> dict[str, Any]:
        return {"write_first": self.write_first, "write_part": self.write_part} if self.takes_parts else {}

    def _start(self) -> Callable[[Work], SideTask]:
        start = task_starter()

        def counted(work: Work) -> SideTask:
            self.tasks += 1
            return start(work)

        return counted


SIZES = st.sampled_from([0, 1, BUFFER_BYTES // 3, BUFFER_BYTES, PIECE_BYTES, 3 * PIECE_BYTES])


@pytest.mark.parametrize("kind", [Client, Direct])
@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=10))
async def test_whatever_the_pace_all_frames_arrive_in_order(kind: type[Client], steps: list[tuple[int, bool]]) -> None:
    client = kind()
    writer = client.writer()
    writer.commit()
    for number, (size, pause) in enumerate(steps):
        writer.put(bytes([number]) * size)
        with anyio.fail_after(1):
            await writer.room()
        if pause:
            await anyio.wait_all_tasks_blocked()
    writer.finish()
    await writer.sent()
    assert b"".join(client.writes) == b"".join(bytes([number]) * size for number, (size, _) in enumerate(steps))
    assert client.messages[-1]["more_body"] is False


STEPS = st.lists(
    st.integers(1, 9) | st.integers(BUFFER_BYTES, 3 * BUFFER_BYTES) | st.sampled_from(["turn", "pause", "resume"]),
    max_size=20,
)


@given(before=st.integers(0, 3), steps=STEPS)
async def test_the_bytes_are_the_same_whether_parts_are_taken_at_once_or_sent(before: int, steps: list[Any]) -> None:
    bodies: list[bytes] = []
    for takes_parts in (True, False):
        client = Direct(takes_parts=takes_parts)
        writer, frames = client.writer(), 0
        script: list[int | str] = [*[1] * before, "commit", *steps]
        for number, step in enumerate(script):
            if step == "commit":
                writer.commit()
            elif step == "turn":
                await anyio.wait_all_tasks_blocked()
            elif step == "pause":
                client.pause()
            elif step == "resume":
                client.resume()
            elif isinstance(step, int):
                frames += step
                is_full = writer.put(bytes([number]) * step, alone=step % 3 > 0)
                assert is_full == (writer._waiting_bytes >= BUFFER_BYTES)
        client.resume()
        writer.finish()
        await writer.sent()
        await writer.close()
        assert client.messages[-1]["more_body"] is False
        assert all(message["more_body"] for message in client.messages[1:-1])
        bodies.append(b"".join(client.writes))
        assert len(bodies[-1]) == frames
    assert bodies[0] == bodies[1]


async def test_a_lone_frame_is_taken_at_once_and_starts_no_task() -> None:
    client = Direct()
    writer = client.writer()
    writer.put(b"1")
    writer.commit()
    assert client.at_once == 0
    await anyio.wait_all_tasks_blocked()
    writer.put(b"2")
    assert client.writes == [b"1", b"2"]
    assert (client.at_once, client.tasks, writer.write) == (2, 0, None)
    client.pause()
    writer.put(b"3")
    await anyio.wait_all_tasks_blocked()
    assert writer.write is not None
    writer.put(b"4")
    client.resume()
    writer.finish()
    await writer.sent()
    assert client.writes == [b"1", b"2", b"3", b"4"]
    assert (client.at_once, client.tasks) == (2, 1)


async def test_frames_of_the_turn_in_which_an_answer_begins_leave_together() -> None:
    client = Direct()
    writer = client.writer()
    writer.put(b"1")
    writer.commit()
    writer.put(b"2")
    await anyio.wait_all_tasks_blocked()
    assert client.writes == [b"12"]
    writer.put(b"3")
    await writer.close()
    assert client.writes == [b"12", b"3"]


async def test_a_frame_that_is_not_alone_leaves_with_those_of_its_turn_and_then_without_them() -> None:
    client = Direct()
    writer = client.writer()
    writer.put(b"1")
    writer.commit()
    await anyio.wait_all_tasks_blocked()
    writer.put(b"2", alone=False)
    writer.put(b"3")
    await anyio.wait_all_tasks_blocked()
    writer.put(b"4", alone=False)
    await anyio.wait_all_tasks_blocked()
    writer.put(b"5")
    assert client.writes == [b"1", b"23", b"4", b"5"]
    assert client.tasks == 0
    await writer.close()


@pytest.mark.parametrize("how", ["close", "abandon"])
async def test_what_waits_for_the_end_of_its_turn_is_dropped_with_the_answer(how: str) -> None:
    client = Direct()
    writer = client.writer()
    writer.put(b"1")
    writer.commit()
    if how == "abandon":
        writer.abandon()
    await writer.close()
    await anyio.wait_all_tasks_blocked()
    assert (client.messages, client.tasks, writer.failure) == ([], 0, None)


@pytest.mark.parametrize("pause", [None, "begin", "end"])
async def test_an_answer_ends_once_whether_its_end_is_taken_at_once_or_sent(pause: str | None) -> None:
    client = Direct()
    writer = client.writer()
    if pause == "begin":
        client.pause()
    writer.put(b"1")
    writer.commit()
    await anyio.wait_all_tasks_blocked()
    writer.put(b"2", alone=False)
    if pause == "end":
        client.pause()
    writer.finish()
    client.resume()
    await writer.sent()
    await anyio.wait_all_tasks_blocked()
    assert b"".join(client.writes) == b"12"
    assert [message.get("more_body") for message in client.messages].count(False) == 1
    assert client.messages[-1]["more_body"] is False
    assert client.tasks == (pause is not None)


@pytest.mark.parametrize("takes_parts", [True, False])
async def test_nothing_is_sent_behind_the_end_however_long_the_answer_stays_open(takes_parts: bool) -> None:
    client = Direct(takes_parts=takes_parts)
    writer = client.writer(keep_alive_s=1)
    writer.commit()
    writer.put(b"1")
    writer.finish()
    await writer.sent()
    await anyio.sleep(10)
    assert client.writes == [b"1"]
    assert client.messages[-1]["more_body"] is False
    assert (client.gone, writer.failure) == (0, None)
    await writer.close()


@pytest.mark.parametrize("failure", [None, BackendUnknown("broken")])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_the_end_of_a_stream_is_one_write_behind_its_last_text(
    include_usage: bool, failure: Exception | None
) -> None:
    client = Direct()
    chunks = ChatChunks(AnswerForm("id", 1, "m", include_usage=include_usage), usage_count())
    reply = StreamedReply(client.send, [], client._lose, client._start(), None, chunks, 503, **client.writers())
    for text in ("a", "b", "c"):
        reply.take(BackendOutput([1], [text], text), 0)
        if text == "a":
            reply.begin()
        await anyio.wait_all_tasks_blocked()
    if failure is None:
        reply.take(BackendOutput([], [], finish_reason=FinishReason.LENGTH), 0)
    reply.end(failure, finished=failure is None)
    *texts, end = client.messages[1:]
    await reply.sent()
    assert client.messages[1:] == [*texts, end]
    assert len(texts) == 3
    assert end["more_body"] is False
    assert end["body"].endswith(b"data: [DONE]\n\n")
    assert end["body"].count(b"data: ") == (2 if failure is not None else 2 + include_usage)
    assert client.tasks == 0


async def test_a_whole_answer_is_taken_at_once_if_it_is_no_longer_than_a_write() -> None:
    for size, tasks in ((PIECE_BYTES, 0), (PIECE_BYTES + 1, 1)):
        client = Direct()
        writer = client.writer()
        writer.put_whole([b"x" * size], [(b"c", b"d")])
        await writer.sent()
        assert b"".join(client.writes) == b"x" * size
        assert client.messages[0]["headers"] == [(b"c", b"d")]
        assert client.messages[-1]["more_body"] is False
        assert client.tasks == tasks


@pytest.mark.parametrize("alone", [True, False])
async def test_a_server_that_fails_to_take_a_part_ends_the_sending(alone: bool) -> None:
    client = Direct()
    writer = client.writer()
    writer.put(b"1")
    writer.commit()
    await anyio.wait_all_tasks_blocked()
    client.raises = RuntimeError("no transport")
    writer.put(b"2", alone=alone)
    writer.put(b"3" * BUFFER_BYTES)
    with anyio.fail_after(1):
        await writer.room()
        writer.finish()
        await writer.sent()
    assert writer.failure is client.raises
    assert (client.gone, client.writes) == (1, [b"1"])


class Server:
    """A server that writes at once unless `is_busy`."""

    def __init__(self) -> None:
        self.is_busy = False
        self.written: list[Any] = []

    async def send(self, message: MutableMapping[str, Any]) -> None: ...

    def write_part(self, body: bytes, *, start: Any = None, is_last: bool = False) -> bool:
        if not self.is_busy:
            self.written.append((start, body, is_last))
        return not self.is_busy


async def test_parts_that_something_else_looks_at_are_sent() -> None:
    server, scope = Server(), {"headers": [], "type": "http"}

    async def between(message: MutableMapping[str, Any]) -> None:
        await server.send(message)

    refusals: Any = None
    record = RequestRecord(scope, server.send, refusals, shows_workers=False)
    assert record.part_writer(record.send) == server.write_part
    assert record.part_writer(between) is None
    assert RequestRecord(scope, between, refusals, shows_workers=False).part_writer(record.send) is None
    behind = RequestRecord(scope, between, refusals, shows_workers=False)
    assert behind.part_writer(behind.send) is None
    assert not behind.write_first([], b"", is_last=True)


async def test_an_answer_that_begins_at_once_has_the_headers_and_the_status_of_one_that_is_sent() -> None:
    server, sent = Server(), list[Any]()
    refusals: Any = None
    id_header = (b"x-request-id", b"an id")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"headers": [id_header], "type": "http"}
    record = RequestRecord(scope, server.send, refusals, shows_workers=False)
    server.is_busy = True
    assert not record.write_first([(b"a", b"b")], b"1", is_last=False)
    assert (record.status, server.written) == (0, [])
    server.is_busy = False
    assert record.write_first([(b"a", b"b")], b"1", is_last=True)
    other = RequestRecord(scope, send, refusals, shows_workers=False)
    await other.send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    (((status, headers), body, is_last),) = server.written
    assert (status, body, is_last) == (record.status, b"1", True) == (other.status, b"1", True)
    own = {b"x-penstock-request-id"}
    assert [one for one in headers if one[0] not in own] == [one for one in sent[0]["headers"] if one[0] not in own]
    assert id_header in headers
