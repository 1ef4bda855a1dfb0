"""The usual item of a token stream, past the general codec: the same bytes, the same records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Annotated, Disconnected
from pipeline.errors import CodecError, InvalidArgument
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput
from pipeline.protocols.usage import CompletionTokensDetails, PromptTokensDetails
from pipeline.wire import (
    from_msgpack,
    from_plain,
    item_to_msgpack,
    items_reader,
    plain_reader,
    ready_reader,
    to_msgpack,
    token_items,
)

KIND: Any = Annotated[LLMEngineOutput]

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
indexes = st.none() | st.integers(0, 300)
usual = st.builds(lambda ids, index: Annotated(LLMEngineOutput(ids, index=index)), token_ids, indexes)
counts = st.integers(0, 2**32 - 1)
cached = st.builds(PromptTokensDetails, st.none() | counts, st.none() | counts)
usages = st.builds(
    CompletionUsage, counts, counts, counts, st.none() | cached, st.none() | st.just(CompletionTokensDetails(1))
)
reasons = st.sampled_from([FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP, FinishReason.error("stop")])
ends = st.builds(
    lambda ids, index, reason, usage: Annotated(
        LLMEngineOutput(ids, index=index, finish_reason=reason, completion_usage=usage)
    ),
    token_ids,
    indexes,
    st.none() | reasons,
    st.none() | usages,
)
others = st.sampled_from(
    [
        Annotated(LLMEngineOutput([1], text="a")),
        Annotated(LLMEngineOutput([1], tokens=["a", None])),
        Annotated(LLMEngineOutput([1], output_type="audio")),
        Annotated(LLMEngineOutput([1], content_parts=[])),
        Annotated(LLMEngineOutput([1], log_probs=[-0.5], cum_log_probs=-0.5)),
        Annotated(LLMEngineOutput([1], top_logprobs=[[]])),
        Annotated(LLMEngineOutput([], finish_reason=FinishReason.STOP, stop_reason=7)),
        Annotated(LLMEngineOutput([], completion_usage=CompletionUsage(1, 2, 3))),
        Annotated(LLMEngineOutput([1], engine_data={"a": 1}, extra_args=[1], disaggregated_params="x")),
        Annotated(LLMEngineOutput([1], encoder_result={})),
        Annotated(LLMEngineOutput([1]), id="7"),
        Annotated(LLMEngineOutput([1]), event="e", comment=["c"]),
        Annotated[Any].from_error(Disconnected("lost")),
        Annotated(),
    ]
)
items = usual | ends | others


@given(items)
def test_the_bytes_are_those_of_the_general_codec(item: Any) -> None:
    assert item_to_msgpack(item) == to_msgpack(item)


@given(items)
def test_a_short_item_is_a_usual_one_as_ids_and_index(item: Any) -> None:
    short, output = msgspec.msgpack.decode(item_to_msgpack(item, is_short=True)), item.data
    if output is not None and item == Annotated(LLMEngineOutput(output.token_ids, index=output.index)):
        assert short == [output.token_ids, output.index]
    else:
        assert short == _plain(item)


@given(st.lists(st.tuples(items, st.booleans()), max_size=40))
def test_items_read_are_those_of_the_general_codec_short_or_not(given_items: list[tuple[Any, bool]]) -> None:
    body = to_msgpack([_plain(item) for item, _ in given_items])
    read = items_reader(KIND)(to_msgpack([_plain(item, is_short=is_short) for item, is_short in given_items]))
    assert to_msgpack(read) == body
    assert [item.data for item in read] == [item.data for item in from_msgpack(body, list[KIND])]


def _plain(item: Any, *, is_short: bool = False) -> Any:
    return msgspec.msgpack.decode(item_to_msgpack(item, is_short=is_short))


@pytest.mark.parametrize(
    "short", [[], [[1]], [[1], 0, 0], [1, 0], [[-1], 0], [[2**32], 0], [[1], -1], [[1], "0"], [["1"], 0], [None, 0]]
)
def test_a_list_that_is_no_short_item_is_refused(short: list[Any]) -> None:
    for body in (to_msgpack([short]), to_msgpack([short, _plain(Annotated(LLMEngineOutput([1], text="a")))])):
        with pytest.raises(InvalidArgument, match="expected an item of tokens"):
            items_reader(KIND)(body)


def test_short_items_stand_beside_items_that_only_the_general_codec_reads() -> None:
    others = [Annotated(LLMEngineOutput([3], text="a")), Annotated[Any].from_annotation("e", 1)]
    body = to_msgpack([[[1, 2], 0], *map(_plain, others), [[], None]])
    read = [Annotated(LLMEngineOutput([1, 2], index=0)), *others, Annotated(LLMEngineOutput([]))]
    assert items_reader(KIND)(body) == read
    assert ready_reader(KIND, 64)(deque([body])) == (read, 4, len(body))


@pytest.mark.parametrize("kind", [Any, Annotated[Any], Annotated[int], list[Any]])
def test_items_of_another_type_are_never_short(kind: Any) -> None:
    body = to_msgpack([[[1], 0]])
    assert _outcome(items_reader(kind), body) == _outcome(lambda b: from_msgpack(b, list[kind]), body)


@given(st.lists(usual | ends, min_size=1, max_size=3), st.data())
def test_changed_bytes_read_as_the_general_codec_reads_them(given_items: list[Any], data: st.DataObject) -> None:
    body = bytearray(to_msgpack([*map(_plain, given_items)]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 1))] = data.draw(st.binary(max_size=3))
    changed = bytes(body)
    assert _outcome(items_reader(KIND), changed) == _outcome(_read_slowly, changed)


def _read_slowly(body: bytes) -> list[Any]:
    """Return the items by the general codec, short ones as they are described."""
    return [_slow_item(item) for item in from_msgpack(body, list[Any])]


def _slow_item(item: Any) -> Any:
    if not isinstance(item, list):
        return from_plain(item, KIND)
    if len(item) == 2:
        return Annotated(from_plain({"token_ids": item[0], "index": item[1]}, LLMEngineOutput))
    raise InvalidArgument("no item")


def _outcome(read: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return read(body)
    except InvalidArgument:
        return InvalidArgument


def test_the_usual_items_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    body = to_msgpack([_plain(Annotated(LLMEngineOutput([n], index=n))) for n in range(100)])
    one = to_msgpack([_plain(Annotated(LLMEngineOutput([7])))])
    monkeypatch.delattr(token_items, "from_msgpack")
    monkeypatch.delattr(token_items, "to_msgpack")
    read = items_reader(KIND)
    assert [item.data.index for item in read(body)] == list(range(100))
    assert read(one)[0].data.token_ids == [7]
    assert item_to_msgpack(read(one)[0]) == one[1:]


def test_the_first_and_the_last_item_take_a_short_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = CompletionUsage(7, 1, 8, PromptTokensDetails(0))
    first = Annotated(LLMEngineOutput([7], completion_usage=usage))
    last = Annotated(LLMEngineOutput([], index=0, finish_reason=FinishReason.LENGTH, completion_usage=usage))
    body = to_msgpack([*map(_plain, [first, Annotated(LLMEngineOutput([8])), last])])
    one = to_msgpack([_plain(last)])
    monkeypatch.delattr(token_items, "from_msgpack")
    monkeypatch.delattr(token_items, "to_msgpack")
    read = items_reader(KIND)
    assert read(body) == [first, Annotated(LLMEngineOutput([8])), last]
    assert read(one) == [last]
    assert item_to_msgpack(last) == one[1:]


@given(st.lists(items, max_size=2), st.booleans())
def test_a_plain_token_is_a_lone_short_item_of_one_token(given_items: list[Any], is_short: bool) -> None:
    read = plain_reader(KIND)
    assert read is not None
    found = read(to_msgpack([_plain(item, is_short=is_short) for item in given_items]))
    if found is not None:
        assert is_short
        assert given_items == [Annotated(LLMEngineOutput([found[0]], index=found[1]))]
    elif is_short and len(given_items) == 1 and type(output := given_items[0].data) is LLMEngineOutput:
        usual = Annotated(LLMEngineOutput(output.token_ids, index=output.index))
        assert given_items != [usual] or len(output.token_ids) != 1


def test_changed_bytes_of_a_plain_token_are_another_item_or_the_same_token() -> None:
    item = Annotated(LLMEngineOutput([300], index=3))
    read, one = plain_reader(KIND), to_msgpack([_plain(item, is_short=True)])
    assert read is not None
    for at in range(len(one)):
        for byte in range(256):
            if (found := read(changed := one[:at] + bytes([byte]) + one[at + 1 :])) is not None:
                assert _read_slowly(changed) == [Annotated(LLMEngineOutput([found[0]], index=found[1]))]


def test_only_tokens_are_plain() -> None:
    assert plain_reader(Any) is plain_reader(int) is plain_reader(Annotated[int]) is None


@pytest.mark.parametrize("key", [b"token_ids", b"index", b"data"])
@pytest.mark.parametrize("twice", [b"\xc0", b"\x01", b"\x91\x02", b"\x81\xa1a\x01"])
def test_a_key_that_comes_twice_or_has_another_value_is_read_as_by_the_general_codec(key: bytes, twice: bytes) -> None:
    whole = to_msgpack([_plain(Annotated(LLMEngineOutput([1], index=3)))])
    name = bytes([0xA0 | len(key)]) + key
    longer = whole.replace(b"\x91\x81", b"\x91\x82", 1) if key == b"data" else whole.replace(b"\x89", b"\x8a", 1)
    for body in (longer + name + twice, whole.replace(name, name + twice + name, 1), longer + name + twice + name):
        assert _outcome(items_reader(KIND), body) == _outcome(lambda b: from_msgpack(b, list[KIND]), body)


@pytest.mark.parametrize("reason", ["eos", "length", "stop", "cancelled", "content_filter", "abort", "error: x", "x"])
def test_each_finish_reason_is_read_as_by_the_general_codec(reason: str) -> None:
    plain = _plain(Annotated(LLMEngineOutput([1], finish_reason=FinishReason.STOP)))
    plain["data"]["finish_reason"] = reason
    body = to_msgpack([plain])
    assert _outcome(items_reader(KIND), body) == _outcome(lambda b: from_msgpack(b, list[KIND]), body)


@pytest.mark.parametrize("ids", [None, "ab", [object()], [2**70]])
def test_what_is_no_list_of_token_ids_is_written_or_refused_as_by_the_general_codec(ids: Any) -> None:
    for reason in (None, FinishReason.STOP):
        item = Annotated(LLMEngineOutput(ids, finish_reason=reason))
        assert _written(item_to_msgpack, item) == _written(to_msgpack, item)


def _written(write: Callable[[Any], bytes], item: Any) -> Any:
    try:
        return write(item)
    except CodecError:
        return CodecError


def test_items_of_no_type_are_plain_values() -> None:
    assert items_reader(Any)(to_msgpack([1, {"a": [2]}])) == [1, {"a": [2]}]


@given(st.binary(max_size=60))
def test_any_bytes_are_items_or_an_invalid_argument(body: bytes) -> None:
    for kind in (KIND, Any, int):
        with suppress(InvalidArgument):
            assert isinstance(items_reader(kind)(body), list)


# -- items that wait together


frames = st.lists(st.lists(items, min_size=1, max_size=3), max_size=12)


def _bodies(given_frames: list[list[Any]], *, is_short: bool = False) -> deque[bytes]:
    return deque(to_msgpack([_plain(item, is_short=is_short) for item in frame]) for frame in given_frames)


def _read_all(bodies: deque[bytes], join_max: int) -> list[Any]:
    """Return all items that wait; each call takes at least one frame, and counts what it takes."""
    read, found = ready_reader(KIND, join_max), list[Any]()
    while bodies:
        before, before_bytes = list(bodies), sum(map(len, bodies))
        more, count, size_bytes = read(bodies)
        taken = before[: len(before) - len(bodies)]
        assert taken
        assert size_bytes == before_bytes - sum(map(len, bodies))
        assert count == sum(len(items_reader(KIND)(body)) for body in taken)
        found += more
    return found


def _flat(read_items: list[Any]) -> list[Any]:
    """Return each token of usual items by itself, and the other items as bytes."""
    flat: list[Any] = []
    for item in read_items:
        output = item.data
        if output is None or item != Annotated(LLMEngineOutput(output.token_ids, index=output.index)):
            flat.append(to_msgpack(item))
        else:
            flat += [(output.index, token_id) for token_id in output.token_ids]
    return flat


@pytest.mark.parametrize("join_max", [1, 7, 64])
@given(frames, st.booleans())
def test_items_that_wait_have_the_same_tokens_in_the_same_order_when_joined(
    join_max: int, given_frames: list[list[Any]], is_short: bool
) -> None:
    apart = [item for frame in given_frames for item in frame]
    joined = _read_all(_bodies(given_frames, is_short=is_short), join_max)
    assert _flat(joined) == _flat(apart)
    longest = max((len(item.data.token_ids) for item in apart if item.data is not None), default=0)
    assert all(len(item.data.token_ids) <= max(join_max, longest) for item in joined if item.data is not None)
    if join_max == 1:
        assert [*map(to_msgpack, joined)] == [*map(to_msgpack, apart)]


@given(st.integers(2, 100), st.integers(1, 200))
def test_as_many_tokens_as_may_be_are_one_item(join_max: int, tokens: int) -> None:
    bodies = _bodies([[Annotated(LLMEngineOutput([n]))] for n in range(tokens)])
    sizes = [len(item.data.token_ids) for item in _read_all(bodies, join_max)]
    assert sizes == [join_max] * (tokens // join_max) + [tokens % join_max] * (tokens % join_max > 0)


def test_the_bytes_of_joined_frames_are_bounded() -> None:
    ids = [2**32 - 1] * 1000
    bodies = _bodies([[Annotated(LLMEngineOutput(ids))]] * 20)
    sizes = [len(item.data.token_ids) for item in _read_all(bodies, 10**6)]
    assert sum(sizes) == 20_000
    assert max(sizes) == 6000


@given(st.lists(usual, min_size=1, max_size=4), st.data())
def test_a_frame_that_cannot_be_read_comes_after_those_before_it(given_items: list[Any], data: st.DataObject) -> None:
    bodies = _bodies([[item] for item in given_items])
    at = data.draw(st.integers(0, len(bodies) - 1))
    changed = bytearray(bodies[at])
    cut = data.draw(st.integers(0, len(changed) - 1))
    changed[cut : cut + 1] = data.draw(st.binary(max_size=2))
    bodies[at] = bytes(changed)
    read, found = ready_reader(KIND, 64), list[Any]()
    expected = _outcome(lambda body: items_reader(KIND)(body), bodies[at])
    try:
        while bodies:
            found += read(bodies)[0]
    except InvalidArgument:
        assert expected is InvalidArgument
        assert _flat(found) == _flat(given_items[:at])
    else:
        assert _flat(found) == _flat([*given_items[:at], *expected, *given_items[at + 1 :]])
