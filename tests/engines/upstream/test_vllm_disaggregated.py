"""VllmPrefill and VllmDecode on simulated servers, alone and behind a PrefillRouter."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import define, evolve

from engines import run_conformance
from engines.upstream import KvConnector, MooncakePush, TransferFailed, VllmDecode, VllmPrefill, kv_connector
from operators.prefill import PrefillError
from pipeline import Cancelled, Context, InvalidArgument, PenstockError, WorkerOverloaded
from pipeline.errors import BackendUnknown, CannotConnect, Disconnected, InvalidMessage, blames_worker, may_migrate
from pipeline.protocols import OutputOptions, PrefillResult, PreprocessedRequest, SamplingOptions, StopConditions
from tests.engines.upstream.handover_worlds import (
    Blocks,
    FakeBootstrap,
    FakeHalf,
    Halves,
    answer_of,
    halves,
    is_cancelled,
)
from tests.engines.upstream.worlds import URL, VOCABULARY, FakeServer, continued, outputs, prompt, tokens_of

GENERATE = "/inference/v1/generate"
PROMPT = [5, 6, 7]


@define(eq=False)
class World:
    """A prefill server, a decode server, and the graph in front of them."""

    prefill: FakeHalf
    decode: FakeHalf
    blocks: Blocks
    halves: Halves

    @property
    def graph(self) -> Any:
        return self.halves.graph

    async def idle(self) -> None:
        """Nothing is under way at the servers, and no blocks are held, long before a lease ends."""
        await anyio.sleep(1.0)
        assert (self.prefill.running, self.decode.running, self.blocks.count) == ({}, {}, 0)


@asynccontextmanager
async def servers(*fakes: FakeServer) -> AsyncIterator[None]:
    """Run these servers; their clients leave no connection open."""
    open_at_end: list[int] = []
    async with anyio.create_task_group() as tasks:
        for fake in fakes:
            fake.tasks = tasks
        yield
        await anyio.sleep(1.0)
        open_at_end += [fake.open for fake in fakes]
        tasks.cancel_scope.cancel()
    assert open_at_end == [0] * len(fakes)


@asynccontextmanager
async def world(
    connector: KvConnector | None = None,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    lease_s: float = 30.0,
    migrations: int = 0,
    kind: type[FakeHalf] = FakeHalf,
    **settings: Any,
) -> AsyncIterator[World]:
    connector = connector or kv_connector("nixl", lease_s)
    blocks = Blocks(lease_s)
    first = kind(None, blocks=blocks, **(prefill or {}))
    then = FakeHalf(None, blocks=blocks, **(decode or {}))
    async with servers(first, then):
        engines = (
            VllmPrefill(URL, connector=connector, transport=first.transport),
            VllmDecode("http://gpu-2:8000", connector=connector, transport=then.transport),
        )
        async with halves([engines[0]], [engines[1]], migrations=migrations, **settings) as graph:
            yield World(first, then, blocks, graph)


def bodies(server: FakeHalf, path: str = GENERATE) -> list[Any]:
    """The bodies of requests for the tokens of a prompt, without those of discovery."""
    return [
        one.json
        for one in server.requests(path)
        if one.json.get("token_ids") != [0] and one.json.get("stream") is not None
    ]


# -- the way of a request


async def test_both_servers_together_answer_as_one_does() -> None:
    request = prompt(9, output_options=OutputOptions(logprobs=2))
    async with world() as halved:
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
    assert answered["kv_transfer_params"]["remote_request_id"] in halved.blocks.fetched


@pytest.mark.slow
async def test_fifty_prompts_eight_at_a_time_have_the_tokens_of_one_server() -> None:
    async with world() as halved:
        limit, answers = anyio.CapacityLimiter(8), list[bool]()

        async def one(number: int) -> None:
            tokens = [number + 1, 17, number * 3 + 2]
            request = PreprocessedRequest(tokens, stop_conditions=StopConditions(max_tokens=30, ignore_eos=True))
            async with limit:
                answers.append(tokens_of(await answer_of(halved.graph, request)) == continued(tokens, 30))

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(one, number)
        assert answers == [True] * 50
        assert len(halved.blocks.fetched) == 50
        await halved.idle()


async def test_servers_without_the_route_for_tokens_hand_over_by_completions() -> None:
    async with world(prefill={"generates": False}, decode={"generates": False}) as halved:
        assert tokens_of(await answer_of(halved.graph, prompt(5))) == continued(PROMPT, 5)
        assert len(halved.blocks.fetched) == 1
        await halved.idle()


async def test_what_ends_an_answer_does_not_end_the_prefill() -> None:
    stop = StopConditions(max_tokens=5, min_tokens=2, stop=["x"], stop_token_ids=[9])
    async with world() as halved:
        await answer_of(halved.graph, PreprocessedRequest(PROMPT, stop_conditions=stop))
        (asked,) = bodies(halved.prefill)
    assert asked["sampling_params"] == {"max_tokens": 1, "ignore_eos": True, "temperature": 0.0, "detokenize": False}


async def test_mooncake_has_the_same_transfer_on_both_sides() -> None:
    async with world(MooncakePush(), kind=FakeBootstrap) as halved:
        assert tokens_of(await answer_of(halved.graph, prompt(5))) == continued(PROMPT, 5)
        (asked,), (answered,) = bodies(halved.prefill), bodies(halved.decode)
        await halved.idle()
    assert asked["kv_transfer_params"]["transfer_id"] == answered["kv_transfer_params"]["transfer_id"]
    assert answered["kv_transfer_params"]["remote_bootstrap_addr"] == "http://gpu-1:8998"
    assert answered["kv_transfer_params"]["remote_engine_id"] == "e-0"


async def test_a_shared_cache_needs_no_parameters() -> None:
    async with world(kv_connector("lmcache")) as halved:
        assert tokens_of(await answer_of(halved.graph, prompt(5))) == continued(PROMPT, 5)
        assert [one.get("kv_transfer_params") for one in bodies(halved.prefill) + bodies(halved.decode)] == [None, None]
        await halved.idle()


async def test_a_request_without_a_prefill_is_answered_by_decode_alone() -> None:
    decode = FakeHalf(None)
    async with servers(decode):
        engine = VllmDecode(URL, transport=decode.transport)
        await engine.start(1)
        assert tokens_of(await outputs(engine, prompt(5))) == continued(PROMPT, 5)
        await engine.cleanup()


# -- errors


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (prompt(2, sampling_options=SamplingOptions(n=2)), "n"),
        (prompt(2, sampling_options=SamplingOptions(use_beam_search=True)), "sampling_options.use_beam_search"),
    ],
)
async def test_what_cannot_be_answered_is_refused_before_the_prompt_is_computed(request_: Any, field: str) -> None:
    async with world() as halved:
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
    async with world(prefill={"answers_params": False}) as halved:
        with pytest.raises(PrefillError, match="--kv-transfer-config"):
            await answer_of(halved.graph, prompt(5))
        assert bodies(halved.decode) == []


async def test_a_prompt_that_prefill_refuses_is_wrong() -> None:
    async with world() as halved:
        with pytest.raises(PenstockError) as refused:
            await answer_of(halved.graph, PreprocessedRequest([VOCABULARY]))
    assert refused.value.facts.status == 400


@pytest.mark.parametrize("params", [None, [], {}, {"kv_transfer_params": 3}])
async def test_decode_refuses_what_is_no_offer(params: Any) -> None:
    decode = FakeHalf(None)
    async with servers(decode):
        engine = VllmDecode(URL, transport=decode.transport)
        await engine.start(1)
        with pytest.raises(InvalidArgument) as refused:
            await outputs(engine, prompt(5, prefill_result=PrefillResult(params)))
        await engine.cleanup()
    assert refused.value.field == "prefill_result.disaggregated_params"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"{garbled", InvalidMessage),
        (b"[]", InvalidMessage),
        ({"choices": []}, InvalidMessage),
        ({"choices": [{"token_ids": [1], "finish_reason": "abort"}]}, PenstockError),
        ({"choices": [{"token_ids": None, "finish_reason": "length"}]}, PenstockError),
        ({"choices": [{"token_ids": [1], "finish_reason": "length"}], "kv_transfer_params": None}, InvalidMessage),
    ],
)
async def test_a_bad_answer_of_prefill_is_a_typed_error(answer: Any, error: type[PenstockError]) -> None:
    class Bad(FakeHalf):
        async def _whole(self, line: Any, asked: Any, aborted: Any) -> None:
            if asked.prompt == [0]:
                await super()._whole(line, asked, aborted)
            else:
                await line.whole(200, answer)

    server = Bad(None)
    async with servers(server):
        engine = VllmPrefill(URL, transport=server.transport)
        await engine.start(1)
        with pytest.raises(error):
            await outputs(engine, prompt(1))
        await engine.cleanup()


async def test_a_prefill_server_that_dies_is_replaced_by_another() -> None:
    blocks = Blocks()
    first, second, decode = (FakeHalf(None, blocks=blocks, prefill_s=1.0) for _ in range(3))
    connector = kv_connector("nixl")
    async with servers(first, second, decode):
        prefill = [VllmPrefill(URL, connector=connector, transport=one.transport) for one in (first, second)]
        then = VllmDecode("http://gpu-3:8000", connector=connector, transport=decode.transport)
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
    error = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}

    async def failed(line: Any) -> None:
        await line.event(error)

    blocks, connector = Blocks(), kv_connector("nixl")
    prefill, broken, good = (FakeHalf(None, blocks=blocks) for _ in range(3))
    async with servers(prefill, broken, good):
        first = VllmPrefill(URL, connector=connector, transport=prefill.transport)
        then = [
            VllmDecode(f"http://gpu-{number}:8000", connector=connector, transport=one.transport)
            for number, one in enumerate((broken, good), 2)
        ]
        async with halves([first], [*then], migrations=3) as graph:
            broken.faults = {0: failed}
            for _ in range(2):
                assert tokens_of(await answer_of(graph.graph, prompt(5))) == continued(PROMPT, 5)
        assert len(bodies(broken)) == len(bodies(prefill)) - 2 > 0


async def test_a_failure_behind_the_first_token_is_no_failed_transfer() -> None:
    async def failed(line: Any) -> None:
        await line.event({"error": {"message": "Internal server error", "code": 500}})

    async with world() as halved:
        halved.decode.faults = {2: failed}
        with pytest.raises(BackendUnknown):
            await answer_of(halved.graph, prompt(5))


# -- stop, kill, close


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_prefill_that_is_given_up_is_aborted_and_no_decode_is_sent(how: str) -> None:
    async with world(prefill={"prefill_s": 10.0}) as halved:
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
        assert (halved.blocks.count, bodies(halved.decode)) == (0, [])


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("accept_s", [2.0, 0.0])
async def test_blocks_of_a_request_that_is_over_before_decode_has_it_are_fetched_all_the_same(
    how: str, accept_s: float
) -> None:
    async with world(decode={"accept_s": accept_s, "queue_s": 2.0}) as halved:
        context, found = Context(prompt(50)), list[Any]()
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                found.extend(await answer_of(halved.graph, context))

            tasks.start_soon(ask)
            await anyio.sleep(1.0)  # prefill is over, decode is asked
            assert halved.blocks.count == 1
            getattr(context, how)()
            await anyio.sleep(4.5)  # far below the lease
            assert halved.blocks.count == 0
        assert is_cancelled(found) if how == "stop" else found == []
        await halved.idle()


async def test_a_client_that_left_during_the_transfer_does_not_strand_the_blocks() -> None:
    async with world(decode={"accept_s": 1.0}) as halved:
        with anyio.move_on_after(0.5):
            await answer_of(halved.graph, prompt(50))
        await anyio.sleep(5.0)
        assert len(halved.blocks.fetched) == 1
        await halved.idle()


async def test_a_dropped_stream_of_decode_frees_its_slot() -> None:
    async with world() as halved:
        async with await halved.graph.generate(Context(prompt(500))) as stream:
            await anext(stream)
        await halved.idle()


# -- leases


async def test_decode_that_queues_longer_than_the_lease_is_right_where_its_server_renews_it() -> None:
    async with world(lease_s=6.0, decode={"queue_s": 60.0}) as halved:
        assert tokens_of(await answer_of(halved.graph, prompt(5))) == continued(PROMPT, 5)
        await halved.idle()


async def test_a_decode_server_that_takes_no_request_before_the_lease_ends_is_overloaded() -> None:
    async with world(lease_s=6.0, decode={"accept_s": 60.0}) as halved:
        with pytest.raises(WorkerOverloaded):
            await answer_of(halved.graph, prompt(5))
        await halved.idle()


async def test_a_lease_that_ends_before_the_first_token_is_an_error_and_no_wrong_answer() -> None:
    connector = MooncakePush(6.0)
    async with world(connector, kind=FakeBootstrap, lease_s=6.0, decode={"queue_s": 60.0, "renews": False}) as halved:
        with pytest.raises(WorkerOverloaded):
            await answer_of(halved.graph, prompt(5))
        await halved.idle()
        assert len(connector.leases) == 0


async def test_a_request_whose_lease_has_ended_starts_again_with_its_prefill_and_another_decode() -> None:
    blocks, connector = Blocks(6.0), kv_connector("nixl", 6.0)
    prefill, slow, fast = (FakeHalf(None, blocks=blocks, accept_s=accept_s) for accept_s in (0.0, 60.0, 0.0))
    async with servers(prefill, slow, fast):
        first = VllmPrefill(URL, connector=connector, transport=prefill.transport)
        then = [
            VllmDecode(f"http://gpu-{number}:8000", connector=connector, transport=one.transport)
            for number, one in enumerate((slow, fast), 2)
        ]
        async with halves([first], [*then], migrations=3) as graph:
            for _ in range(2):
                assert tokens_of(await answer_of(graph.graph, prompt(5))) == continued(PROMPT, 5)
        await anyio.sleep(1.5)
        assert len(bodies(prefill)) == 3
        assert blocks.count == 0


async def test_an_offer_is_forgotten_by_the_end_of_its_answer() -> None:
    connector = kv_connector("nixl")
    async with world(connector) as halved:
        await answer_of(halved.graph, prompt(5))
        assert len(connector.leases) == 0


# -- what real servers have answered


RECORD = json.loads((Path(__file__).with_name("recorded") / "vllm_nixl.json").read_text(encoding="utf-8"))


class Recorded(FakeHalf):
    """Answers prompts as vLLM 0.32 has answered."""

    name = ""

    async def _tokens(self, line: Any, asked: Any) -> None:
        if asked.prompt == [0]:
            await super()._tokens(line, asked)
            return
        (answer,) = (one["answer"] for one in RECORD["exchanges"] if one["name"] == self.name)
        if "json" in answer:
            await line.whole(answer["status"], answer["json"])
            return
        await line.begin()
        for event in answer["events"]:
            await line.event(event)
        await line.end()


async def test_recorded_servers_hand_over_with_every_key_that_prefill_has_sent() -> None:
    prefill, decode = Recorded(None), Recorded(None)
    prefill.name, decode.name = "prefill", "decode"
    async with servers(prefill, decode):
        connector = kv_connector("nixl")
        first = VllmPrefill(URL, connector=connector, transport=prefill.transport)
        then = VllmDecode("http://gpu-2:8000", connector=connector, transport=decode.transport)
        async with halves([first], [then]) as graph:
            found = await answer_of(graph.graph, recorded_prompt(5))
    exchanges = {one["name"]: one for one in RECORD["exchanges"]}
    sent = bodies(decode)[0]["kv_transfer_params"]
    assert sent == exchanges["prefill"]["answer"]["json"]["kv_transfer_params"]
    assert len(tokens_of(found)) == 5
    assert found[-1].completion_usage is not None
    assert found[-1].completion_usage.prompt_tokens == 300


async def test_a_recorded_decode_without_its_prefill_server_is_a_failed_transfer() -> None:
    decode = Recorded(None)
    decode.name = "decode without its prefill server"
    async with servers(decode):
        engine = VllmDecode(URL, transport=decode.transport)
        await engine.start(1)
        params = {"kv_transfer_params": RECORD["exchanges"][0]["answer"]["json"]["kv_transfer_params"]}
        with pytest.raises(TransferFailed) as failed:
            await outputs(engine, evolve(recorded_prompt(5), prefill_result=PrefillResult(params)))
        await engine.cleanup()
    assert may_migrate(failed.value)
    assert not blames_worker(failed.value)


def recorded_prompt(tokens: int) -> PreprocessedRequest:
    stop = StopConditions(max_tokens=tokens, ignore_eos=True)
    return PreprocessedRequest([*range(300, 600)], model="tiny", stop_conditions=stop)


# -- the contract


async def test_a_decode_worker_holds_the_engine_contract() -> None:
    decode = FakeHalf(None, token_s=0.001, keeps_alive=False)
    async with servers(decode):
        await run_conformance(
            lambda: VllmDecode(URL, transport=decode.transport),
            request=prompt(24),
            bad_request=PreprocessedRequest([VOCABULARY]),
        )
