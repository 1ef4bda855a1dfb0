"""Every record and item of a stream is read back as it was written, and what is no record is refused."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
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
from pipeline.errors import Disconnected, InvalidArgument, Unknown
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
from pipeline.protocols.output import EmbeddingsEngineOutput, PromptLogprobEntry
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
    if origin in (list, Sequence):
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


@cache
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
@settings(max_examples=settings().max_examples // 4)
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
@settings(max_examples=settings().max_examples // 4)
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
