"""One complete tree of spans for every request, however it ends."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Context
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from pipeline.telemetry import RequestSpan
from serving.http import Availability, HttpOptions, app
from serving.limits import HttpLimits
from tests.serving.tracing.worlds import Recorded, Serving, one_tree
from tests.serving.worlds import chat, complete, request_to

ALONE = "POST /v1/chat/completions"
STAGES = """
  Preprocess
    Migration
      Detokenize
        PushRouter
          engine.generate"""
KV = """
  Preprocess
    Migration
      Detokenize
        KvPushRouter
          kv_router.select_worker
            kv_router.compute_block_hashes
            kv_router.schedule
          kv_router.route_request
          PushRouter
            engine.generate"""
DISAGGREGATED = """
  Preprocess
    Migration
      Detokenize
        PrefillRouter
          prefill
            PushRouter
              engine.generate
          decode
            PushRouter
              engine.generate"""
MIGRATED = """
  Preprocess
    Migration
      Detokenize
        PushRouter
          engine.generate
      migration.retry
        Detokenize
          PushRouter
            engine.generate"""


def chat_request(tokens: int = 8) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        model="m", messages=[ChatMessage(role="user", content="hello, hello")], max_tokens=tokens
    )


def test_the_documentation_draws_the_tree() -> None:
    page = Path(__file__).parents[3] / "docs" / "tracing.md"
    assert f"```text\n{ALONE}{KV}\n```" in page.read_text()


# -- answers that end


@pytest.mark.parametrize("stream", [True, False])
async def test_streaming_and_unary_requests_have_the_same_tree(
    stream: bool, serving: Serving, recorded: Recorded
) -> None:
    async with serving(engine="mocker") as it:
        await chat(it.app, stream=stream, max_tokens=3, temperature=0.5, top_p=0.9, seed=7).run()
    tree = recorded.tree()
    assert str(tree) == ALONE + STAGES
    attributes = tree.root.attributes
    assert (tree.root.kind, tree.root.status, attributes["http.response.status_code"]) == ("SERVER", "UNSET", 200)
    fields = {
        name: attributes[f"gen_ai.request.{name}"] for name in ("model", "max_tokens", "temperature", "top_p", "seed")
    }
    assert fields == {"model": "m", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 7}
    assert attributes["gen_ai.request.stream"] is stream
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.provider.name"]) == ("chat", "penstock")
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.usage.input_tokens"] > 3
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.response.id"] == "chatcmpl-" + attributes["penstock.request_id"]
    assert attributes["gen_ai.response.time_to_first_chunk"] >= 0
    assert {node.attributes["penstock.request_id"] for node in tree.nodes} == {attributes["penstock.request_id"]}
    assert {node.attributes.get("penstock.ending") for node in tree.nodes} == {"ended", None}


async def test_the_router_writes_its_decision_into_its_span(serving: Serving, recorded: Recorded) -> None:
    async with serving(engine="mocker", workers=2, router="kv") as it:
        await chat(it.app, max_tokens=3).run()
        workers = {worker.worker_id for worker in it.opened.workers}
    tree = recorded.tree()
    assert str(tree) == ALONE + KV
    attributes = tree.one("KvPushRouter").attributes
    chosen = attributes["kv_router.worker_id"]
    assert chosen in workers
    assert {"kv_router.dp_rank", "kv_router.overlap_blocks", "kv_router.cost"} <= attributes.keys()
    assert tree.one("PushRouter").attributes["penstock.worker_id"] == chosen


async def test_each_prompt_of_a_batch_has_a_subtree(serving: Serving, recorded: Recorded) -> None:
    async with serving() as it:
        await complete(it.app, prompt=["one", "two", "three"], max_tokens=2).run()
    tree = recorded.tree()
    assert str(tree) == "POST /v1/completions" + 3 * STAGES
    request_id = tree.root.attributes["penstock.request_id"]
    parts = {node.attributes["penstock.request_id"] for node in tree.all("Preprocess")}
    assert parts == {f"{request_id}-{number}" for number in range(3)}
    assert (tree.root.attributes["penstock.prompts"], tree.root.attributes["gen_ai.usage.output_tokens"]) == (3, 6)


@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_prefill_and_decode_are_two_linked_halves(router: str, serving: Serving, recorded: Recorded) -> None:
    async with serving(engine="mocker", workers=2, prefill_workers=2, router=router) as it:
        await chat(it.app, max_tokens=4, stream=True).run()
    tree = recorded.tree()
    if router != "kv":
        assert str(tree) == ALONE + DISAGGREGATED
    prefill, decode = tree.one("prefill"), tree.one("decode")
    assert decode.links == (prefill.span_id,)
    prefilling, decoding = tree.all("engine.generate")
    assert decoding.links == (prefilling.span_id,)


async def test_a_migrated_request_is_one_tree_whose_attempts_are_linked(serving: Serving, recorded: Recorded) -> None:
    async with serving(engine="mocker", workers=2) as it:
        exchange = chat(it.app, max_tokens=6, stream=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await exchange.until(lambda seen: len(seen.data) > 1)
            await it.opened.fleet.die(next(each for each in it.opened.workers if each.served and each.served.running))
    tree = recorded.tree()
    assert str(tree) == ALONE + MIGRATED
    before, after = tree.all("engine.generate")
    assert tree.one("migration.retry").links == after.links == (before.span_id,)
    assert tree.root.status == "UNSET"
    assert tree.root.attributes["gen_ai.usage.output_tokens"] == 6
    ids = [node.attributes["penstock.worker_id"] for node in tree.all("PushRouter")]
    assert len(set(ids)) == 2


async def test_a_worker_that_fails_before_its_first_token_is_linked_by_its_router(
    serving: Serving, recorded: Recorded
) -> None:
    async with serving(engine="mocker", workers=2) as it, anyio.create_task_group() as tasks:
        tasks.start_soon(chat(it.app, max_tokens=6, stream=True).run)
        await anyio.sleep(0.0001)
        await it.opened.fleet.die(next(each for each in it.opened.workers if each.served and each.served.running))
    tree = recorded.tree()
    failed, went_on = tree.all("PushRouter")
    assert (failed.status, went_on.status, tree.root.status) == ("ERROR", "UNSET", "UNSET")
    assert tree.one("migration.retry").links == (failed.span_id,)


# -- refused


async def test_a_request_refused_before_the_graph_is_a_server_span_with_the_limit(
    serving: Serving, recorded: Recorded
) -> None:
    async with serving(options=HttpOptions(limits=HttpLimits(max_metadata_entries=1))) as it:
        await chat(it.app, headers={"x-dynamo-meta-a": "1", "x-dynamo-meta-b": "2"}).run()
    tree = recorded.tree()
    assert str(tree) == ALONE
    attributes = tree.root.attributes
    assert (attributes["http.response.status_code"], tree.root.status) == (431, "UNSET")
    assert "error.type" not in attributes
    limit = (attributes["penstock.limit"], attributes["penstock.limit.value"], attributes["penstock.limit.threshold"])
    assert limit == ("max_metadata_entries", 2, 1)


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b'{"model": "m", "messages": []}', 400), (b'{"model": "x"}', 400)]
)
async def test_a_bad_request_is_a_server_span(body: bytes, status: int, serving: Serving, recorded: Recorded) -> None:
    async with serving() as it:
        answered = await request_to(it.app, "/v1/chat/completions", body).run()
    tree = recorded.tree()
    assert answered.status == tree.root.attributes["http.response.status_code"] == status
    assert tree.root.attributes["penstock.problem"] == "validation"
    assert tree.root.status == "UNSET"


async def test_a_server_that_ends_refuses_with_an_error_in_its_span(serving: Serving, recorded: Recorded) -> None:
    async with serving() as it:
        availability = Availability()
        availability.stop()
        refusing = app({"m": it.opened.graph}, tracer=recorded.tracer, availability=availability)
        await chat(refusing).run()
    tree = recorded.tree()
    assert (str(tree), tree.root.status, tree.root.attributes["error.type"]) == (ALONE, "ERROR", "unavailable")


# -- ended early


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("shape", ["plain", "kv", "disaggregated"])
async def test_a_request_stopped_or_killed_amid_its_answer_ends_every_span(
    how: str, shape: str, serving: Serving, recorded: Recorded
) -> None:
    shapes: dict[str, dict[str, Any]] = {
        "plain": {},
        "kv": {"router": "kv", "workers": 2},
        "disaggregated": {"prefill_workers": 1},
    }
    async with serving(engine="mocker", **shapes[shape]) as it:
        span = RequestSpan("request", {}, recorded.tracer)
        request = Context(chat_request())
        request.trace = span.trace
        async with await it.opened.graph.generate(request) as stream:
            await anext(stream)
            getattr(request, how)()
            async for _ in stream:
                pass
        span.end()
    tree = recorded.tree()
    endings = {node.name: node.attributes.get("penstock.ending") for node in tree.nodes}
    assert endings["Preprocess"] == endings["PushRouter"] == "ended"
    assert {node.status for node in tree.nodes} == {"UNSET"}


async def test_a_request_killed_by_the_end_of_the_server_is_one_tree(serving: Serving, recorded: Recorded) -> None:
    async with serving(engine_args={"delay_s": "1"}) as it:
        availability = Availability()
        ending = app({"m": it.opened.graph}, tracer=recorded.tracer, availability=availability)
        exchange = chat(ending, stream=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await exchange.until(lambda seen: seen.data)
            availability.stop()
    tree = recorded.tree()
    assert str(tree) == ALONE + STAGES
    assert (tree.root.status, tree.root.attributes["error.type"]) == ("ERROR", "unavailable")
    assert tree.root.attributes["http.response.status_code"] == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prefill_workers", [0, 1])
@pytest.mark.parametrize("after_s", [0.0001, 0.05])
async def test_a_client_that_leaves_ends_every_span(
    stream: bool, prefill_workers: int, after_s: float, serving: Serving, recorded: Recorded
) -> None:
    async with serving(engine="mocker", prefill_workers=prefill_workers) as it:
        exchange = chat(it.app, stream=stream, max_tokens=50)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await anyio.sleep(after_s)
            exchange.leave()
        await anyio.sleep(60)
    # What has been handed to a prefill worker is computed to its end, and its blocks are taken.
    afterwards = ("prefill", "decode", "PushRouter", "engine.generate") if prefill_workers else ()
    tree = recorded.tree(outlives=afterwards)
    attributes = tree.root.attributes
    assert (attributes["penstock.ending"], attributes["penstock.problem"], tree.root.status) == (
        "closed",
        "cancelled",
        "UNSET",
    )


async def test_an_error_amid_the_answer_is_in_every_span_that_it_passed(serving: Serving, recorded: Recorded) -> None:
    async with serving(engine="mocker", workers=1, migration_limit=0) as it:
        exchange = chat(it.app, max_tokens=50, stream=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await exchange.until(lambda seen: len(seen.data) > 1)
            await it.opened.fleet.die(it.opened.workers[0])
    tree = recorded.tree()
    assert (tree.root.status, tree.root.attributes["http.response.status_code"]) == ("ERROR", 200)
    assert {tree.one(name).status for name in ("Preprocess", "Detokenize", "PushRouter")} == {"ERROR"}


async def test_a_request_that_no_worker_takes_has_an_error_in_its_tree(serving: Serving, recorded: Recorded) -> None:
    async with serving(engine="mocker", workers=1) as it:
        await it.opened.fleet.die(it.opened.workers[0])
        answered = await chat(it.app).run()
    tree = recorded.tree()
    assert answered.status == tree.root.attributes["http.response.status_code"] == 503
    assert (tree.root.status, tree.one("PushRouter").status) == ("ERROR", "ERROR")


@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize("reads", [0, 1])
async def test_a_stream_that_is_left_ends_every_span(
    how: str, reads: int, serving: Serving, recorded: Recorded
) -> None:
    async with serving(engine="mocker") as it:
        span = RequestSpan("request", {}, recorded.tracer)
        request = Context(chat_request())
        request.trace = span.trace
        stream = await it.opened.graph.generate(request)
        for _ in range(reads):
            await anext(stream)
        if how == "close":
            await stream.aclose()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del stream
            for _ in range(20):
                await checkpoint()
        span.end()
    # Streams that are dropped are released in whatever order.
    tree = recorded.tree(outlives=[span.name for span in recorded.ended] if how == "drop" else ())
    assert tree.one("Preprocess").attributes["penstock.ending"] == ("closed" if reads else "unread")


async def test_a_cancelled_server_task_ends_every_span(serving: Serving, recorded: Recorded) -> None:
    async with serving(engine="mocker") as it:
        with anyio.move_on_after(0.05):
            await chat(it.app, max_tokens=500, stream=True).run()
    tree = recorded.tree()
    assert (str(tree), tree.root.attributes["penstock.ending"]) == (ALONE + STAGES, "closed")


async def test_concurrent_requests_are_a_tree_each(serving: Serving, recorded: Recorded) -> None:
    async with serving(engine="mocker", workers=2) as it, anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(chat(it.app, stream=bool(number % 2), max_tokens=4).run)
    assert not recorded.open
    traces: dict[str, list[Any]] = {}
    for node in recorded.nodes:
        traces.setdefault(node.trace_id, []).append(node)
    assert [str(one_tree(nodes)) for nodes in traces.values()] == [ALONE + STAGES] * 10


@given(
    shape=st.sampled_from(["plain", "kv", "disaggregated", "both"]),
    leaves_after_ms=st.integers(0, 60) | st.none(),
    dies_after_ms=st.integers(0, 60) | st.none(),
    stream=st.booleans(),
    prompts=st.integers(1, 3),
)
@settings(max_examples=2 * settings().max_examples // 5)
async def test_whenever_a_request_ends_there_is_one_tree(
    shape: str,
    leaves_after_ms: int | None,
    dies_after_ms: int | None,
    stream: bool,
    prompts: int,
    serving: Serving,
    recorded: Recorded,
) -> None:
    fields = {"router": "kv"} if shape in ("kv", "both") else {}
    halves = {"prefill_workers": 2} if shape in ("disaggregated", "both") else {}
    recorded.ended.clear()
    async with serving(engine="mocker", workers=2, **fields, **halves) as it:
        exchange = complete(it.app, prompt=["p" * 50] * prompts, max_tokens=8, stream=stream)

        async def leave(after_ms: int) -> None:
            await anyio.sleep(after_ms / 1000)
            exchange.leave()

        async def die(after_ms: int) -> None:
            await anyio.sleep(after_ms / 1000)
            await it.opened.fleet.die(it.opened.workers[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            for act, after_ms in ((leave, leaves_after_ms), (die, dies_after_ms)):
                if after_ms is not None:
                    tasks.start_soon(act, after_ms)
        await anyio.sleep(120)
    late = {span.name for span in recorded.ended} - {"Preprocess", "Migration", "Detokenize"} if halves else ()
    assert str(recorded.tree(outlives=late)).startswith("POST /v1/completions\n  Preprocess")


async def test_a_client_that_leaves_amid_its_body_is_a_server_span(serving: Serving, recorded: Recorded) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(f"there is no client for {message}")

    async with serving() as it:
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await it.app(scope, receive, send)
    tree = recorded.tree()
    assert (str(tree), tree.root.attributes["penstock.ending"]) == (ALONE, "closed")
