"""Cycle: how an app's answer becomes writes of its connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from serving.socket.cycle import Cycle, Waiters
from serving.socket.http1 import Head


@define(eq=False)
class Written:
    """A connection that keeps each write."""

    writes: list[bytes] = field(factory=list)
    transport: Any = None
    client: tuple[str, int] | None = None
    server: tuple[str, int] | None = None
    scheme: str = "http"
    write_paused: bool = False
    writable: Waiters = field(factory=Waiters)
    may_continue: bool = True
    default_lines: bytes = b""
    was_broken: bool = False
    answers: int = 0

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def body_taken(self) -> None: ...

    def answered(self, *, keep_alive: bool) -> None:
        self.answers += 1

    def broken(self) -> None:
        self.was_broken = True


async def writes_of(
    bodies: Sequence[bytes], method: str = "GET", headers: Sequence[tuple[bytes, bytes]] = ()
) -> list[bytes]:
    """The writes of an answer with these parts of a body, without the headers."""
    channel = Written()
    cycle = Cycle(Head("1.1", keep_alive=True, method=method), channel)
    await cycle.send({"type": "http.response.start", "status": 200, "headers": [*headers]})
    assert channel.writes == []
    for number, body in enumerate(bodies, 1):
        await cycle.send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})
    assert cycle.is_complete
    assert channel.writes[0].startswith(b"HTTP/1.1 200 OK\r\n")
    first = channel.writes[0].partition(b"\r\n\r\n")[2]
    return [first, *channel.writes[1:]]


LENGTH_2: Sequence[tuple[bytes, bytes]] = [(b"content-length", b"2")]

CASES: Mapping[str, tuple[dict[str, Any], list[bytes]]] = {
    "parts": ({"bodies": [b"a", b"bc", b""]}, [b"1\r\na\r\n", b"2\r\nbc\r\n", b"0\r\n\r\n"]),
    "one part": ({"bodies": [b"a"]}, [b"1\r\na\r\n0\r\n\r\n"]),
    "an empty part, as one that sends the head": ({"bodies": [b"", b"", b"a"]}, [b"", b"1\r\na\r\n0\r\n\r\n"]),
    "nothing": ({"bodies": [b""]}, [b"0\r\n\r\n"]),
    "a length": ({"bodies": [b"a", b"b"], "headers": LENGTH_2}, [b"a", b"b"]),
    "a HEAD": ({"bodies": [b"ab"], "method": "HEAD", "headers": LENGTH_2}, [b""]),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_head_leaves_with_the_first_part_of_the_body(case: str) -> None:
    how, expected = CASES[case]
    assert await writes_of(**how) == expected


def started(version: str = "1.1", method: str = "GET") -> tuple[Cycle, Written]:
    channel = Written()
    return Cycle(Head(version, keep_alive=True, method=method), channel), channel


START = {"type": "http.response.start", "status": 200, "headers": []}


def part(body: bytes, *, more_body: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


@pytest.mark.parametrize("form", ["chunked", "a HEAD", "a length"])
@given(
    parts=st.lists(st.tuples(st.booleans(), st.binary(max_size=40)), max_size=10),
    begins_at_once=st.booleans(),
    ends_at_once=st.booleans(),
)
async def test_an_answer_has_the_same_bytes_whichever_way_its_parts_are_written(
    form: str, parts: list[tuple[bool, bytes]], begins_at_once: bool, ends_at_once: bool
) -> None:
    method = "HEAD" if form == "a HEAD" else "GET"
    (sent, sent_to), (mixed, mixed_to) = started(method=method), started(method=method)
    length = sum(len(body) for _, body in parts)
    headers = [] if form == "chunked" else [(b"content-length", b"%d" % length)]
    bodies = [*parts, (ends_at_once, b"")]
    await sent.send(START | {"headers": headers})
    if not begins_at_once:
        await mixed.send(START | {"headers": headers})
    for at, (at_once, body) in enumerate(bodies):
        is_last = at == len(bodies) - 1
        await sent.send(part(body, more_body=not is_last))
        if begins_at_once and not at:
            assert mixed.write_part(body, start=(200, headers), is_last=is_last)
        elif not (at_once and mixed.write_part(body, is_last=is_last)):
            assert not at_once or form != "chunked"
            await mixed.send(part(body, more_body=not is_last))
    assert mixed_to.writes == sent_to.writes
    assert mixed.is_complete
    assert (mixed_to.answers, sent_to.answers) == (1, 1)


async def test_a_part_is_left_to_send_where_that_would_not_write_it_as_a_chunk() -> None:
    cycle, channel = started()
    assert not cycle.write_part(b"before the head")
    channel.write_paused = True
    assert not cycle.write_part(b"to a client that reads too slowly", start=(200, []))
    channel.write_paused = False
    await cycle.send(dict(START))
    assert not cycle.write_part(b"a second head", start=(200, []))
    channel.write_paused = True
    assert not cycle.write_part(b"while the client reads too slowly", is_last=True)
    channel.write_paused = False
    await cycle.send(part(b"", more_body=False))
    assert not cycle.write_part(b"behind the end")
    assert not cycle.write_part(b"a second end", is_last=True)
    written = list(channel.writes)

    for version, method, headers in (("1.0", "GET", []), ("1.1", "HEAD", []), ("1.1", "GET", LENGTH_2)):
        if version == "1.0":
            assert not started(version)[0].write_part(b"ab", start=(200, []))
        other, other_channel = started(version, method)
        await other.send(START | {"headers": [*headers]})
        assert not other.write_part(b"ab")
        assert other_channel.writes == []

    gone, gone_channel = started()
    await gone.send(dict(START))
    gone.leave(is_gone=True)
    assert not gone.write_part(b"to nobody")
    left, _ = started()
    left.leave(is_gone=True)
    assert not left.write_part(b"to nobody", start=(200, []))
    assert gone_channel.writes == []
    assert channel.writes == written
