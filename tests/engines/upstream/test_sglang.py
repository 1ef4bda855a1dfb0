"""SglangUpstream on a simulated server: tokens in both forms, options, errors, stops, restarts."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from attrs import evolve

from engines import run_conformance
from engines.adapter import RequestAdapter
from engines.upstream import SglangUpstream
from engines.upstream.sglang_answer import SglangAnswer
from pipeline import Context, InvalidArgument, PenstockError, WorkerOverloaded
from pipeline.errors import (
    BackendUnknown,
    CannotConnect,
    Disconnected,
    EngineShutdown,
    InvalidMessage,
    StreamIncomplete,
)
from pipeline.protocols import (
    FinishReason,
    GuidedDecodingOptions,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from tests.engines.upstream.sglang_worlds import URL, FakeSglang, fake_sglang, started_sglang
from tests.engines.upstream.wire import Line
from tests.engines.upstream.worlds import as_event, continued, outputs, prompt, tokens_of

FORMS = pytest.mark.parametrize("is_incremental", [False, True], ids=["cumulative", "incremental"])
PROMPT = [5, 6, 7]


async def body_of(request: PreprocessedRequest, **server: Any) -> Any:
    """Return the body that the server received for a request."""
    async with fake_sglang(**server) as fake, started_sglang(fake) as engine:
        await outputs(engine, request)
        return fake.requests("/generate")[0].json


# -- tokens


@FORMS
@pytest.mark.parametrize("tokens_per_chunk", [1, 3])
async def test_each_token_comes_once_in_both_forms_of_an_answer(is_incremental: bool, tokens_per_chunk: int) -> None:
    async with (
        fake_sglang(is_incremental=is_incremental, tokens_per_chunk=tokens_per_chunk) as fake,
        started_sglang(fake) as engine,
    ):
        found = await outputs(engine, prompt(7))
    assert tokens_of(found) == continued(PROMPT, 7)
    assert found[-1].finish_reason == FinishReason.LENGTH
    usage = found[-1].completion_usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 7, 10)


@FORMS
async def test_the_form_is_found_by_the_count_even_if_the_server_shows_the_other_one(is_incremental: bool) -> None:
    info = {"incremental_streaming_output": not is_incremental}
    async with fake_sglang(is_incremental=is_incremental, info=info) as fake, started_sglang(fake) as engine:
        assert tokens_of(await outputs(engine, prompt(7))) == continued(PROMPT, 7)


@FORMS
async def test_a_server_that_does_not_count_is_believed_about_its_form(is_incremental: bool) -> None:
    async with fake_sglang(is_incremental=is_incremental, counts=False) as fake, started_sglang(fake) as engine:
        assert tokens_of(await outputs(engine, prompt(7))) == continued(PROMPT, 7)


@FORMS
async def test_choices_are_told_apart(is_incremental: bool) -> None:
    request = prompt(4, sampling_options=SamplingOptions(n=3))
    async with fake_sglang(is_incremental=is_incremental) as fake, started_sglang(fake) as engine:
        found = await outputs(engine, request)
    assert tokens_of(found, 0) == continued(PROMPT, 4)
    assert tokens_of(found, 2) == continued([*PROMPT, 2], 4)
    assert sum(output.finish_reason is not None for output in found) == 3
    assert found[-1].completion_usage is not None
    assert found[-1].completion_usage.completion_tokens == 12


@FORMS
async def test_each_token_has_its_log_probabilities(is_incremental: bool) -> None:
    request = prompt(5, output_options=OutputOptions(logprobs=2))
    async with fake_sglang(is_incremental=is_incremental, tokens_per_chunk=2) as fake, started_sglang(fake) as engine:
        found = [output for output in await outputs(engine, request) if output.token_ids]
    for output in found:
        assert output.log_probs == [-0.5] * len(output.token_ids)
        assert output.top_logprobs is not None
        assert [[one.token_id for one in top] for top in output.top_logprobs] == [
            [token, token + 1] for token in output.token_ids
        ]
        assert [one.rank for one in output.top_logprobs[0]] == [1, 2]


async def test_an_answer_that_ends_by_itself_has_the_stop_that_was_met() -> None:
    async with fake_sglang() as fake, started_sglang(fake) as engine:
        found = await outputs(engine, prompt(None))
    assert len(tokens_of(found)) == 16
    assert found[-1].finish_reason == FinishReason.STOP
    assert found[-1].stop_reason == 2


# -- the request


async def test_without_a_limit_the_server_goes_on_as_long_as_it_can() -> None:
    body = await body_of(prompt(None))
    assert body["sampling_params"]["max_new_tokens"] is None


async def test_the_options_have_the_names_of_the_server() -> None:
    stop = StopConditions(max_tokens=9, min_tokens=2, stop=["end"], stop_token_ids=[4], stop_token_ids_hidden=[2])
    sampling = SamplingOptions(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7, presence_penalty=0.1, frequency_penalty=0.2
    )
    body = await body_of(PreprocessedRequest(PROMPT, stop_conditions=stop, sampling_options=sampling))
    assert body["input_ids"] == PROMPT
    assert body["stream"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "stop": ["end"],
        "stop_token_ids": [2, 4],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "sampling_seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
    }


async def test_adapter_cache_session_and_priority_are_passed_through() -> None:
    hints = RoutingHints(lora_name="poet", cache_namespace="tenant", priority=3)
    info = {"enable_priority_scheduling": True}
    async with fake_sglang(info=info, adapters=("poet",)) as fake, started_sglang(fake) as engine:
        context = Context(prompt(routing=hints), metadata={"x-dynamo-session-id": "s-1"})
        async with await RequestAdapter(engine).generate(context) as stream:
            assert [item.error async for item in stream if item.error is not None] == []
        body = fake.requests("/generate")[0].json
    assert (body["lora_path"], body["extra_key"], body["priority"], body["session_id"]) == ("poet", "tenant", 3, "s-1")


@pytest.mark.parametrize(
    ("info", "sent"),
    [
        ({}, None),
        ({"enable_priority_scheduling": True}, 3),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, -3),
    ],
)
async def test_a_priority_is_sent_only_where_the_server_has_priorities(info: dict[str, Any], sent: int | None) -> None:
    body = await body_of(prompt(routing=RoutingHints(priority=3)), info=info)
    assert body.get("priority") == sent


@pytest.mark.parametrize(("ranks", "sent"), [(1, None), (4, 2)])
async def test_the_rank_is_sent_to_a_server_with_several(ranks: int, sent: int | None) -> None:
    body = await body_of(prompt(routing=RoutingHints(dp_rank=2)), info={"dp_size": ranks})
    assert body.get("routed_dp_rank") == sent


async def test_stop_strings_are_left_to_the_stages_here_if_the_server_has_no_tokenizer() -> None:
    request = PreprocessedRequest(PROMPT, stop_conditions=StopConditions(max_tokens=2, stop=["x"]))
    assert "stop" not in (await body_of(request, info={"skip_tokenizer_init": True}))["sampling_params"]


@pytest.mark.parametrize(
    ("guided", "sent"),
    [
        ({"json": {"type": "object"}}, {"json_schema": '{"type":"object"}'}),
        ({"json": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["yes", "no.", "(x)"]}, {"regex": r"(yes|no\.|\(x\))"}),
        ({"grammar": "root ::= 'a'"}, {"ebnf": "root ::= 'a'"}),
        ({"structural_tag": {"tag": 1}}, {"structural_tag": '{"tag":1}'}),
    ],
)
async def test_a_guided_form_has_its_name_at_the_server(guided: dict[str, Any], sent: dict[str, Any]) -> None:
    request = prompt(2, sampling_options=SamplingOptions(guided_decoding=GuidedDecodingOptions(**guided)))
    params = (await body_of(request))["sampling_params"]
    assert {name: params[name] for name in sent} == sent


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"token_ids": []}, "token_ids"),
        ({"sampling_options": SamplingOptions(use_beam_search=True)}, "sampling_options.use_beam_search"),
        ({"sampling_options": SamplingOptions(n=2, best_of=3)}, "sampling_options.best_of"),
        ({"sampling_options": SamplingOptions(length_penalty=2.0)}, "sampling_options.length_penalty"),
        ({"output_options": OutputOptions(prompt_logprobs=1)}, "output_options.prompt_logprobs"),
        ({"stop_conditions": StopConditions(max_thinking_tokens=1)}, "stop_conditions.max_thinking_tokens"),
    ],
)
async def test_what_the_server_has_no_option_for_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    async with fake_sglang() as fake, started_sglang(fake) as engine:
        with pytest.raises(InvalidArgument) as refused:
            await outputs(engine, evolve(PreprocessedRequest(PROMPT), **fields))
        assert refused.value.field == named
        assert fake.begun == 0


# -- errors


@pytest.mark.parametrize("token_ids", [[99_999], [1] * 5000])
async def test_a_request_that_the_server_refuses_within_its_answer_is_wrong(token_ids: list[int]) -> None:
    async with fake_sglang() as fake, started_sglang(fake) as engine:
        with pytest.raises(InvalidArgument):
            await outputs(engine, PreprocessedRequest(token_ids))


def event(value: Any) -> Any:
    """A fault: another event."""

    async def send(line: Line) -> None:
        await line.event(value)

    return send


async def cut(line: Line) -> None:
    """A fault: the connection breaks."""
    await line.wire.aclose()


def chunk(ids: Any, reason: Any = None, **meta: Any) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": reason} | meta}


def failed(code: int | None) -> dict[str, Any]:
    return {"type": "abort", "message": "out of luck", "status_code": code}


@FORMS
@pytest.mark.parametrize(
    ("number", "fault", "error"),
    [
        (0, event({"error": {"message": "no", "code": 400}}), InvalidArgument),
        (0, event({"error": {"message": "full", "code": 503}}), WorkerOverloaded),
        (0, event({"error": {"message": "broken", "code": 500}}), BackendUnknown),
        (2, event({"error": {"message": "no", "code": 400}}), BackendUnknown),
        (0, event(chunk([], failed(400))), InvalidArgument),
        (0, event(chunk([], failed(503))), WorkerOverloaded),
        (2, event(chunk([], failed(500), completion_tokens=2)), BackendUnknown),
        (2, event(chunk([1], failed(None), completion_tokens=2)), EngineShutdown),
        (0, event(chunk([], "abort")), EngineShutdown),
        (2, cut, Disconnected),
        (0, cut, Disconnected),
        (2, event("[DONE]"), StreamIncomplete),
        (0, event("[DONE]"), StreamIncomplete),
        (2, event("{garbled"), InvalidMessage),
        (2, event([1, 2]), InvalidMessage),
        (2, event({}), InvalidMessage),
        (2, event(chunk("text")), InvalidMessage),
        (2, event(chunk([1, 2, "3"], completion_tokens=3)), InvalidMessage),
        (2, event(chunk([-1], completion_tokens=3)), InvalidMessage),
        (2, event(chunk([1, 2, 3, 4, 5], completion_tokens=3)), InvalidMessage),
        (2, event(chunk([], completion_tokens=1)), InvalidMessage),
        (2, event(chunk([1], completion_tokens="2")), InvalidMessage),
        (2, event(chunk([1, 2, 3], completion_tokens=3) | {"index": 1}), InvalidMessage),
        (1, event(chunk([1, 2, 3], completion_tokens=9)), InvalidMessage),
    ],
)
async def test_a_bad_event_is_a_typed_error(
    is_incremental: bool, number: int, fault: Any, error: type[PenstockError]
) -> None:
    faults = {number: fault}
    async with fake_sglang(is_incremental=is_incremental, faults=faults) as fake, started_sglang(fake) as engine:
        with pytest.raises(error) as raised:
            await outputs(engine)
    assert type(raised.value) is error


@pytest.mark.parametrize("fault", ["lost", "twice"])
async def test_a_chunk_that_is_lost_or_comes_twice_is_an_error_where_each_has_only_what_is_new(fault: str) -> None:
    tokens = continued(PROMPT, 3)
    sent = {"lost": chunk(tokens[2:], completion_tokens=3), "twice": chunk(tokens[:1], completion_tokens=1)}[fault]
    async with fake_sglang(is_incremental=True, faults={1: event(sent)}) as fake, started_sglang(fake) as engine:
        with pytest.raises(InvalidMessage, match="the server counted 3 tokens"):
            await outputs(engine, prompt(3))


@pytest.mark.parametrize("fault", ["lost", "twice"])
async def test_where_each_chunk_has_all_tokens_the_next_one_brings_what_was_lost(fault: str) -> None:
    tokens = continued(PROMPT, 3)
    sent = {"lost": chunk(tokens, completion_tokens=3), "twice": chunk(tokens[:1], completion_tokens=1)}[fault]
    async with fake_sglang(faults={1: event(sent)}) as fake, started_sglang(fake) as engine:
        assert tokens_of(await outputs(engine, prompt(3))) == tokens


async def test_tokens_that_are_not_those_of_the_chunk_before_are_an_error() -> None:
    other = chunk([1, 2, 3], completion_tokens=3)
    async with fake_sglang(faults={2: event(other)}) as fake, started_sglang(fake) as engine:
        with pytest.raises(InvalidMessage, match="another token"):
            await outputs(engine)


@FORMS
@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_an_answer_that_arrives_in_pieces_of_any_size_is_read_whole(is_incremental: bool, size: int) -> None:
    answer, found = SglangAnswer(1, 3), list[LLMEngineOutput]()
    tokens = continued(PROMPT, 5)
    events = [
        chunk(
            tokens[n : n + 1] if is_incremental else tokens[: n + 1],
            {"type": "stop"} if n == 4 else None,
            completion_tokens=n + 1,
        )
        for n in range(5)
    ]
    sent = b"".join([*(as_event(one) for one in events), as_event("[DONE]")])
    for begin in range(0, len(sent), size):
        found += answer.feed(sent[begin : begin + size])
    assert tokens_of(found) == tokens
    assert answer.is_done
    assert [*answer.end(whole=True)] == []


async def test_tokens_before_an_error_are_not_lost_though_they_came_with_it() -> None:
    answer = SglangAnswer(1, 3)
    both = as_event(chunk([8], completion_tokens=1)) + as_event({"error": {"message": "no", "code": 500}})
    found = iter(answer.feed(both))
    assert next(found).token_ids == [8]
    with pytest.raises(BackendUnknown):
        next(found)


async def test_log_probabilities_of_other_tokens_are_an_error() -> None:
    wrong = chunk([1, 2], completion_tokens=2, output_token_logprobs=[[-1.0, 1, None], [-1.0, 9, None]])
    async with fake_sglang(faults={0: event(wrong)}) as fake, started_sglang(fake) as engine:
        with pytest.raises(InvalidMessage, match="log probabilities of others"):
            await outputs(engine, prompt(4, output_options=OutputOptions(logprobs=1)))


async def test_a_server_that_is_killed_in_mid_answer_breaks_the_stream() -> None:
    async with fake_sglang() as fake, started_sglang(fake) as engine, anyio.create_task_group() as tasks:

        async def kill() -> None:
            await anyio.sleep(0.035)
            fake.kill()

        tasks.start_soon(kill)
        with pytest.raises(Disconnected):
            await outputs(engine, prompt(50))


async def test_a_server_that_is_down_cannot_be_started() -> None:
    async with fake_sglang() as fake:
        fake.kill()
        with pytest.raises(CannotConnect):
            async with started_sglang(fake):
                pass


# -- stop and kill


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_stop_frees_the_servers_slot_at_once(how: str) -> None:
    async with fake_sglang(token_s=100.0) as fake, started_sglang(fake) as engine:
        context = Context(prompt(50))
        found = []
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                async with await RequestAdapter(engine).generate(context) as stream:
                    found.extend([item async for item in stream])

            tasks.start_soon(read)
            await anyio.sleep(0.5)
            assert len(fake.running) == 1
            getattr(context, how)()
            await anyio.sleep(0.1)
            assert fake.running == {}
    assert [item.data.finish_reason for item in found if item.data] == (
        [FinishReason.CANCELLED] if how == "stop" else []
    )


async def test_a_stopped_request_whose_reader_stands_is_aborted_by_the_route() -> None:
    async with fake_sglang() as fake, started_sglang(fake) as engine:
        context, rest = Context(prompt(500)), []
        async with anyio.create_task_group() as tasks:
            adapter = RequestAdapter(engine, spawn=lambda run: tasks.start_soon(run))
            async with await adapter.generate(context) as stream:
                await anext(stream)
                context.stop()
                await anyio.sleep(0.2)
                assert fake.running == {}
                rest += [item async for item in stream]
    assert rest[-1].data is not None
    assert rest[-1].data.finish_reason == FinishReason.CANCELLED


async def test_a_dropped_stream_closes_its_connection() -> None:
    async with fake_sglang() as fake, started_sglang(fake) as engine:
        async with await RequestAdapter(engine).generate(Context(prompt(500))) as stream:
            await anext(stream)
        await anyio.sleep(0.1)
        assert fake.running == {}


# -- discovery and restarts


KV_EVENTS = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv",
    "block_size": 32,
    "dp_size": 2,
    "replay_endpoint_port_base": 5600,
    "load_endpoint_port_base": 5700,
    "load_topic": "load",
}


async def test_what_the_server_has_is_found_at_its_start() -> None:
    info = {"kv_events": KV_EVENTS, "max_running_requests": 64}
    async with fake_sglang(info=info, adapters=("poet",)) as fake, started_sglang(fake) as engine:
        facts, config = engine.known, await engine.start(2)
    assert (facts.model, facts.adapters, facts.context_length) == ("tiny", ("poet",), 4096)
    assert (facts.block_size_tokens, facts.total_blocks, facts.max_num_seqs) == (32, 256, 64)
    assert [*facts.ranks] == [0, 1]
    assert facts.event_sources[1].endpoint == "tcp://gpu-1:5558"
    assert facts.event_sources[1].replay_endpoint == "tcp://gpu-1:5601"
    assert facts.event_sources[1].topic == "kv"
    assert facts.load_sources == {0: "tcp://gpu-1:5700", 1: "tcp://gpu-1:5701"}
    assert facts.bootstrap_host is None
    assert (config.kv_cache_block_size, config.data_parallel_size) == (32, 2)


@pytest.mark.parametrize(
    ("kv_events", "endpoints"),
    [
        (None, []),
        ("broken", []),
        ({"publisher": "null"}, []),
        ({"publisher": "zmq", "endpoint_port_base": "5557"}, []),
        ({"publisher": "zmq", "endpoint_port_base": 5557}, ["tcp://gpu-1:5557"]),
        ({"publisher": "zmq", "endpoint_port_base": 5557, "endpoint_host": "0.0.0.0"}, ["tcp://gpu-1:5557"]),
        ({"publisher": "zmq", "endpoint_port_base": 5557, "endpoint_host": "10.0.0.9"}, ["tcp://10.0.0.9:5557"]),
    ],
)
async def test_the_events_come_from_the_servers_own_host_unless_it_names_one(
    kv_events: Any, endpoints: list[str]
) -> None:
    async with fake_sglang(info={"kv_events": kv_events}) as fake, started_sglang(fake) as engine:
        sources = engine.known.event_sources
    assert [source.endpoint for source in sources.values()] == endpoints


async def test_an_older_server_has_another_name_for_the_page() -> None:
    class Older(FakeSglang):
        async def answer(self, line: Line, received: Any) -> None:
            if received.path == "/server_info":
                await line.whole(404, {"detail": "Not Found"})
                return
            if received.path == "/get_server_info":
                received.path = "/server_info"
            await super().answer(line, received)

    async with fake_sglang() as fake:
        older = Older(fake.tasks)
        async with started_sglang(older) as engine:
            assert engine.known.block_size_tokens == 16
        await anyio.sleep(0.1)
        assert older.open == 0


@pytest.mark.parametrize("model", ["other", "poet"])
async def test_a_model_that_the_server_does_not_have_is_refused(model: str) -> None:
    async with fake_sglang(adapters=("poet",)) as fake:
        with pytest.raises(InvalidArgument, match="has no model"):
            async with started_sglang(fake, model=model):
                pass


async def watched(engine: SglangUpstream, fake: FakeSglang, *, is_another: bool) -> None:
    """Break the connections of a server that is being watched, with or without another process behind it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.background)
        await anyio.sleep(5.5)
        fake.kill()
        if is_another:
            fake.restart()
        fake.is_up = True
        await anyio.sleep(30)
        tasks.cancel_scope.cancel()


async def test_a_server_that_was_started_again_ends_the_engine() -> None:
    async with fake_sglang() as fake, started_sglang(fake) as engine:
        with pytest.raises(BaseExceptionGroup) as ended:
            await watched(engine, fake, is_another=True)
    assert [type(error) for error in ended.value.exceptions] == [EngineShutdown]


async def test_the_same_server_behind_a_broken_connection_does_not() -> None:
    async with fake_sglang() as fake, started_sglang(fake) as engine:
        await watched(engine, fake, is_another=False)


@pytest.mark.parametrize(
    "is_incremental", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["cumulative", "incremental"]
)
async def test_it_holds_the_contract_of_an_engine(is_incremental: bool) -> None:
    async with fake_sglang(is_incremental=is_incremental, token_s=0.001, keeps_alive=False) as fake:
        await run_conformance(
            lambda: SglangUpstream(URL, transport=fake.transport),
            request=prompt(24),
            bad_request=PreprocessedRequest([99_999]),
        )
