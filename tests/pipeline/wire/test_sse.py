"""Server-sent events: what is written, what is held back, and reading whatever arrives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Annotated
from pipeline.errors import InvalidArgument, PenstockError, ResourceExhausted, Unknown, match_chain
from pipeline.protocols import LLMEngineOutput, StopConditions
from pipeline.wire import DONE, SSEDecoder, SSEMessage, encode
from pipeline.wire.sse import to_annotated

DATA = StopConditions(max_tokens=1)
LINES = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=6).map(str.strip)


def read(data: bytes) -> list[SSEMessage]:
    decoder = SSEDecoder()
    return decoder.feed(data) + decoder.finish()


def test_an_item_is_written_event_first_then_comments_then_data() -> None:
    item = Annotated[Any]({"a": 1}, None, "request_id", ["one\r\ntwo", "three"])
    assert encode(item) == b'event: request_id\n: one  two\n: three\ndata: {"a":1}\n\n'


def test_data_is_one_line_of_json_in_its_own_form() -> None:
    written = encode(Annotated.from_data(LLMEngineOutput([1], text="line\nbreak")))
    assert written is not None
    assert written.count(b"\n") == 2
    assert b'"text":"line\\nbreak"' in written


def test_what_no_client_could_decode_is_replaced_in_a_comment() -> None:
    assert encode(Annotated[Any](event="e\ud800", comment=["a\udfff"])) == b"event: e?\n: a?\n\n"


@pytest.mark.parametrize(
    "item",
    [
        Annotated[Any](),
        Annotated[Any](comment=["only a comment"]),
        Annotated[Any](id="7"),
        Annotated[Any]({"a": 1}, event="payload_usage", comment=["{}"]),
        Annotated[Any](event="llm_metrics", comment=["{}"]),
    ],
)
def test_what_has_nothing_for_the_client_is_not_sent(item: Annotated[Any]) -> None:
    assert encode(item) is None


def test_data_of_a_metrics_item_is_sent_without_the_metrics() -> None:
    assert encode(Annotated[Any]([1], event="llm_metrics", comment=["{}"])) == b"data: [1]\n\n"


@pytest.mark.parametrize(
    ("item", "cls", "text"),
    [
        (Annotated[Any].from_error(ResourceExhausted("busy")), ResourceExhausted, "busy"),
        (Annotated[Any](event="error", comment=["a", "b"]), Unknown, "a -- b"),
        (Annotated[Any](event="error", comment=["a"], error=ResourceExhausted()), Unknown, "a"),
        (Annotated[Any](event="error"), Unknown, "unspecified error"),
    ],
)
def test_an_error_item_is_raised_and_never_sent(item: Annotated[Any], cls: type[PenstockError], text: str) -> None:
    with pytest.raises(cls) as raised:
        encode(item)
    assert (type(raised.value), str(raised.value)) == (cls, text)
    assert item.error is None or match_chain(raised.value, [type(item.error)])


def test_all_four_parts_of_a_message_are_read() -> None:
    assert read(b'id: 123\nevent: test\ndata: {"a":1}\n: note\n\n') == [SSEMessage("123", "test", '{"a":1}', ["note"])]


def test_comments_alone_are_a_message_and_keep_their_order() -> None:
    assert read(b": a\n:  b \n\n") == [SSEMessage(comments=["a", "b"])]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"data: a\ndata: b\n\n", SSEMessage(data="a\nb")),
        (b"data:    a \n\n", SSEMessage(data="a ")),
        (b"data\n\n", SSEMessage(data="")),
        (b"id: a\0b\ndata: x\n\n", SSEMessage(data="x")),
        (b"retry: 10\nother: y\ndata: x\n\n", SSEMessage(data="x")),
        (b"\xef\xbb\xbfdata: x\n\n", SSEMessage(data="x")),
        ("data: \u2028\u0085\n\n".encode(), SSEMessage(data="\u2028\u0085")),
        (b"event: e\ndata: [DONE]\n\n", SSEMessage(event="e")),
        (b"data: no end", SSEMessage(data="no end")),
    ],
)
def test_how_fields_are_read(data: bytes, message: SSEMessage) -> None:
    assert read(data) == [message]


@pytest.mark.parametrize("data", [b"", b"\n\n\n", DONE, b"retry: 1\n\n"])
def test_what_holds_no_message_gives_none(data: bytes) -> None:
    assert read(data) == []


@given(
    pieces=st.lists(st.integers(1, 9), min_size=1),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    texts=st.lists(LINES, max_size=3),
)
def test_where_the_stream_is_cut_does_not_matter(pieces: list[int], newline: str, texts: list[str]) -> None:
    data = "".join(f"data: {text}x{newline}: c{newline}{newline}" for text in texts).encode()
    decoder, read_so_far, start = SSEDecoder(), list[SSEMessage](), 0
    for turn in range(len(data)):
        read_so_far += decoder.feed(data[start : start + pieces[turn % len(pieces)]])
        start += pieces[turn % len(pieces)]
    read_so_far += decoder.finish()
    assert read_so_far == [SSEMessage(data=f"{text}x", comments=["c"]) for text in texts]


def test_data_that_is_no_json_still_is_a_message_and_fails_when_converted() -> None:
    (message,) = read(b"data: {broken\n\n")
    assert message.data == "{broken"
    with pytest.raises(InvalidArgument):
        to_annotated(message, StopConditions)


def test_a_message_without_data_becomes_an_item_without_data() -> None:
    (message,) = read(b"id: 1\nevent: e\n\n")
    assert to_annotated(message, StopConditions) == Annotated(None, "1", "e", None)


def test_all_parts_are_carried_over_to_the_item() -> None:
    (message,) = read(b'id: 123\nevent: update\ndata: {"max_tokens":1}\n: c\n\n')
    assert to_annotated(message, StopConditions) == Annotated(DATA, "123", "update", ["c"])


@pytest.mark.parametrize(("comments", "text"), [([], "unspecified error"), (["a", "b"], "a\nb")])
def test_an_error_event_fails_with_its_comments(comments: list[str], text: str) -> None:
    with pytest.raises(Unknown) as raised:
        to_annotated(SSEMessage(event="error", comments=comments), StopConditions)
    assert str(raised.value) == text


@given(
    event=st.none() | st.sampled_from(["request_id", "token_ids"]),
    comments=st.lists(st.sampled_from(["a", '{"b":1}']), max_size=2),
)
def test_an_item_written_is_the_item_read(event: str | None, comments: list[str]) -> None:
    item = Annotated(DATA, None, event, comments or None)
    written = encode(item)
    assert written is not None
    (message,) = read(written + DONE)
    assert to_annotated(message, StopConditions) == item


@pytest.mark.parametrize("cut", range(1, len(DONE)))
def test_the_end_mark_is_no_event_but_noticed(cut: int) -> None:
    decoder = SSEDecoder()
    assert decoder.feed(b"data: 1\n\n") == [SSEMessage(data="1")]
    assert not decoder.is_done
    assert decoder.feed(DONE[:cut]) + decoder.feed(DONE[cut:]) == []
    assert decoder.is_done
