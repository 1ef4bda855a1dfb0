"""VllmPrefill and VllmDecode on simulated servers, alone and behind a PrefillRouter."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from engines.upstream import MooncakePush, VllmDecode, VllmPrefill, kv_connector
from operators.prefill import PrefillError
from pipeline import Cancelled, Context, InvalidArgument, PenstockError, WorkerOverloaded
from pipeline.errors import (
    BackendUnknown,
    CannotConnect,
    Disconnected,
    EngineShutdown,
    InvalidMessage,
)
from pipeline.protocols import (
    CompletionUsage,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from tests.engines.upstream.handover_worlds import (
    Blocks,
    FakeBootstrap,
    FakeHalf,
    answer_of,
    bodies,
    decode_of,
    halves,
    is_cancelled,
    prefill_of,
    vllm_world,
)
from tests.engines.upstream.worlds import all_running, continued, outputs, prompt, running, sends, started_on, tokens_of

PROMPT = [5, 6, 7]
OFFER = {"kv_transfer_params": {"do_remote_prefill": True}}
FAILED = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}


# -- the way of a request


async def test_both_servers_together_answer_as_one_does() -> None:
    request = prompt(9, output_options=OutputOptions(logprobs=2))
    async with vllm_world() as halved:
        found = await answer_of(halved.graph, request)
        await halved.idle()
        (asked,), (answered,) = bodies(halved.prefill), bodies(halved.decode)
    assert tokens_of(found) == continued(PROMPT, 9)
    assert asked["token_ids"] == answered["token_ids"] == PROMPT
    assert asked["stream"] is False
    assert asked["sampling_params"]["max_tokens"] == 1
    assert "logprobs" not in asked["sampling_params"]
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert answered["stream"] is True
    assert answered["sampling_params"]["max_tokens"] == 9
    assert answered["kv_transfer_params"]["do_remote_prefill"] is True
    assert answered["kv_transfer_params"]["remote_request_id"] in halved.prefill.blocks.fetched


async def test_servers_without_the_route_for_tokens_hand_over_by_completions() -> None:
    async with vllm_world(prefill={"generates": False}, decode={"generates": False}) as halved:
        assert tokens_of(await answer_of(halved.graph, prompt(5))) == continued(PROMPT, 5)
        assert len(halved.prefill.blocks.fetched) == 1
        await halved.idle()


async def test_what_ends_an_answer_does_not_end_the_prefill() -> None:
    stop = StopConditions(max_tokens=5, min_tokens=2, stop=["x"], stop_token_ids=[9])
    async with vllm_world() as halved:
        await answer_of(halved.graph, PreprocessedRequest(PROMPT, stop_conditions=stop))
        (asked,) = bodies(halved.prefill)
    assert asked["sampling_params"] == {"max_tokens": 1, "ignore_eos": True, "temperature": 0.0, "detokenize": False}


async def test_mooncake_has_the_same_transfer_on_both_sides() -> None:
    async with vllm_world(MooncakePush(), kind=FakeBootstrap) as halved:
        assert tokens_of(await answer_of(halved.graph, prompt(5))) == continued(PROMPT, 5)
        (asked,), (answered,) = bodies(halved.prefill), bodies(halved.decode)
        await halved.idle()
    assert asked["kv_transfer_params"]["transfer_id"] == answered["kv_transfer_params"]["transfer_id"]
    assert answered["kv_transfer_params"]["remote_bootstrap_addr"] == "http://gpu-1:8998"
    assert answered["kv_transfer_params"]["remote_engine_id"] == "e-0"


async def test_mooncakes_bootstrap_server_is_at_the_host_of_prefill_also_by_ipv6() -> None:
    async with running(FakeBootstrap) as server:
        engine = VllmPrefill("http://[::1]:8000", connector=MooncakePush(), transport=server.transport)
        await engine.start(1)
        (found,) = await outputs(engine, prompt(1))
        await engine.cleanup()
        assert [one.headers["host"] for one in server.requests("/query")] == ["[::1]:8998"]
    assert found.disaggregated_params["kv_transfer_params"]["remote_bootstrap_addr"] == "http://[::1]:8998"


async def test_a_shared_cache_needs_no_parameters() -> None:
    async with vllm_world(kv_connector("lmcache")) as halved:
        assert tokens_of(await answer_of(halved.graph, prompt(5))) == continued(PROMPT, 5)
        assert [one.get("kv_transfer_params") for one in bodies(halved.prefill) + bodies(halved.decode)] == [None, None]
        await halved.idle()


async def test_a_request_without_a_prefill_is_answered_by_decode_alone() -> None:
    async with running(FakeHalf) as decode, started_on(VllmDecode, decode) as engine:
        assert tokens_of(await outputs(engine, prompt(5))) == continued(PROMPT, 5)


# -- errors


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (prompt(2, sampling_options=SamplingOptions(n=2)), "n"),
        (prompt(2, sampling_options=SamplingOptions(use_beam_search=True)), "sampling_options.use_beam_search"),
    ],
)
async def test_what_cannot_be_answered_is_refused_before_the_prompt_is_computed(request_: Any, field: str) -> None:
    async with vllm_world() as halved:
        with pytest.raises(PenstockError) as refused:
            await answer_of(halved.graph, request_)
        assert bodies(halved.prefill) == []
    cause = refused.value.__cause__
    while cause is not None and not isinstance(cause, InvalidArgument):
        cause = cause.__cause__
    assert isinstance(cause, InvalidArgument)
    assert cause.field == field
    assert refused.value.facts.status == 400


async def test_a_prefill_server_without_a_connector_is_named_as_such() -> None:
    async with vllm_world(prefill={"answers_params": False}) as halved:
        with pytest.raises(PrefillError, match="--kv-transfer-config"):
            await answer_of(halved.graph, prompt(5))
        assert bodies(halved.decode) == []


@pytest.mark.parametrize("params", [None, [], {}, {"kv_transfer_params": 3}])
async def test_decode_refuses_what_is_no_offer(params: Any) -> None:
    async with running(FakeHalf) as decode, started_on(VllmDecode, decode) as engine:
        with pytest.raises(InvalidArgument) as refused:
            await outputs(engine, prompt(5, prefill_result=PrefillResult(params)))
    assert refused.value.field == "prefill_result.disaggregated_params"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"{garbled", InvalidMessage),
        (b"[]", InvalidMessage),
        ({"choices": []}, InvalidMessage),
        ({"choices": [{"token_ids": [1], "finish_reason": "abort"}], **OFFER}, EngineShutdown),
        ({"choices": [{"token_ids": None, "finish_reason": "length"}], **OFFER}, InvalidMessage),
        ({"choices": [{"token_ids": [1], "finish_reason": "error"}], **OFFER}, BackendUnknown),
        ({"choices": [{"token_ids": ["7"], "finish_reason": "length"}], **OFFER}, InvalidMessage),
        ({"choices": [{"token_ids": [1], "finish_reason": "length"}], "kv_transfer_params": None}, InvalidMessage),
    ],
)
async def test_a_bad_answer_of_prefill_is_a_typed_error(answer: Any, error: type[PenstockError]) -> None:
    async with answering(answer) as engine:
        with pytest.raises(error):
            await outputs(engine, prompt(1))


@pytest.mark.parametrize("status", [429, 503, 529])
async def test_a_prefill_server_that_is_too_busy_is_overloaded(status: int) -> None:
    async with running(FakeHalf) as server, started_on(VllmPrefill, server) as engine:
        server.status = status
        with pytest.raises(WorkerOverloaded):
            await outputs(engine, prompt(1))


async def test_a_prefills_answer_that_is_cut_at_its_last_byte_is_none() -> None:
    """Its JSON is complete, the body is not."""

    class Cut(FakeHalf):
        async def _whole(self, line: Any, asked: Any, aborted: Any) -> None:
            if asked.prompt == [0]:
                await super()._whole(line, asked, aborted)
                return
            await line.begin(200, "application/json")
            await line.put(json.dumps({"choices": [{"token_ids": [1], "finish_reason": "length"}], **OFFER}).encode())
            await line.wire.aclose()

    async with running(Cut) as server, started_on(VllmPrefill, server) as engine:
        with pytest.raises(Disconnected):
            await outputs(engine, prompt(1))


@pytest.mark.parametrize(
    "usage", [5, [], {"prompt_tokens_details": 5}, {"prompt_tokens_details": {"cached_tokens": "5"}}]
)
async def test_counts_that_are_none_do_not_fail_a_prefill(usage: Any) -> None:
    choice = {"token_ids": [1], "finish_reason": "length"}
    async with answering({"choices": [choice], "usage": usage, **OFFER}) as engine:
        (found,) = await outputs(engine, prompt(1))
    assert found.completion_usage == CompletionUsage.of(3, 1)


@asynccontextmanager
async def answering(answer: Any) -> AsyncIterator[VllmPrefill]:
    """A prefill server that answers every prompt but that of discovery with this."""

    class Fixed(FakeHalf):
        async def _whole(self, line: Any, asked: Any, aborted: Any) -> None:
            if asked.prompt == [0]:
                await super()._whole(line, asked, aborted)
            else:
                await line.whole(200, answer)

    async with running(Fixed) as server, started_on(VllmPrefill, server) as engine:
        yield engine


async def test_a_prefill_server_that_dies_is_replaced_by_another() -> None:
    blocks = Blocks()
    first, second, decode = (FakeHalf(blocks=blocks, prefill_s=1.0) for _ in range(3))
    connector = kv_connector("nixl")
    async with all_running(first, second, decode):
        prefill = [prefill_of(one, number, connector) for number, one in enumerate((first, second), 1)]
        then = decode_of(decode, 3, connector)
        with pytest.raises(ExceptionGroup) as ended:
            await _killed_in_mid_prefill(first, second, prefill, then)
    assert ended.group_contains((CannotConnect, Disconnected))  # the watch of the dead server ends its engine


async def _killed_in_mid_prefill(
    first: FakeHalf, second: FakeHalf, prefill: list[VllmPrefill], then: VllmDecode
) -> None:
    async with halves([*prefill], [then], migrations=3) as graph:
        async with anyio.create_task_group() as tasks:

            async def die() -> None:
                await anyio.sleep(0.5)
                (first if first.running else second).kill()

            tasks.start_soon(die)
            assert tokens_of(await answer_of(graph.graph, prompt(9))) == continued(PROMPT, 9)
        await anyio.sleep(5)


async def test_blocks_that_do_not_come_are_an_error_after_which_another_decode_may_go_on() -> None:
    blocks, connector = Blocks(), kv_connector("nixl")
    prefill, broken, good = (FakeHalf(blocks=blocks) for _ in range(3))
    async with all_running(prefill, broken, good):
        then = [decode_of(one, number, connector) for number, one in enumerate((broken, good), 2)]
        async with halves([prefill_of(prefill, 1, connector)], [*then], migrations=3) as graph:
            broken.faults = {0: sends(FAILED)}
            for _ in range(2):
                assert tokens_of(await answer_of(graph.graph, prompt(5))) == continued(PROMPT, 5)
        assert len(bodies(broken)) == len(bodies(prefill)) - 2 > 0


async def test_a_failure_behind_the_first_token_is_no_failed_transfer() -> None:
    async with vllm_world() as halved:
        halved.decode.faults = {2: sends(FAILED)}
        with pytest.raises(BackendUnknown):
            await answer_of(halved.graph, prompt(5))


# -- stop, kill, close


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_prefill_that_is_given_up_is_aborted_and_no_decode_is_sent(how: str) -> None:
    async with vllm_world(prefill={"prefill_s": 10.0}) as halved:
        context = Context(prompt(5))
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(Cancelled):
                    await answer_of(halved.graph, context)

            tasks.start_soon(ask)
            await anyio.sleep(1.0)
            assert len(halved.prefill.running) == 1
            getattr(context, how)()
            await anyio.sleep(0.2)
            assert halved.prefill.running == {}
        assert (halved.prefill.blocks.count, bodies(halved.decode)) == (0, [])


async def test_blocks_of_a_request_that_is_stopped_while_prefills_answer_comes_are_fetched_all_the_same() -> None:
    async with vllm_world(prefill={"prefill_s": 1.0, "answer_s": 0.3}) as halved:
        context = Context(prompt(5))
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(Cancelled):
                    await answer_of(halved.graph, context)

            tasks.start_soon(ask)
            await anyio.sleep(1.15)  # the prompt is computed, its answer is on its way
            assert halved.prefill.blocks.count == 1
            context.stop()
            await anyio.sleep(0.8)  # far below the lease
            assert (halved.prefill.blocks.count, len(halved.prefill.blocks.fetched)) == (0, 1)
        assert [one["sampling_params"]["max_tokens"] for one in bodies(halved.decode)] == [1]
        await halved.idle()


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_prefill_that_is_stopped_ends_soon_if_its_server_sends_nothing(how: str) -> None:
    """Its blocks may wait for their lease then."""
    async with vllm_world(prefill={"prefill_s": 1.0, "answer_s": 30.0}) as halved:
        context, stopped_and_ended_s = Context(prompt(5)), list[float]()
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(PenstockError):
                    await answer_of(halved.graph, context)
                stopped_and_ended_s.append(anyio.current_time())

            tasks.start_soon(ask)
            await anyio.sleep(2)
            stopped_and_ended_s.append(anyio.current_time())
            getattr(context, how)()
        stopped_s, ended_s = stopped_and_ended_s
        assert ended_s - stopped_s <= 1.1
        assert bodies(halved.decode) == []


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("accept_s", [2.0, 0.0])
async def test_blocks_of_a_request_that_is_over_before_decode_has_it_are_fetched_all_the_same(
    how: str, accept_s: float
) -> None:
    async with vllm_world(decode={"accept_s": accept_s, "queue_s": 2.0}) as halved:
        context, found = Context(prompt(50)), list[Any]()
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                found.extend(await answer_of(halved.graph, context))

            tasks.start_soon(ask)
            await anyio.sleep(1.0)  # prefill is over, decode is asked
            assert halved.prefill.blocks.count == 1
            getattr(context, how)()
            await anyio.sleep(4.5)  # far below the lease
            assert halved.prefill.blocks.count == 0
        assert is_cancelled(found) if how == "stop" else found == []
        await halved.idle()


async def test_a_client_that_left_during_the_transfer_does_not_strand_the_blocks() -> None:
    async with vllm_world(decode={"accept_s": 1.0}) as halved:
        with anyio.move_on_after(0.5):
            await answer_of(halved.graph, prompt(50))
        await anyio.sleep(5.0)
        assert len(halved.prefill.blocks.fetched) == 1
        assert [one["sampling_params"]["max_tokens"] for one in bodies(halved.decode)][-1] == 1
        await halved.idle()
