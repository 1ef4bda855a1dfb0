"""The codec: what is written is read back, and bad input is one InvalidArgument that names its place."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import CodecError, InvalidArgument
from pipeline.protocols import (
    LLMEngineOutput,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from pipeline.protocols.output import PromptLogprobEntry, PromptLogprobs
from pipeline.wire import from_json, from_msgpack, from_plain, is_readable, to_json, to_msgpack, to_plain


@pytest.mark.parametrize(
    ("payload", "place", "text"),
    [
        ({}, "token_ids", "token_ids: is required"),
        ({"token_ids": [1, -1]}, "token_ids[1]", "expected an integer between 0 and 4294967295, found -1"),
        ({"token_ids": [2**32]}, "token_ids[0]", "found 4294967296"),
        ({"token_ids": [True]}, "token_ids[0]", "expected an integer, found true"),
        ({"token_ids": "12"}, "token_ids", 'expected a list, found "12"'),
        ({"token_ids": [1.0]}, "token_ids[0]", "expected an integer, found 1"),
        ({"token_ids": [1], "model": None}, "model", "expected a string, found null"),
        ({"token_ids": [1], "stop_conditions": {"max_tokens": "5"}}, "stop_conditions.max_tokens", 'found "5"'),
        ({"token_ids": [1], "sampling_options": {"n": 256}}, "sampling_options.n", "between 0 and 255, found 256"),
        ({"token_ids": [1], "sampling_options": {"temperature": True}}, "sampling_options.temperature", "a number"),
        ({"token_ids": [1], "_HEALTH_CHECK": 1}, "_HEALTH_CHECK", "expected true or false, found 1"),
        ({"token_ids": [1], "encoder_result": []}, "encoder_result", "expected an object, found a list"),
        ({"token_ids": [1], "router": {"ttft": 1}}, "router.ttft", "is not a known field"),
        ({"token_ids": [1], "routing": {"allowed_worker_ids": [1, "a"]}}, "routing.allowed_worker_ids[1]", "integer"),
        (
            {"token_ids": [1], "multi_modal_data": {"image_url": [{"Url": "no scheme"}]}},
            "multi_modal_data.image_url[0].Url",
            "expected a URL",
        ),
        (
            {"token_ids": [1], "sampling_options": {"guided_decoding": {"regex": "a", "grammar": "b"}}},
            "sampling_options.guided_decoding",
            "only one kind",
        ),
        (
            {"token_ids": [1], "bootstrap_info": {"bootstrap_host": "h", "bootstrap_port": 65536, "bootstrap_room": 1}},
            "bootstrap_info.bootstrap_port",
            "65535",
        ),
        (
            {
                "token_ids": [],
                "mm_routing_info": {
                    "routing_token_ids": [],
                    "block_mm_infos": [None, {"mm_objects": [{"mm_hash": 1, "offsets": [[1]]}]}],
                },
            },
            "mm_routing_info.block_mm_infos[1].mm_objects[0].offsets[0]",
            "a list of 2",
        ),
    ],
)
def test_the_offending_place_is_named_by_its_path(payload: Any, place: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain(payload, PreprocessedRequest)
    assert refused.value.field == place
    assert text in refused.value.message


def test_only_the_first_offender_is_named() -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain({"token_ids": [1], "model": 1, "annotations": 2}, PreprocessedRequest)
    assert refused.value.field == "model"
    assert "annotations" not in refused.value.message


def test_integers_are_accepted_for_floats_and_become_floats() -> None:
    read = from_json(b'{"temperature":1}', SamplingOptions)
    assert read.temperature == 1.0
    assert type(read.temperature) is float


@pytest.mark.parametrize("huge", [10**400, 2**1023])
def test_an_integer_no_float_can_hold_is_refused(huge: int) -> None:
    with pytest.raises(InvalidArgument):
        from_plain({"temperature": huge}, SamplingOptions)


def test_unknown_fields_are_ignored_where_a_record_is_open() -> None:
    assert from_plain({"max_tokens": 3, "later": {"x": 1}}, StopConditions) == StopConditions(max_tokens=3)


def test_null_is_unset_for_an_optional_field() -> None:
    assert from_json(b'{"token_ids":[1],"routing":null,"mdc_sum":null}', PreprocessedRequest) == PreprocessedRequest(
        [1]
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "invalid JSON"),
        (b'{"token_ids":[1]', "invalid JSON"),
        (b'{"token_ids":[1]} x', "trailing characters"),
        (b'{"token_ids":NaN}', "invalid JSON"),
        (b'{"model":"\xff"}', "not valid UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"token_ids":[1],"extra_args":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "nested too deeply"),
    ],
    ids=["empty", "truncated", "trailing", "nan", "utf8", "deep", "deep-any"],
)
def test_malformed_json_is_an_invalid_argument_without_field(data: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as refused:
        from_json(data, PreprocessedRequest)
    assert refused.value.field == ""


@given(data=st.binary(max_size=40))
def test_any_bytes_as_messagepack_are_a_record_or_an_invalid_argument(data: bytes) -> None:
    try:
        from_msgpack(data, PreprocessedRequest)
    except InvalidArgument:
        return


@pytest.mark.parametrize(
    "data",
    [b"\x91" * 200_000, b"\x81\x80\x01", b"\xc1", b"", b"\x81\xa9token_ids", b"\x81\xa9token_ids\xc4\x01a"],
    ids=["deep", "map-as-key", "unused-byte", "empty", "truncated", "binary"],
)
def test_malformed_messagepack_is_an_invalid_argument(data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        from_msgpack(data, PreprocessedRequest)


def test_a_value_nested_beyond_the_stack_is_an_invalid_argument() -> None:
    deep: Any = "end"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidArgument):
        from_plain({"token_ids": deep}, PreprocessedRequest)


@pytest.mark.parametrize("write", [to_json, to_msgpack])
@pytest.mark.parametrize("bad", ["\ud800", object(), {"a": 1j}])
def test_a_value_without_a_wire_form_is_a_codec_error(write: Callable[[Any], bytes], bad: Any) -> None:
    with pytest.raises(CodecError, match=r"has no \w+ form"):
        write(LLMEngineOutput([1], engine_data=bad))


@pytest.mark.parametrize("write", [to_json, to_msgpack])
def test_a_value_too_deep_to_write_is_a_codec_error(write: Callable[[Any], bytes]) -> None:
    deep: Any = "end"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CodecError):
        write(LLMEngineOutput([1], engine_data=deep))


def test_an_integer_above_64_bits_is_no_messagepack() -> None:
    with pytest.raises(CodecError):
        to_msgpack(LLMEngineOutput([1], engine_data=2**64))


def test_sets_are_written_sorted_so_that_equal_records_have_equal_bytes() -> None:
    hints = RoutingHints(allowed_worker_ids={30, 1, 2**63, 7})
    assert to_plain(hints) == {"allowed_worker_ids": [1, 7, 30, 2**63]}


def test_a_map_by_token_id_is_read_from_text_and_from_number_keys() -> None:
    prompt: PromptLogprobs = [None, {5: PromptLogprobEntry(-0.5, rank=1)}]
    assert from_plain([None, {"5": {"logprob": -0.5, "rank": 1}}], PromptLogprobs) == prompt
    assert from_msgpack(to_msgpack(prompt), PromptLogprobs) == prompt


@pytest.mark.parametrize("key", ["five", "", "-1", "4294967296", "\u0664", "1_0", " 1", "9" * 5000])
def test_a_key_that_is_no_token_id_is_refused(key: str) -> None:
    with pytest.raises(InvalidArgument):
        from_plain([{key: {"logprob": 0}}], PromptLogprobs)


def test_log_probabilities_without_end_travel_in_messagepack() -> None:
    output = LLMEngineOutput([1], log_probs=[-math.inf])
    assert from_msgpack(to_msgpack(output), LLMEngineOutput) == output


def test_the_list_read_is_not_the_list_given() -> None:
    payload = {"token_ids": [1, 2]}
    read = from_plain(payload, PreprocessedRequest).token_ids
    assert isinstance(read, list)
    read.append(3)
    assert payload == {"token_ids": [1, 2]}


def test_a_prompt_may_be_an_array_and_is_a_list_on_the_wire() -> None:
    packed, plain = PreprocessedRequest(array("I", [1, 2])), PreprocessedRequest([1, 2])
    assert to_json(packed) == to_json(plain)
    assert to_msgpack(packed) == to_msgpack(plain)
    assert from_plain(to_plain(packed), PreprocessedRequest) == plain


@attrs.define
class PlainInteger:
    """A record whose integer has no width."""

    count: int


@pytest.mark.parametrize("value", [1.5, True, "1", None, [1]])
def test_a_plain_integer_field_takes_integers_only(value: object) -> None:
    assert from_plain({"count": 3}, PlainInteger).count == 3
    with pytest.raises(InvalidArgument) as caught:
        from_plain({"count": value}, PlainInteger)
    assert caught.value.field == "count"


def test_bytes_are_read_from_bytes_only() -> None:
    assert from_msgpack(to_msgpack([b"a"]), list[bytes]) == [b"a"]
    for other in (10**12, "a", [1]):
        with pytest.raises(InvalidArgument, match="expected bytes"):
            from_plain(other, bytes)


def test_whether_a_type_can_be_read_is_known_beforehand() -> None:
    class Foreign:
        pass

    assert is_readable(PreprocessedRequest)
    assert not is_readable(Foreign)
    assert not is_readable(list[Foreign])
