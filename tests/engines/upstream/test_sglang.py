"""SglangUpstream on a simulated server: tokens in both forms, errors, stops."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from engines.adapter import RequestAdapter
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
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
)
from tests.engines.upstream.sglang_worlds import fake_sglang, started_sglang
from tests.engines.upstream.wire import as_event
from tests.engines.upstream.worlds import continued, cut, outputs, prompt, sends, tokens_of

FORMS = pytest.mark.parametrize("is_incremental", [False, True], ids=["cumulative", "incremental"])
PROMPT = [5, 6, 7]


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


# -- errors


@pytest.mark.parametrize("token_ids", [[99_999], [1] * 5000])
async def test_a_request_that_the_server_refuses_within_its_answer_is_wrong(token_ids: list[int]) -> None:
    async with fake_sglang() as fake, started_sglang(fake) as engine:
        with pytest.raises(InvalidArgument):
            await outputs(engine, PreprocessedRequest(token_ids))


def chunk(ids: Any, reason: Any = None, **meta: Any) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": reason} | meta}


def failed(code: int | None) -> dict[str, Any]:
    return {"type": "abort", "message": "out of luck", "status_code": code}


@FORMS
@pytest.mark.parametrize(
    ("number", "fault", "error"),
    [
        (0, sends({"error": {"message": "no", "code": 400}}), InvalidArgument),
        (0, sends({"error": {"message": "full", "code": 503}}), WorkerOverloaded),
        (0, sends({"error": {"message": "broken", "code": 500}}), BackendUnknown),
        (2, sends({"error": {"message": "no", "code": 400}}), BackendUnknown),
        (0, sends(chunk([], failed(400))), InvalidArgument),
        (0, sends(chunk([], failed(503))), WorkerOverloaded),
        (2, sends(chunk([], failed(500), completion_tokens=2)), BackendUnknown),
        (2, sends(chunk([1], failed(None), completion_tokens=2)), EngineShutdown),
        (0, sends(chunk([], "abort")), EngineShutdown),
        (2, cut, Disconnected),
        (0, cut, Disconnected),
        (2, sends("[DONE]"), StreamIncomplete),
        (0, sends("[DONE]"), StreamIncomplete),
        (2, sends("{garbled"), InvalidMessage),
        (2, sends([1, 2]), InvalidMessage),
        (2, sends({}), InvalidMessage),
        (2, sends(chunk("text")), InvalidMessage),
        (2, sends(chunk([1, 2, "3"], completion_tokens=3)), InvalidMessage),
        (2, sends(chunk([-1], completion_tokens=3)), InvalidMessage),
        (2, sends(chunk([1, 2, 3, 4, 5], completion_tokens=3)), InvalidMessage),
        (2, sends(chunk([], completion_tokens=1)), InvalidMessage),
        (2, sends(chunk([1], completion_tokens="2")), InvalidMessage),
        (2, sends(chunk([1, 2, 3], completion_tokens=3) | {"index": 1}), InvalidMessage),
        (1, sends(chunk([1, 2, 3], completion_tokens=9)), InvalidMessage),
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
    async with fake_sglang(is_incremental=True, faults={1: sends(sent)}) as fake, started_sglang(fake) as engine:
        with pytest.raises(InvalidMessage, match="the server counted 3 tokens"):
            await outputs(engine, prompt(3))


@pytest.mark.parametrize("fault", ["lost", "twice"])
async def test_where_each_chunk_has_all_tokens_the_next_one_brings_what_was_lost(fault: str) -> None:
    tokens = continued(PROMPT, 3)
    sent = {"lost": chunk(tokens, completion_tokens=3), "twice": chunk(tokens[:1], completion_tokens=1)}[fault]
    async with fake_sglang(faults={1: sends(sent)}) as fake, started_sglang(fake) as engine:
        assert tokens_of(await outputs(engine, prompt(3))) == tokens


async def test_tokens_that_are_not_those_of_the_chunk_before_are_an_error() -> None:
    other = chunk([1, 2, 3], completion_tokens=3)
    async with fake_sglang(faults={2: sends(other)}) as fake, started_sglang(fake) as engine:
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
    async with fake_sglang(faults={0: sends(wrong)}) as fake, started_sglang(fake) as engine:
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
