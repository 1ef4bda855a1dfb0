"""OpenAIUpstream: how it finds out what a server can do, and what it refuses of a server that cannot."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from engines.upstream import UNKNOWN_TOKEN, IdForm, OpenAIUpstream
from pipeline.errors import (
    BackendUnknown,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    InvalidMessage,
    PenstockError,
    StreamIncomplete,
    may_migrate,
)
from pipeline.protocols import (
    FinishReason,
    GuidedDecodingOptions,
    OutputOptions,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from tests.engines.upstream.openai_worlds import FakeLlama, FakeText
from tests.engines.upstream.vllm_worlds import fake_vllm
from tests.engines.upstream.worlds import continued, outputs, prompt, running, started_on, tokens_of

started = partial(started_on, OpenAIUpstream)


# -- by ids


async def test_a_server_that_returns_ids_is_an_engine_of_ids() -> None:
    async with fake_vllm(generates=False) as server, started(server) as engine:
        assert engine.ids is IdForm.TOKEN_IDS
        request = prompt(5, sampling_options=SamplingOptions(n=2), output_options=OutputOptions(logprobs=1))
        found = await outputs(engine, request)
        assert "request_id" not in server.received[-1].json, "a field of vLLM, which strict servers refuse"
        assert tokens_of(found) == continued([5, 6, 7], 5)
        assert all(output.log_probs for output in found if output.token_ids)


async def test_llama_cpp_is_an_engine_of_ids() -> None:
    async with running(FakeLlama) as server, started(server) as engine:
        facts = engine.known
        assert (facts.model, facts.root) == ("smol.gguf", "/models/smol.gguf")
        assert (facts.context_length, facts.max_num_seqs) == (4096, 4)
        found = await outputs(engine, prompt(5, output_options=OutputOptions(logprobs=2)))
    assert tokens_of(found) == continued([5, 6, 7], 5)
    assert found[0].log_probs == [-0.5]
    assert [one.token_id for one in (found[0].top_logprobs or [[]])[0]] == [found[0].token_ids[0] + at for at in (0, 1)]
    assert found[-1].finish_reason == FinishReason.LENGTH
    usage = found[-1].completion_usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (8, 2)


async def test_an_answer_of_llama_cpp_that_ends_by_itself_is_a_stop() -> None:
    async with running(FakeLlama) as server, started(server) as engine:
        found = await outputs(engine, prompt(None))
    assert (len(tokens_of(found)), found[-1].finish_reason) == (16, FinishReason.STOP)


async def test_the_options_of_a_request_have_llama_cpps_names() -> None:
    sampling = SamplingOptions(temperature=0.5, repetition_penalty=1.1, guided_decoding=GuidedDecodingOptions(json={}))
    stop = StopConditions(max_tokens=3, stop=["\n"])
    async with running(FakeLlama) as server, started(server) as engine:
        await outputs(engine, PreprocessedRequest([5], stop_conditions=stop, sampling_options=sampling))
        body = server.requests("/completion")[-1].json
    wanted = {"n_predict": 3, "stop": ["\n"], "temperature": 0.5, "repeat_penalty": 1.1, "json_schema": {}}
    assert (wanted | {"prompt": [5], "return_tokens": True, "cache_prompt": True}).items() <= body.items()


ABSENT: list[tuple[PreprocessedRequest, str]] = [
    (prompt(3, sampling_options=SamplingOptions(n=2)), "sampling_options.n"),
    (prompt(3, routing=RoutingHints(lora_name="x")), "routing.lora_name"),
    (prompt(3, routing=RoutingHints(cache_namespace="x")), "routing.cache_salt"),
    (PreprocessedRequest([5], stop_conditions=StopConditions(min_tokens=2)), "stop_conditions.min_tokens"),
    (PreprocessedRequest([5], stop_conditions=StopConditions(stop_token_ids=[2])), "stop_conditions.stop_token_ids"),
    (PreprocessedRequest([5], stop_conditions=StopConditions(ignore_eos=True)), "stop_conditions.max_tokens"),
    (prompt(3, sampling_options=SamplingOptions(best_of=2)), "sampling_options.best_of"),
    (prompt(3, sampling_options=SamplingOptions(length_penalty=0.5)), "sampling_options.length_penalty"),
    (
        PreprocessedRequest([5], stop_conditions=StopConditions(max_thinking_tokens=2)),
        "stop_conditions.max_thinking_tokens",
    ),
    (
        prompt(3, sampling_options=SamplingOptions(guided_decoding=GuidedDecodingOptions(regex="a"))),
        "sampling_options.guided_decoding.regex",
    ),
]


@pytest.mark.parametrize(("request_", "name"), ABSENT, ids=[name for _, name in ABSENT])
async def test_what_llama_cpp_has_no_option_for_is_refused_by_name(request_: PreprocessedRequest, name: str) -> None:
    async with running(FakeLlama) as server, started(server) as engine:
        with pytest.raises(InvalidArgument) as caught:
            await outputs(engine, request_)
        assert caught.value.field == name
        assert server.requests("/completion") == []


BROKEN: list[tuple[Any, type[PenstockError]]] = [
    ("{", InvalidMessage),
    ({"content": "x", "tokens": [], "stop": False}, InvalidMessage),
    ({"content": "x", "tokens": ["7"], "stop": False}, InvalidMessage),
    ({"error": {"code": 500, "message": "it broke"}}, BackendUnknown),
    ({"error": {"code": 400, "message": "the request exceeds the context"}}, InvalidArgument),
]


@pytest.mark.parametrize(("event", "kind"), BROKEN)
async def test_a_broken_answer_of_llama_cpp_raises_its_error(event: Any, kind: type[PenstockError]) -> None:
    async with running(FakeLlama, faults={0: event}) as server, started(server) as engine:
        with pytest.raises(kind):
            await outputs(engine)


async def test_a_llama_cpp_that_dies_breaks_the_stream_for_another_to_go_on() -> None:
    async with running(FakeLlama, token_s=0.01) as server, started(server) as engine:
        found: list[int] = []
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                with pytest.raises((Disconnected, StreamIncomplete, EngineShutdown)) as caught:
                    await outputs(engine, prompt(100), into=found)
                assert may_migrate(caught.value)

            tasks.start_soon(read)
            await anyio.sleep(0.055)
            server.kill()
        assert found == continued([5, 6, 7], 5)


# -- in text


async def test_a_server_in_text_gives_texts_and_counted_tokens() -> None:
    async with running(FakeText) as server, started(server) as engine:
        assert engine.ids is IdForm.NONE
        found = await outputs(engine, prompt(3))
    assert [output.text for output in found[:3]] == ["0 ", "1 ", "2 "]
    assert tokens_of(found) == [UNKNOWN_TOKEN] * 3
    assert found[-1].finish_reason == FinishReason.LENGTH


async def test_a_break_behind_a_text_without_ids_is_not_continued_elsewhere() -> None:
    async with running(FakeText, breaks_at=2) as server, started(server) as engine:
        with pytest.raises(BackendUnknown, match="no other worker can go on without ids") as caught:
            await outputs(engine, prompt(3))
        assert not may_migrate(caught.value)
    async with running(FakeText, breaks_at=0) as server, started(server) as engine:
        with pytest.raises(Disconnected) as before:
            await outputs(engine, prompt(3))
        assert may_migrate(before.value)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"sampling_options": SamplingOptions(n=2)}, "sampling_options.n"),
        ({"output_options": OutputOptions(logprobs=1)}, "output_options.logprobs"),
        (
            {"sampling_options": SamplingOptions(guided_decoding=GuidedDecodingOptions(choice=["a"]))},
            "sampling_options.guided_decoding",
        ),
    ],
)
async def test_what_a_server_in_text_cannot_give_is_refused_by_name(more: dict[str, Any], name: str) -> None:
    async with running(FakeText) as server, started(server) as engine:
        with pytest.raises(InvalidArgument) as caught:
            await outputs(engine, prompt(3, **more))
        assert caught.value.field == name


async def test_a_server_that_takes_no_ids_is_refused_at_the_start() -> None:
    async with running(FakeText, takes_ids=False) as server:
        with pytest.raises(InvalidArgument, match="takes no prompts as token ids") as caught:
            async with started(server):
                pass
        assert caught.value.field == "upstream"


async def test_a_server_that_knows_nvext_sends_its_ids_by_it() -> None:
    async with running(FakeText, owner="nvidia") as server, started(server) as engine:
        assert engine.ids is IdForm.NVEXT
        await outputs(engine, prompt(3))
        assert "completion_token_ids" in server.requests("/v1/completions")[-1].json["nvext"]["extra_fields"]


async def test_a_server_without_a_list_of_models_needs_a_name() -> None:
    async with running(FakeText, has_list=False) as server:
        async with started(server, model="mine") as engine:
            assert engine.known.model == "mine"
        with pytest.raises(InvalidArgument, match="name one"):
            async with started(server):
                pass
