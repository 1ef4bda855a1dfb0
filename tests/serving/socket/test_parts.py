"""Heads and chunks by themselves: how the bytes are cut into pieces changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.limits import HttpLimits
from serving.problems import Refusal
from serving.socket.cycle import Waiters
from serving.socket.http1 import ChunkedBody, answer_head, check_start, parse_head

LIMITS = HttpLimits()
BEHIND = b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n"
# Data that looks like the end of a body is the interesting one.
DATA = st.lists(st.one_of(st.binary(min_size=1, max_size=20), st.sampled_from([b"\r\n", b"\r\n\r\n", b"0\r\n\r\n"])))
TRAILERS = st.sampled_from([b"", b"X: y\r\n", b"X: y\r\nZ: \r\n"])


@given(chunks=DATA, trailers=TRAILERS, cuts=st.lists(st.integers(1, 30)), extension=st.sampled_from([b"", b";a=b"]))
def test_a_chunked_body_ends_where_it_ends_however_it_is_cut(
    chunks: list[bytes], trailers: bytes, cuts: list[int], extension: bytes
) -> None:
    raw = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    raw += b"0\r\n" + trailers + b"\r\n"
    data, body, decoder, start = raw + BEHIND, b"", ChunkedBody(10_000), 0
    for size in [*cuts, len(data)]:
        end = min(start + size, len(data))
        while start < end and not decoder.is_complete:
            part, start = decoder.decode(data[:end], start, end)
            body += part
    assert decoder.is_complete
    assert start == len(raw)
    assert body == b"".join(chunks)


NAMES = st.from_regex(r"[a-zA-Z][a-zA-Z0-9-]{0,20}", fullmatch=True).filter(
    lambda name: name.lower() not in ("host", "content-length", "transfer-encoding", "expect", "connection", "upgrade")
)
VALUES = st.from_regex(r"[!-~]([ -~]{0,30}[!-~])?", fullmatch=True)


@given(headers=st.lists(st.tuples(NAMES, VALUES), max_size=20), length=st.integers(0, 10**12))
def test_a_head_keeps_its_headers_and_no_start_of_it_is_refused(headers: list[tuple[str, str]], length: int) -> None:
    lines = ["POST /a%20b?c=d HTTP/1.1", "Host: a", f"Content-Length: {length}", *[f"{n}: {v}" for n, v in headers]]
    raw = "\r\n".join([*lines, "", ""]).encode()
    head = parse_head(raw, LIMITS)
    assert head.headers[2:] == [(name.lower().encode(), value.encode()) for name, value in headers]
    assert (head.method, head.path, head.query, head.length_bytes) == ("POST", "/a b", b"c=d", length)
    for end in range(1, len(raw)):
        if not raw[:end].endswith(b"\r\n\r\n"):
            check_start(raw[:end], LIMITS)


@given(raw=st.binary(max_size=200))
def test_any_bytes_of_a_head_are_parsed_or_refused(raw: bytes) -> None:
    statuses = []
    for parse in (parse_head, check_start):
        try:
            parse(b"G" + raw + b"\r\n\r\n", LIMITS)
        except Refusal as refusal:
            statuses.append(refusal.problem.status)
    assert set(statuses) <= {400, 414, 417, 431}


@given(
    value=st.binary(max_size=30).filter(lambda value: any((byte < 32 and byte != 9) or byte == 127 for byte in value)),
    count=st.integers(0, 3),
)
def test_no_control_character_leaves_in_a_header(value: bytes, count: int) -> None:
    headers = [(b"a", b"b")] * count + [(b"x", value)] + [(b"c", b"d")] * count
    with pytest.raises(RuntimeError, match="Invalid HTTP header value"):
        answer_head(200, b"", headers)


@pytest.mark.parametrize("name", [b"", b"a b", b"a:", b"a\xe9"])
def test_an_invalid_header_name_is_refused(name: bytes) -> None:
    with pytest.raises(RuntimeError, match="Invalid HTTP header name"):
        answer_head(200, b"", [(name, b"x")])


def test_each_waiter_wakes_once_and_a_cancelled_one_is_passed_over() -> None:
    async def main() -> list[str]:
        waiters, woken = Waiters(), []

        async def wait(name: str) -> None:
            await waiters.wait()
            woken.append(name)

        tasks: list[Any] = [asyncio.create_task(wait(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        waiters.wake()
        await asyncio.gather(*tasks, return_exceptions=True)
        waiters.wake()
        return woken

    assert asyncio.run(main()) == ["a", "c"]
