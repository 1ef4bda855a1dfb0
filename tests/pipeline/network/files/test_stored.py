"""A key as a file: names that collide with no other, and content that is refused unless it is whole and ours."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.errors import InvalidArgument, InvalidMessage, MessageTooLarge
from pipeline.network.discovery import Put
from pipeline.network.files.stored import (
    VALUE_MAX_BYTES,
    Stored,
    decode_stored,
    encode_stored,
    file_name,
    name_beginning,
)

WRITER = "0123456789abcdef" * 2
KEYS = st.text(min_size=1, max_size=300)


def test_a_name_is_readable_and_has_no_capitals() -> None:
    assert file_name("v1/instances/ns/c_1/e-p/1a") == "v1%2finstances%2fns%2fc_1%2fe-p%2f1a"
    assert file_name("NS/%2f.") == "%4e%53%2f%252f%2e"


@given(KEYS, KEYS)
@example("a" * 201, "a" * 200)
@example("A", "a")
@example("/" * 67, "/" * 66)
def test_names_fit_and_differ_as_keys_do(first: str, second: str) -> None:
    assert len(file_name(first)) <= 255
    assert file_name(first).isascii()
    assert not {"/", "\0"} & set(file_name(first))
    assert file_name(first) not in (".", "..")
    assert (file_name(first) == file_name(second)) == (first == second)


@given(KEYS, KEYS)
def test_a_name_begins_as_those_of_its_prefix(prefix: str, rest: str) -> None:
    assert file_name(f"{prefix}/{rest}").startswith(name_beginning(prefix))


@pytest.mark.parametrize("key", ["", "a\ud800"])
def test_a_key_that_has_no_name_is_refused(key: str) -> None:
    with pytest.raises(InvalidArgument):
        file_name(key)


@given(KEYS, st.binary(max_size=300), st.integers(0, 2**63))
def test_what_is_stored_is_read(key: str, value: bytes, revision: int) -> None:
    stored = Stored(Put(key, value, revision), WRITER)
    assert decode_stored(file_name(key), encode_stored(stored)) == stored


@given(st.binary(max_size=200), st.integers(0, 120), st.binary(max_size=3))
def test_a_part_of_a_record_and_garbage_are_refused(garbage: bytes, cut: int, added: bytes) -> None:
    whole = encode_stored(Stored(Put("a/k", b"value", 1), WRITER))
    for content in (garbage, whole[: min(cut, len(whole) - 1)], whole + b"x" + added):
        with pytest.raises(InvalidMessage):
            decode_stored(file_name("a/k"), content)


@pytest.mark.parametrize("writer", ["", "../../other", "0" * 31, "0" * 33, "G" * 32, ".."])
def test_a_writer_that_is_no_name_of_a_lease_is_refused(writer: str) -> None:
    """It becomes the name of a file, which may be removed."""
    header = {"key": "a", "revision": 1, "writer": writer, "size_bytes": 0}
    with pytest.raises(InvalidMessage, match="no process"):
        decode_stored("a", json.dumps(header).encode() + b"\n")


def test_the_record_of_another_key_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="another key"):
        decode_stored("b", encode_stored(Stored(Put("a", b"", 1), WRITER)))


def test_a_value_that_is_too_large_is_refused() -> None:
    encode_stored(Stored(Put("a", bytes(VALUE_MAX_BYTES), 1), WRITER))
    with pytest.raises(MessageTooLarge):
        encode_stored(Stored(Put("a", bytes(VALUE_MAX_BYTES + 1), 1), WRITER))
