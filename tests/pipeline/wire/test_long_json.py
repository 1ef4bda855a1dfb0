"""A long JSON text decoded in pieces is the value that one call makes of it, or is refused as that call refuses it."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline import InvalidArgument
from pipeline.wire import JsonSize, is_json_object, plain_from_json, plain_from_long_json
from pipeline.wire.long_json import decode_in_pieces

TEXTS = st.text(max_size=20) | st.text('"\\/\n\0é中😀ab,:[]{}', max_size=150)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda parts: st.lists(parts, max_size=6) | st.dictionaries(TEXTS, parts, max_size=6),
    max_leaves=20,
)
WHOLES = st.lists(VALUES, max_size=6) | st.dictionaries(st.text(max_size=20), VALUES, max_size=6)


def nothing() -> None: ...


def in_pieces(text: bytes, window: int = 64) -> Any:
    return decode_in_pieces(text, plain_from_json, pause=nothing, window=window)


def outcome(decode: Any, text: bytes) -> Any:
    """The value, or that there is none."""
    try:
        return decode(text)
    except InvalidArgument:
        return InvalidArgument


@given(WHOLES, st.booleans(), st.sampled_from([None, 1]), st.integers(64, 200))
@settings(max_examples=3 * settings().max_examples // 2)
def test_the_value_of_all_pieces_is_that_of_the_whole(value: Any, ascii_only: bool, indent: Any, window: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    whole = outcome(plain_from_json, text)
    if whole is InvalidArgument:  # half a surrogate pair, or a name that no piece can hold
        return
    pieces = outcome(lambda text: in_pieces(text, window), text)
    assert pieces == whole or (pieces is InvalidArgument and longest_names(value) > window // 2)


def longest_names(value: Any) -> int:
    """Bytes of the names of fields on the way to the innermost value, between which there may be no comma."""
    if isinstance(value, dict):
        return max((len(json.dumps(name)) + longest_names(part) for name, part in value.items()), default=0)
    return max(map(longest_names, value), default=0) if isinstance(value, list) else 0


@given(st.integers(0, 300), TEXTS, st.randoms(use_true_random=False))
@settings(max_examples=3 * settings().max_examples // 2)
@example(1, "", random.Random(0))
def test_a_damaged_text_is_refused_in_pieces_as_it_is_whole(ids: int, text: str, chance: random.Random) -> None:
    """One byte is replaced, removed or doubled: either both ways read the same value, or both find the fault."""
    body = bytearray(
        json.dumps({"prompt": [*range(ids)], "a": [{"b": text, "c": {"d": [[], {}]}}], "e": text}).encode()
    )
    at = chance.randrange(len(body))
    kind = chance.randrange(3)
    body[at : at + (kind != 2)] = b"" if kind == 1 else bytes([chance.choice(b'"\\,:[]{}01a\x00\xff ')])
    whole, pieces = outcome(plain_from_json, bytes(body)), outcome(in_pieces, bytes(body))
    assert pieces == whole or (pieces is InvalidArgument and isinstance(whole, dict) and longest_names(whole) > 30)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"3",
        b'"' + b"a" * 500 + b'"',
        b"[" + b"1," * 200 + b"]",
        b"[" + b"1," * 200 + b"2]]",
        b"[" + b"1," * 200 + b"2],[3]" + b",4" * 200,
        b"[" + b"1," * 200 + b"2}" + b",3" * 200,
        b"{" + b'"a":1,' * 200 + b'"a":1],' + b'"a":1,' * 200,
        b'["' + b"a" * 5000,
        b'["' + b"a" * 5000 + b"\n" + b"a" * 500 + b'"]',
        b'["' + b"a" * 5000 + b"\xff" + b"a" * 500 + b'"]',
        b'["' + b"\\ud83d" * 500 + b'"]',
        b'["' + b"a" * 5000 + b'\\q"]',
        b'["' + b"a" * 500 + b'" 1' + b",2" * 200 + b"]",
        b'{"a":"' + b"a" * 500 + b'":1' + b',"a":2' * 200 + b"}",
        b"[" + b" " * 5000 + b"]",
        b"[" * 5000,
    ],
)
def test_what_is_no_json_is_refused_in_pieces(text: bytes) -> None:
    with pytest.raises(InvalidArgument):
        in_pieces(text)


def test_of_a_name_given_twice_the_last_value_counts_whatever_is_between() -> None:
    """As in one call: the pieces between must not take one for the other."""
    many = b"1," * 100 + b"1"
    text = b'{"a":{"x":[' + many + b']},"b":{"x":[' + many + b']},"a":{"y":[' + many + b"]}}"
    assert in_pieces(text) == plain_from_json(text) == {"a": {"y": [1] * 101}, "b": {"x": [1] * 101}}


def test_the_time_between_two_pauses_does_not_grow_with_the_text() -> None:
    pauses = [0]

    def decode(piece: bytes) -> Any:
        assert len(piece) < 300_000
        return plain_from_json(piece)

    text = json.dumps({"a": "x" * 2_000_000, "b": list(range(300_000)), "c": [{"d": "é"}] * 50_000}).encode()
    value = decode_in_pieces(text, decode, pause=lambda: pauses.append(1))
    assert value == json.loads(text)
    assert len(pauses) > len(text) / 70_000


def test_what_a_pause_raises_ends_the_decoding() -> None:
    def give_up() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        plain_from_long_json(b"[" + b"1," * 200_000 + b"1]", give_up)


def test_a_long_string_is_held_once() -> None:
    """Beside the body there are the string and a few pieces: joining pieces in the end would take it twice."""
    body = b'{"a":"' + b"x" * 20_000_000 + b'"}'
    tracemalloc.start()
    try:
        value = plain_from_long_json(body, nothing)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(value["a"]) == 20_000_000
    assert peak < 22_000_000


def size_of(text: bytes, window: int) -> JsonSize:
    size = JsonSize()
    for at in range(0, len(text), window):
        size.add(text[at : at + window])
    return size


def counts(value: Any) -> tuple[int, int, int]:
    """Values, strings with lists and objects, depth."""
    if isinstance(value, list | dict):
        below = [counts(part) for part in (value.values() if isinstance(value, dict) else value)]
        names = len(value) if isinstance(value, dict) else 0
        values, parts = (sum(count[i] for count in below) for i in (0, 1))
        return 1 + values, 1 + names + parts, 1 + max((count[2] for count in below), default=0)
    return 1, int(isinstance(value, str)), 0


@given(WHOLES, st.integers(1, 70))
@settings(max_examples=3 * settings().max_examples // 2)
def test_a_text_is_counted_the_same_in_whatever_parts_it_arrives(value: Any, window: int) -> None:
    size = size_of(json.dumps(value).encode(), window)
    values, parts, depth = counts(value)
    assert (size.parts, size.depth) == (parts, depth)
    assert values - 1 <= size.values <= 2 * values


@pytest.mark.parametrize(
    ("text", "is_object"),
    [
        ("{}", True),
        ('{"a": [1, {"b": null}]}', True),
        ("[]", False),
        ("", False),
        ("{", False),
        ("\ud800", False),
        ('{"a": ' + "[" * 10**6, False),
        ("{} {}", False),
    ],
)
def test_a_json_object_is_recognised(text: str, is_object: bool) -> None:
    assert is_json_object(text) == is_object
