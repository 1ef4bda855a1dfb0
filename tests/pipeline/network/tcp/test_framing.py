"""Frames: cut anywhere, and whatever is none."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import CodecError, InvalidMessage, MessageTooLarge
from pipeline.network.tcp import framing

Frame = tuple[int, int, bytes]
frames = st.tuples(st.integers(0, 127), st.integers(0, 2**32 - 1), st.binary(min_size=1, max_size=300))
LIMIT = 1000


def written(frame: Frame) -> bytes:
    kind, stream, body = frame
    return framing.header(kind, stream, len(body)) + body


def reader(found: list[Frame], limit_bytes: int = LIMIT) -> framing.FrameReader:
    handlers = {kind: lambda stream, body, kind=kind: found.append((kind, stream, body)) for kind in range(128)}
    return framing.FrameReader(limit_bytes, handlers)


@given(st.lists(frames, max_size=8), st.lists(st.integers(1, 40), min_size=1))
def test_frames_come_out_as_they_went_in_wherever_they_are_cut(sent: list[Frame], cuts: list[int]) -> None:
    data, found, at = b"".join(map(written, sent)), list[Frame](), 0
    read = reader(found)
    while at < len(data):
        size = cuts[at % len(cuts)]
        read.feed(data[at : at + size])
        at += size
    assert found == sent


def test_a_frame_is_messagepack_behind_its_length() -> None:
    data = written((framing.CREDIT, 7, msgspec.msgpack.encode([1, 2])))
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    assert msgspec.msgpack.decode(data[4:]) == [framing.CREDIT, 7, [1, 2]]


@pytest.mark.parametrize("count", [1, 15, 16, 2**16 - 1, 2**16])
def test_a_list_header_is_that_of_messagepack(count: int) -> None:
    whole = msgspec.msgpack.encode([0] * count)
    assert whole == framing.list_header(count) + bytes(count)
    assert framing.list_length(whole) == count


def test_an_item_that_is_a_frame_of_its_own_is_a_list_of_one() -> None:
    for size in (1, 30, 110, 127, 128, 300, 70_000):
        text = "a" * size
        item = msgspec.msgpack.encode(text)
        frame = framing.item_length(len(item)) + framing.item_head(5) + item
        assert frame == written((framing.ITEMS, 5, msgspec.msgpack.encode([text])))


@given(st.lists(st.binary(max_size=400), max_size=8))
def test_any_bytes_are_frames_or_one_codec_error_and_little_is_kept(parts: list[bytes]) -> None:
    read = reader([])
    with suppress(CodecError):
        for part in parts:
            read.feed(part)
            assert len(read._rest) <= LIMIT + 4


@given(frames, st.integers(0, 10), st.integers(0, 255))
def test_a_header_with_one_wrong_byte_is_no_other_frame_unnoticed(sent: Frame, at: int, value: int) -> None:
    """Kind and stream may change; the rest of the header is fixed by the body."""
    data, found = bytearray(written(sent)), list[Frame]()
    data[at] = value
    with suppress(CodecError):
        reader(found).feed(bytes(data))
    assert all(body == sent[2] or at < 4 for _, _, body in found)


@pytest.mark.parametrize("length", [2**32 - 1, LIMIT + 1])
def test_a_long_frame_is_refused_by_its_header(length: int) -> None:
    read = reader([])
    with pytest.raises(MessageTooLarge):
        read.feed(length.to_bytes(4, "big") + b"\x93\x07\xce\x00\x00\x00\x01")
    assert len(read._rest) == 0


def test_an_unknown_kind_and_a_frame_without_a_body_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="kind 9"):
        framing.FrameReader(LIMIT, {}).feed(written((9, 0, b"\xc0")))
    with pytest.raises(InvalidMessage, match="no frame"):
        reader([]).feed(framing.header(7, 1, 0))


@given(st.binary(min_size=1, max_size=6))
def test_the_length_of_any_bytes_as_a_list_is_a_number_or_an_invalid_message(body: bytes) -> None:
    with suppress(InvalidMessage):
        assert framing.list_length(body) >= 0
