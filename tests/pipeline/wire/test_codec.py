"""The codec: what is written is read back, and bad input is one InvalidArgument that names its place."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, Literal, get_args, get_origin
from uuid import UUID

import attrs
import msgspec
import pytest
from hypothesis import Phase, find, given, reject, settings
from hypothesis import strategies as st

from pipeline import Annotated
from pipeline.errors import CodecError, Disconnected, InvalidArgument, Unknown
from pipeline.protocols import (
    BackendOutput,
    BlockExtraInfo,
    BootstrapInfo,
    CompletionUsage,
    FinishReason,
    GuidedDecodingOptions,
    LLMEngineOutput,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingConstraints,
    RoutingData,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TopLogprob,
    TraceLink,
)
from pipeline.protocols.card import (
    CheckedFile,
    GenerationConfigFile,
    ModelDeploymentCard,
    ModelInfoFile,
    ModelRuntimeConfig,
    ModelType,
    PromptFormatterFile,
    TokenizerFile,
)
from pipeline.protocols.field_rules import WIRE_KEY, IntRange, InvalidRecord
from pipeline.protocols.openai import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatMessage,
    Completion,
    CompletionRequest,
    ContentPart,
    InputAudio,
    MediaUrl,
    ModelList,
    NvExt,
    NvExtResponse,
)
from pipeline.protocols.openai.nvext import MetadataUpload
from pipeline.protocols.output import EmbeddingsEngineOutput, PromptLogprobEntry, PromptLogprobs
from pipeline.protocols.request import AgentContext, MmRoutingInfo, MultimodalData, PreprocessedEmbeddingRequest
from pipeline.protocols.routing import RouterParams
from pipeline.protocols.timing import LLMMetricAnnotation, TimingInfo, WorkerIdInfo
from pipeline.wire import from_json, from_msgpack, from_plain, to_json, to_msgpack, to_plain

RECORDS: list[type] = [
    *(StopConditions, SamplingOptions, GuidedDecodingOptions, OutputOptions, RoutingHints, RouterParams),
    *(RoutingConstraints, RouterConfigOverride, BootstrapInfo, TraceLink, PrefillResult, MmRoutingInfo),
    *(BlockExtraInfo, AgentContext, PreprocessedRequest, PreprocessedEmbeddingRequest, LLMEngineOutput),
    *(BackendOutput, TopLogprob, CompletionUsage, EmbeddingsEngineOutput, PromptLogprobEntry, LLMMetricAnnotation),
    *(TimingInfo, WorkerIdInfo, RoutingData, NvExt, NvExtResponse, ModelRuntimeConfig, ModelDeploymentCard),
    *(ChatCompletionRequest, CompletionRequest, ChatMessage, ContentPart, ChatCompletion, ChatCompletionChunk),
    *(Completion, ModelList),
]

TEXTS = st.text(max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
DIGEST = "blake3:" + "0a" * 32
FILES = st.builds(CheckedFile, TEXTS, st.just(DIGEST), st.none() | st.integers(0, 2**40))


def write_rule(field: attrs.Attribute[Any]) -> str:
    return field.metadata[WIRE_KEY].write if WIRE_KEY in field.metadata else "plain"


def key_of(field: attrs.Attribute[Any]) -> str:
    return (field.metadata[WIRE_KEY].name if WIRE_KEY in field.metadata else None) or field.name


def parts() -> st.SearchStrategy[ContentPart]:
    media = st.builds(MediaUrl, TEXTS)
    return st.one_of(
        st.builds(lambda text: ContentPart("text", text=text), TEXTS),
        st.builds(lambda url: ContentPart("image_url", image_url=url), media),
        st.builds(lambda audio: ContentPart("input_audio", input_audio=audio), st.builds(InputAudio, TEXTS, TEXTS)),
    )


def messages() -> st.SearchStrategy[ChatMessage]:
    content = TEXTS | st.lists(parts(), max_size=2)
    extra = st.dictionaries(TEXTS.map("x_{}".format), JSON, max_size=2)
    return st.one_of(
        st.builds(lambda content, extra: ChatMessage("user", content, extra=extra), content, extra),
        st.builds(lambda content, call: ChatMessage("tool", content, tool_call_id=call), content, TEXTS),
        st.builds(ChatMessage, st.just("assistant")),
    )


# Records whose fields depend on each other; all others are built field by field.
SPECIAL: dict[Any, st.SearchStrategy[Any]] = {
    Any: JSON,
    str: TEXTS,
    bool: st.booleans(),
    float: FLOATS,
    int: st.integers(-(2**63), 2**64 - 1),
    UUID: st.uuids(),
    ContentPart: parts(),
    ChatMessage: messages(),
    MetadataUpload: st.just(MetadataUpload("http://up")),
    GuidedDecodingOptions: st.builds(GuidedDecodingOptions, regex=TEXTS, backend=st.none() | TEXTS),
    RouterConfigOverride: st.builds(
        RouterConfigOverride, st.floats(0, 9), st.floats(0, 9), shared_cache_multiplier=st.floats(0, 1)
    ),
    ModelRuntimeConfig: st.builds(
        ModelRuntimeConfig,
        total_kv_blocks=st.none() | st.integers(0, 2**64 - 1),
        taints=st.sets(TEXTS, max_size=3),
        topology_domains=st.just({"zone": "a"}),
        kv_transfer_domain=st.just("zone"),
        kv_transfer_enforcement=st.just("preferred"),
        kv_transfer_preferred_weight=st.floats(0, 1),
        runtime_data=st.dictionaries(TEXTS, JSON, max_size=2),
    ),
    FinishReason: TEXTS.map(FinishReason.error) | st.sampled_from([FinishReason.STOP, FinishReason.EOS]),
    MultimodalData: st.sampled_from(
        [MultimodalData("Url", "http://a/b"), MultimodalData("Decoded", {"a": 1}), MultimodalData("UuidOnly", "u")]
    ),
    ModelType: st.integers(0, 2047).map(ModelType),
    ModelInfoFile: st.builds(ModelInfoFile, st.just("hf_config_json"), FILES),
    TokenizerFile: st.builds(TokenizerFile, st.sampled_from(TokenizerFile.kinds), FILES),
    GenerationConfigFile: st.builds(GenerationConfigFile, st.just("hf_generation_config_json"), FILES),
    PromptFormatterFile: st.builds(PromptFormatterFile, st.just("hf_chat_template"), FILES, st.booleans()),
    CheckedFile: FILES,
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, read from its hints as the codec reads them."""
    if kind in SPECIAL:
        return SPECIAL[kind]
    marks = [mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, IntRange)]
    if marks:
        return st.integers(marks[0].low, marks[0].high)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if part is type(None) else values(part) for part in arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is set:
        return st.sets(values(arguments[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    return records(kind)


def records(cls: type) -> st.SearchStrategy[Any]:
    if cls in SPECIAL:
        return SPECIAL[cls]
    attrs.resolve_types(cls)
    given_fields = {
        field.name: values(field.type) for field in attrs.fields(cls) if write_rule(field) not in ("never", "rest")
    }

    def make(**given_values: Any) -> Any:
        try:
            return cls(**given_values)
        except InvalidRecord:
            reject()

    return st.builds(make, **given_fields)


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_a_record_is_read_back_as_it_was_written(cls: type, data: st.DataObject) -> None:
    record = data.draw(records(cls))
    for there, back in ((to_json, from_json), (to_msgpack, from_msgpack), (to_plain, from_plain)):
        again: Any = back(there(record), cls)
        assert again == record
        assert to_plain(again) == to_plain(record)


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=6)
@given(data=st.data())
def test_json_and_messagepack_carry_the_same_shape(cls: type, data: st.DataObject) -> None:
    record = data.draw(records(cls))
    # Keys of a map by token id are numbers in one and texts in the other, as JSON has no others.
    shape = msgspec.json.decode(msgspec.json.encode(msgspec.msgpack.decode(to_msgpack(record))))
    assert shape == msgspec.json.decode(to_json(record))


def refusal(value: Any, cls: type) -> InvalidArgument | None:
    """How a value is refused as a record; None if it is one."""
    try:
        from_plain(value, cls)
    except InvalidArgument as error:
        return error
    return None


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=25)
@given(value=JSON, data=st.data())
def test_anything_but_a_record_is_one_invalid_argument(cls: type, value: Any, data: st.DataObject) -> None:
    fields = [key_of(field) for field in attrs.fields(cls)]
    keyed = data.draw(st.dictionaries(st.sampled_from(fields), st.just(value) | JSON, max_size=4))
    for candidate in (value, keyed):
        refused = refusal(candidate, cls)
        assert refused is None or refused.message.startswith(refused.field)
        assert refused is None or cls.__name__ not in refused.message


def typed_fields(cls: type) -> list[Any]:
    attrs.resolve_types(cls)
    fields = [field for field in attrs.fields(cls) if write_rule(field) not in ("never", "rest")]
    keys = [key_of(field) for field in fields if field.type is not Any]
    return [pytest.param(cls, key, id=f"{cls.__name__}.{key}") for key in keys]


@cache
def simplest(cls: type) -> Any:
    return to_plain(find(records(cls), lambda _: True, settings=settings(phases=[Phase.generate], database=None)))


@pytest.mark.parametrize(("cls", "key"), [case for cls in RECORDS for case in typed_fields(cls)])
def test_a_value_of_no_known_kind_is_refused_at_its_field(cls: type, key: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain(simplest(cls) | {key: b"bytes are no JSON value"}, cls)
    assert refused.value.field == key


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_a_required_field_that_is_missing_is_named(cls: type) -> None:
    required = [field.name for field in attrs.fields(cls) if field.default is attrs.NOTHING]
    if not required:
        from_plain({}, cls)
        return
    with pytest.raises(InvalidArgument, match="is required") as refused:
        from_plain({}, cls)
    assert refused.value.field in required


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
    from_plain(payload, PreprocessedRequest).token_ids.append(3)
    assert payload == {"token_ids": [1, 2]}


@given(
    item=st.builds(
        Annotated,
        st.none() | records(LLMEngineOutput),
        st.none() | TEXTS,
        st.none() | TEXTS,
        st.none() | st.lists(TEXTS, max_size=2),
        st.none(),
    )
)
def test_an_item_of_a_stream_is_read_back_as_it_was_written(item: Annotated[LLMEngineOutput]) -> None:
    assert from_json(to_json(item), Annotated[LLMEngineOutput]) == item
    assert from_msgpack(to_msgpack(item), Annotated[LLMEngineOutput]) == item
    assert from_plain(to_plain(item), Annotated[LLMEngineOutput]) == item


def test_parts_of_an_item_that_are_not_set_are_not_written() -> None:
    assert to_plain(Annotated()) == {}
    assert to_plain(Annotated(id="1", comment=["c"])) == {"id": "1", "comment": ["c"]}


def test_an_error_item_is_still_the_same_error_when_read_back() -> None:
    item = from_json(to_json(Annotated[LLMEngineOutput].from_error("lost it")), Annotated[LLMEngineOutput])
    error = item.extract_error()
    assert item.is_error
    assert (type(error), str(error)) == (Unknown, "lost it")


def test_a_typed_error_of_an_item_keeps_its_class_and_chain() -> None:
    broken = Disconnected("gone", cause=InvalidArgument("bad", field="a.b"))
    item = from_msgpack(to_msgpack(Annotated[LLMEngineOutput].from_error(broken)), Annotated[LLMEngineOutput])
    assert isinstance(item.error, Disconnected)
    cause = item.error.__cause__
    assert isinstance(cause, InvalidArgument)
    assert cause.field == "a.b"


@pytest.mark.parametrize(
    ("plain", "place"),
    [
        ({"data": {"token_ids": [-1]}}, "data.token_ids[0]"),
        ({"comment": ["a", 1]}, "comment[1]"),
        ({"event": 3}, "event"),
        ({"error": "text"}, "error"),
        ({"error": {"error_type": 3}}, "error.error_type"),
        ([], ""),
    ],
)
def test_a_bad_item_names_its_place(plain: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain(plain, Annotated[LLMEngineOutput])
    assert refused.value.field == place


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
