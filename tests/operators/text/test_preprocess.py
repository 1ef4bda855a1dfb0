"""Preprocess as a stage: the request it makes, the budget it holds, the annotations it adds."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from operators import ByteTokenizer, Model, Preprocess
from operators.text import PROMPT_TOKENS
from pipeline import Annotated, AnyContext, Context, InvalidArgument, ResponseStream, Segment, Unknown, link
from pipeline.protocols import BackendOutput, OutputOptions, PreprocessedRequest, StopConditions
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.protocols.routing import RouterParams
from pipeline.testing import ScriptedEngine, check_operator
from pipeline.wire import from_plain

EOS = ByteTokenizer.eos_token_id
ITEMS: list[Annotated[Any]] = [Annotated(BackendOutput([i], ["x"], "x")) for i in range(40)]


def chat(**fields: Any) -> ChatCompletionRequest:
    plain = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return from_plain(plain, ChatCompletionRequest)


def text(**fields: Any) -> CompletionRequest:
    return from_plain({"model": "m", "prompt": "hi", **fields}, CompletionRequest)


async def preprocess(
    request: ChatCompletionRequest | CompletionRequest, model: Model | None = None, **options: Any
) -> tuple[PreprocessedRequest, ResponseStream[Any], AnyContext]:
    """The request the next stage got, the caller's stream, and the caller's context."""
    below = ScriptedEngine(ITEMS)
    graph: Segment[Any, Any] = link(Preprocess(model or Model.byte_level("m"), **options), below)
    context = Context(request)
    stream = await graph.generate(context)
    payload: PreprocessedRequest = below.requests[0].payload
    return payload, stream, context


async def preprocessed(
    request: ChatCompletionRequest | CompletionRequest, model: Model | None = None, **options: Any
) -> PreprocessedRequest:
    payload, stream, _ = await preprocess(request, model, **options)
    await stream.aclose()
    return payload


@pytest.mark.parametrize("request_", [chat(), text(), text(prompt=[104, 105]), text(prompt=["hi"])])
async def test_every_kind_of_prompt_becomes_tokens(request_: ChatCompletionRequest | CompletionRequest) -> None:
    assert await preprocessed(request_) == PreprocessedRequest(
        list(b"hi"),
        model="m",
        stop_conditions=StopConditions(stop_token_ids_hidden=[EOS]),
        output_options=OutputOptions(skip_special_tokens=True),
        eos_token_ids=[EOS],
    )


async def test_ignoring_the_end_drops_every_stop() -> None:
    payload = await preprocessed(chat(ignore_eos=True, stop="x"))
    assert payload.eos_token_ids == []
    assert payload.stop_conditions == StopConditions(ignore_eos=True)


async def test_the_tokens_of_the_request_are_its_own() -> None:
    for request in (text(prompt=[1, 2]), chat(nvext={"token_data": [1, 2]})):
        payload = await preprocessed(request)
        assert isinstance(payload.token_ids, list)
        payload.token_ids.append(3)
        assert (await preprocessed(request)).token_ids == [1, 2]


@pytest.mark.parametrize(
    ("request_", "field", "token_id"),
    [
        (text(prompt=[1, 258]), "prompt[1]", 258),
        (text(prompt=[[4_294_967_295]]), "prompt[0]", 4_294_967_295),
        (text(prompt="hi", nvext={"token_data": [1, 2, 999_999]}), "nvext.token_data[2]", 999_999),
        (chat(nvext={"token_data": [258], "annotations": ["formatted_prompt"]}), "nvext.token_data[0]", 258),
    ],
)
async def test_a_token_id_that_the_model_does_not_know_is_refused_with_its_place(
    request_: ChatCompletionRequest | CompletionRequest, field: str, token_id: int
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await preprocessed(request_)
    assert caught.value.field == field
    name, _, place = field.removesuffix("]").rpartition("[")
    assert str(caught.value) == f"{name}: {token_id} at index {place} is no token id of model m"


async def test_ids_at_the_edge_of_the_vocabulary_and_those_of_an_engine_that_takes_any_pass() -> None:
    assert (await preprocessed(text(prompt=[0, 257]))).token_ids == [0, 257]
    lenient = evolve(Model.byte_level("m"), checks_token_ids=False)
    assert (await preprocessed(text(prompt=[999_999]), lenient)).token_ids == [999_999]


@pytest.mark.parametrize("prompt", [[-1], [2**32], [[1], [-1]], [True], [1.5]])
def test_a_prompt_of_what_cannot_be_token_ids_is_refused_when_it_is_read(prompt: Any) -> None:
    with pytest.raises(InvalidArgument):
        text(prompt=prompt)


async def test_extensions_ride_along() -> None:
    nvext = {"request_timestamp_ms": 5.0, "router": {"ttft_target": 9.0}, "annotations": ["query_instance_id:x"]}
    payload = await preprocessed(chat(nvext=nvext, mm_processor_kwargs={"a": 1}, logit_bias={"1": 1}))
    assert payload.request_timestamp_ms == 5.0
    assert payload.router == RouterParams(ttft_target=9.0)
    assert payload.get_annotation_value("query_instance_id") == "x"
    assert payload.mm_processor_kwargs == {"a": 1}
    assert payload.extra_args == {"logit_bias": {"1": 1}}


async def test_embeddings_ride_along_without_a_budget() -> None:
    embeds = "A" * 200
    payload = await preprocessed(text(prompt=None, prompt_embeds=embeds), Model.byte_level("m", context_length=1))
    assert (payload.prompt_embeds, payload.token_ids) == (embeds, [])


async def test_ids_of_the_extension_replace_the_tokenizers() -> None:
    no_template = evolve(Model.byte_level("m"), chat_template=None)
    payload = await preprocessed(chat(nvext={"token_data": [1, 2]}), no_template)
    assert payload.token_ids == [1, 2]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (chat(temperature=9), "temperature"),
        (chat(unheard_of=1), "unsupported"),
        (text(prompt=["a", "b"]), "prompt"),
        (chat(guided_regex="a", guided_grammar="b"), "guided_decoding"),
    ],
)
async def test_a_wrong_request_is_refused_with_its_field_and_goes_nowhere(
    request_: ChatCompletionRequest | CompletionRequest, field: str
) -> None:
    below = ScriptedEngine(ITEMS)
    with pytest.raises(InvalidArgument) as caught:
        await link(Preprocess(Model.byte_level()), below).generate(Context(request_))
    assert caught.value.field == field
    assert below.requests == []


async def test_unknown_fields_may_be_let_through() -> None:
    assert (await preprocessed(chat(unheard_of=1), ignore_unsupported=True)).token_ids == list(b"hi")


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [({}, 8), ({"max_tokens": 3}, 3), ({"max_tokens": 8}, 8)],
)
async def test_what_the_context_leaves_is_the_default_limit(fields: dict[str, Any], max_tokens: int) -> None:
    payload = await preprocessed(chat(**fields), Model.byte_level("m", context_length=10))
    assert payload.stop_conditions.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("fields", "context_length", "words"),
    [
        ({}, 2, "maximum context length is 2 tokens. However, your messages resulted in 2 tokens"),
        ({"max_tokens": 9}, 10, "at most 10 combined .* asks for 9 output tokens"),
    ],
)
async def test_more_than_the_context_is_refused(fields: dict[str, Any], context_length: int, words: str) -> None:
    model = Model.byte_level("m", context_length=context_length)
    for request, place in ((chat(**fields), "messages"), (text(**fields), "prompt")):
        with pytest.raises(InvalidArgument, match=words) as caught:
            await preprocessed(request, model)
        assert caught.value.field == place


async def test_an_answer_has_at_least_one_token() -> None:
    model = evolve(Model.byte_level("m", context_length=2), reject_prompt_overflow=False)
    with pytest.raises(InvalidArgument, match="at most 2 combined"):
        await preprocessed(chat(), model)


@pytest.mark.parametrize(("fields", "max_tokens"), [({}, None), ({"max_tokens": 9}, 9)])
@pytest.mark.parametrize("context_length", [2, 100])
async def test_an_overflow_can_be_the_engines_business(
    fields: dict[str, Any], max_tokens: int | None, context_length: int
) -> None:
    model = Model.byte_level("m", context_length=context_length)
    lenient = evolve(model, reject_prompt_overflow=False, reject_total_overflow=False)
    assert (await preprocessed(chat(**fields), lenient)).stop_conditions.max_tokens == max_tokens


async def test_without_annotations_the_stream_is_the_next_stages_own() -> None:
    below = ScriptedEngine(ITEMS)
    taken: list[ResponseStream[Any]] = []

    class Spy(ScriptedEngine):
        async def generate(self, request: AnyContext) -> ResponseStream[Any]:
            taken.append(await below.generate(request))
            return taken[0]

    async with await link(Preprocess(Model.byte_level()), Spy([])).generate(Context(chat())) as stream:
        assert stream is taken[0]


async def test_annotations_come_first_and_in_order() -> None:
    wanted = ["token_ids", "formatted_prompt", "request_id", "of no meaning"]
    _, stream, context = await preprocess(chat(nvext={"annotations": wanted}))
    items = await stream.collect()
    assert [(item.event, item.comment) for item in items[:3]] == [
        ("request_id", [f'"{context.id}"']),
        ("formatted_prompt", ['"hi"']),
        ("token_ids", ["[104,105]"]),
    ]
    assert items[3:] == ITEMS


async def test_ids_that_were_given_are_not_announced() -> None:
    nvext = {"annotations": ["token_ids", "formatted_prompt"], "token_data": [1, 2]}
    _, stream, _ = await preprocess(chat(nvext=nvext))
    events = [item.event for item in await stream.collect() if item.event]
    assert events == ["formatted_prompt"]


async def test_a_prompt_in_ids_has_no_text_to_announce() -> None:
    _, stream, _ = await preprocess(text(prompt=[1], nvext={"annotations": ["token_ids", "formatted_prompt"]}))
    assert [item.event for item in await stream.collect() if item.event] == ["token_ids"]


@pytest.mark.parametrize("annotations", [[], ["formatted_prompt", "token_ids"]])
async def test_the_operator_contract_holds(annotations: list[str]) -> None:
    await check_operator(
        lambda: Preprocess(Model.byte_level()),
        request=chat(nvext={"annotations": annotations}),
        items=ITEMS,
        bad_request=chat(temperature=9),
    )


async def test_the_length_of_the_prompt_is_recorded_for_the_usage() -> None:
    request = Context(CompletionRequest(model="echo", prompt="four"))
    await (await (Preprocess(Model.byte_level()) >> ScriptedEngine([])).generate(request)).collect()
    assert request.registry.get(PROMPT_TOKENS, int) == 4


class Panic(BaseException):
    """As a Rust library raises it."""


class Panics(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        raise Panic("index out of bounds")


async def test_whatever_a_tokenizer_raises_is_an_error_of_the_tree() -> None:
    model = evolve(Model.byte_level("m"), tokenizer=Panics())
    with pytest.raises(Unknown, match="Panic: index out of bounds") as failed:
        await preprocessed(chat(), model)
    assert isinstance(failed.value.__cause__, Panic)
