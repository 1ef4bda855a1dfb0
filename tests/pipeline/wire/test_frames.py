"""Two-part frames: cut anywhere, checked always, refused before they are stored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ChecksumMismatch, InvalidMessage, MessageTooLarge
from pipeline.wire.frames import Frame, FrameDecoder, decode_frame, encode_frame

BYTES = st.binary(max_size=64)


@pytest.mark.parametrize(("header", "body"), [(b"head", b"body"), (b"head", b""), (b"", b"body"), (b"", b"")])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_frame_is_read_back_as_it_was_written(header: bytes, body: bytes, checksum: bool) -> None:
    assert decode_frame(encode_frame(header, body, checksum=checksum)) == (header, body)


def test_the_layout_is_three_big_endian_numbers_then_the_parts() -> None:
    assert encode_frame(b"ab", b"c") == bytes(7) + b"\x02" + bytes(7) + b"\x01" + bytes(8) + b"abc"


def test_the_checksum_is_xxh3_of_header_and_body_together() -> None:
    # The published XXH3-64 test value of the empty input, seed 0.
    assert encode_frame(b"", b"", checksum=True)[16:24].hex() == "2d06800538d394c2"
    assert encode_frame(b"a", b"bc", checksum=True)[16:24] == encode_frame(b"ab", b"c", checksum=True)[16:24]


@pytest.mark.parametrize("missing", [1, 5, 20, 30])
def test_a_frame_that_is_not_whole_is_refused_at_once_and_waited_for_in_a_stream(missing: int) -> None:
    data = encode_frame(b"header", b"body bytes")
    with pytest.raises(InvalidMessage):
        decode_frame(data[:-missing])
    decoder = FrameDecoder()
    assert decoder.feed(data[:-missing]) == []
    assert decoder.feed(data[-missing:]) == [Frame(b"header", b"body bytes")]
    decoder.finish()


@pytest.mark.parametrize("data", [b"", encode_frame(b"", b"") * 2, encode_frame(b"", b"") + b"x"])
def test_one_shot_wants_exactly_one_frame(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode_frame(data)


def test_frames_back_to_back_come_in_order() -> None:
    assert FrameDecoder().feed(encode_frame(b"1", b"a") + encode_frame(b"2", b"b")) == [(b"1", b"a"), (b"2", b"b")]


@given(frames=st.lists(st.tuples(BYTES, BYTES, st.booleans()), max_size=4), piece=st.integers(1, 40))
def test_where_the_stream_is_cut_does_not_matter(frames: list[tuple[bytes, bytes, bool]], piece: int) -> None:
    data = b"".join(encode_frame(header, body, checksum=checksum) for header, body, checksum in frames)
    decoder = FrameDecoder()
    read = [frame for start in range(0, len(data), piece) for frame in decoder.feed(data[start : start + piece])]
    decoder.finish()
    assert read == [(header, body) for header, body, _ in frames]


@given(header=BYTES, body=BYTES, position=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_content_is_a_checksum_mismatch(
    header: bytes, body: bytes, position: int, bit: int
) -> None:
    data = bytearray(encode_frame(header, body + b"!", checksum=True))
    data[24 + position % (len(data) - 24)] ^= 1 << bit
    with pytest.raises(ChecksumMismatch):
        decode_frame(bytes(data))


def test_a_frame_of_exactly_the_limit_passes_and_one_more_byte_does_not() -> None:
    data = encode_frame(b"head", b"body", limit_bytes=32)
    assert decode_frame(data, limit_bytes=32) == (b"head", b"body")
    with pytest.raises(MessageTooLarge) as on_write:
        encode_frame(b"head", b"body!", limit_bytes=32)
    with pytest.raises(MessageTooLarge) as on_read:
        decode_frame(data, limit_bytes=31)
    assert (on_write.value.size_bytes, on_write.value.limit_bytes) == (33, 32)
    assert (on_read.value.size_bytes, on_read.value.limit_bytes) == (32, 31)


def test_an_announced_length_over_the_limit_is_refused_before_it_arrives() -> None:
    prefix = (2**63).to_bytes(8, "big") + (2**63).to_bytes(8, "big") + bytes(8)
    with pytest.raises(MessageTooLarge):
        FrameDecoder(limit_bytes=1024).feed(prefix)


def test_frames_before_a_bad_one_are_handed_out_and_nothing_after_it() -> None:
    good = encode_frame(b"1", b"a")
    decoder = FrameDecoder(limit_bytes=100)
    assert decoder.feed(good + encode_frame(b"", bytes(200)) + good) == [(b"1", b"a")]
    with pytest.raises(MessageTooLarge):
        decoder.feed(good)
    with pytest.raises(MessageTooLarge):
        decoder.finish()


@pytest.mark.parametrize("kept", [1, 23, 24, 25])
def test_a_stream_that_ends_inside_a_frame_is_an_error(kept: int) -> None:
    decoder = FrameDecoder()
    decoder.feed(encode_frame(b"h", b"b")[:kept])
    with pytest.raises(InvalidMessage):
        decoder.finish()
