"""An answer is the same to the byte, fed as `ResponseStream.feed` does or read item by item from workers elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import anyio
import pytest
from attrs import frozen
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import ASGIApp

from operators import Detokenize, Migration, Model, Preprocess, PushRouter
from operators.kv import KvPushRouter, KvRouter, KvRouterConfig, kv_router
from operators.kv.metrics import RequestMeter
from operators.kv.reservation import Reservation
from pipeline import Annotated, AsyncEngine, Context, Disconnected, Gate, ResponseStream, Take
from pipeline.network import Workers
from pipeline.network.tcp import TcpOptions
from pipeline.network.tcp.calls import RemoteStream
from pipeline.protocols import (
    BackendOutput,
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    PreprocessedRequest,
    StopConditions,
    TopLogprob,
)
from pipeline.testing import watch_streams
from serving.http import HttpOptions, app
from tests.pipeline.network.worlds import WHERE, two_runtimes
from tests.serving.worlds import Exchange, chat, complete

PROMPT = "hi"
TEXT = "Wört ab, STOP and 日本 STOPPED; the rest. "
NO_TOKEN = 100_000
BLOCK = 4


@frozen
class Recipe:
    """An answer of a worker."""

    gaps_s: tuple[float, ...]
    """Seconds before each chunk, over and over."""
    cuts: tuple[int, ...] = (1,)
    """Tokens of the chunks, over and over."""
    breaks_after: int | None = None
    """Tokens of the first worker before its stream breaks."""
    wrong_at: int | None = None
    """The place of an id that is no token."""
    index: int | None = None
    """The index of the only choice."""


class Slow(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    """Answers each choice with the bytes of a text."""

    def __init__(self, recipe: Recipe, made: list[int], *, breaks: bool) -> None:
        self._recipe, self._made, self._breaks = recipe, made, breaks

    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        return ResponseStream(self._items(request), request)

    async def _items(self, context: Context[PreprocessedRequest]) -> AsyncGenerator[Annotated[LLMEngineOutput], None]:
        recipe, request = self._recipe, context.payload
        tokens = list(TEXT.encode())
        if recipe.wrong_at is not None:
            tokens[recipe.wrong_at] = NO_TOKEN
        limit = request.stop_conditions.max_tokens
        tokens = tokens[len(request.token_ids) - len(PROMPT) :][: None if self._breaks else limit]
        choices = request.sampling_options.n or 1
        at = number = 0
        while at < len(tokens):
            await anyio.sleep(recipe.gaps_s[number % len(recipe.gaps_s)])
            end = min(len(tokens), at + recipe.cuts[number % len(recipe.cuts)])
            if self._breaks and recipe.breaks_after is not None and end > recipe.breaks_after:
                raise Disconnected("the worker broke")
            for index in range(choices):
                if context.is_stopped:
                    return
                chunk = LLMEngineOutput(tokens[at:end], index=index if choices > 1 else recipe.index)
                if (top := request.output_options.logprobs) is not None:
                    chunk.log_probs = [-token / 64 for token in tokens[at:end]]
                    chunk.top_logprobs = [
                        [TopLogprob(rank + 1, (token + rank) % 128, -rank / 8) for rank in range(top + 1)]
                        for token in tokens[at:end]
                    ]
                if end == len(tokens):
                    chunk.finish_reason = FinishReason.LENGTH
                    chunk.completion_usage = CompletionUsage.of(len(request.token_ids), end * choices)
                self._made.append(end - at)
                yield Annotated(chunk)
            at, number = end, number + 1


@frozen
class Served:
    """An app in front of two workers."""

    app: ASGIApp
    fed: list[int]
    """The tokens that were fed."""
    made: list[int]
    """How many tokens the workers have made, chunk by chunk."""


def router_of(workers: Workers[Any, Any]) -> KvRouter:
    return kv_router(workers, KvRouterConfig(use_kv_events=False), block_size_tokens=BLOCK, rng=Random(1))


@asynccontextmanager
async def serving(
    recipe: Recipe, *, is_fed: bool, is_kv: bool = False, http: HttpOptions | None = None, **options: Any
) -> AsyncIterator[Served]:
    """Serve chats with these workers; the streams of the second one never break."""
    fed, made, model, feed = list[int](), list[int](), Model.byte_level("m"), RemoteStream.feed

    def feeds(stream: RemoteStream, take: Take, gate: Gate) -> bool:
        def counted(token_id: int, index: int | None) -> bool:
            is_taken = take(token_id, index)
            fed.extend([token_id] * is_taken)
            return is_taken

        return is_fed and feed(stream, counted, gate)

    with watch_streams() as streams, patch.object(RemoteStream, "feed", feeds):
        async with two_runtimes("tcp", options=TcpOptions(**options)) as (worker, caller):
            for number, breaks in ((1, True), (2, False)):
                await worker.serve(WHERE, Slow(recipe, made, breaks=breaks), instance_id=number)
            workers = caller.workers(WHERE, Annotated[LLMEngineOutput])
            await workers.wait_for_instances()
            await anyio.sleep(1.0)
            stages, pool = Preprocess(model) >> Migration(3) >> Detokenize(model), PushRouter(workers)
            graph = stages >> KvPushRouter(router_of(workers)) >> pool if is_kv else stages >> pool
            yield Served(app({"m": graph}, options=http), fed, made)
    assert streams.open == []


async def answered(
    recipe: Recipe, fields: dict[str, Any], *, is_chat: bool, is_fed: bool, is_kv: bool = False
) -> tuple[Exchange, int]:
    """Return the client's exchange, and how many tokens were fed."""
    found: list[tuple[Exchange, int]] = []
    async with serving(recipe, is_fed=is_fed, is_kv=is_kv) as served:
        body: dict[str, Any] = fields if is_chat else {"prompt": PROMPT} | fields
        exchange = (chat if is_chat else complete)(served.app, **body)
        found.append((await exchange.run(), len(served.fed)))
    return found[0]


def without_ids(exchange: Exchange) -> tuple[int, list[Any]]:
    """Return the status and the data of the events, or the whole answer, without what differs between requests."""
    found = exchange.chunks if exchange.content.startswith(b"data: ") else [exchange.json]
    for chunk in found:
        for name in ("id", "created", "request_id"):
            chunk.pop(name, None)
    return exchange.status, found


async def same(
    recipe: Recipe, fields: dict[str, Any], *, is_chat: bool = True, is_kv: bool = False
) -> tuple[list[Any], int]:
    """Return the answer, which is the same when nothing is fed, and how many tokens were fed."""
    fed, count = await answered(recipe, fields, is_chat=is_chat, is_fed=True, is_kv=is_kv)
    read, none = await answered(recipe, fields, is_chat=is_chat, is_fed=False)
    shown = without_ids(fed)
    assert shown == without_ids(read)
    assert none == 0
    return shown[1], count


APART = Recipe((0.01,))
ALL = len(TEXT.encode())

recipes = st.builds(
    Recipe,
    st.lists(st.sampled_from([0.01, 0.04]), min_size=1, max_size=6).map(tuple),
    st.lists(st.sampled_from([1, 1, 1, 1, 3]), min_size=1, max_size=5).map(tuple),
    breaks_after=st.none() | st.integers(0, ALL),
    wrong_at=st.none() | st.none() | st.integers(0, ALL - 1),
)


@example(recipe=APART, stops=[], max_tokens=100, choices=1, logprobs=False, is_chat=True, stream=True)
@example(recipe=APART, stops=[], max_tokens=100, choices=3, logprobs=False, is_chat=False, stream=True)
@example(recipe=APART, stops=[], max_tokens=100, choices=1, logprobs=False, is_chat=True, stream=False)
@example(
    recipe=Recipe((0.01,), breaks_after=20),
    stops=[],
    max_tokens=100,
    choices=1,
    logprobs=False,
    is_chat=True,
    stream=True,
)
@example(
    recipe=Recipe((0.01,), wrong_at=20), stops=[], max_tokens=100, choices=1, logprobs=False, is_chat=True, stream=True
)
@given(
    recipe=recipes,
    stops=st.lists(st.sampled_from(["STOP", "日", "rest. ", "zz"]), max_size=2, unique=True),
    max_tokens=st.sampled_from([1, 7, 30, 100]),
    choices=st.sampled_from([1, 1, 1, 3]),
    logprobs=st.sampled_from([False, False, True]),
    is_chat=st.booleans(),
    stream=st.sampled_from([True, True, False]),
)
async def test_an_answer_is_the_same_fed_and_read(
    recipe: Recipe, stops: Sequence[str], max_tokens: int, choices: int, logprobs: bool, is_chat: bool, stream: bool
) -> None:
    fields: dict[str, Any] = {"max_tokens": max_tokens, "n": choices}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if stops:
        fields["stop"] = list(stops)
    if logprobs:
        fields |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    await same(recipe, fields, is_chat=is_chat)


@pytest.mark.parametrize("is_kv", [False, True])
async def test_all_tokens_but_the_first_and_the_last_are_fed(is_kv: bool) -> None:
    found, count = await same(APART, {"max_tokens": 100, "stream": True}, is_kv=is_kv)
    assert count == ALL - 2
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in found) == TEXT


@pytest.mark.parametrize("fields", [{"stop": ["zz"]}, {"logprobs": True, "top_logprobs": 1}, {"n": 3}])
async def test_what_is_more_than_a_token_or_does_not_come_alone_is_read(fields: dict[str, Any]) -> None:
    assert (await same(APART, {"max_tokens": 100, "stream": True, **fields}))[1] == 0


@pytest.mark.parametrize("min_tokens", [0, 20])
async def test_a_token_that_may_end_its_choice_is_read(min_tokens: int) -> None:
    tokens, stop = TEXT.encode(), ord("t")
    end = tokens.index(stop, min_tokens)
    fields = {"max_tokens": 100, "stream": True, "stop_token_ids": [stop], "min_tokens": min_tokens}
    found, count = await same(APART, fields)
    assert count == end - 1 - tokens[1:end].count(stop)
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_broken_answer_goes_on_behind_the_fed_tokens() -> None:
    found, count = await same(Recipe((0.01,), breaks_after=20), {"max_tokens": 100, "stream": True})
    assert count == 19
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in found) == TEXT


@pytest.mark.parametrize("refused", [[], [ord("t")]])
async def test_the_kv_router_counts_fed_tokens_as_those_that_are_read(refused: list[int]) -> None:
    """A token that the stage above leaves to the reader is counted once."""
    seen: dict[bool, list[int]] = {}
    fields = {"max_tokens": 100, "min_tokens": 100, "stream": True, "stop_token_ids": refused}
    for is_fed in (True, False):
        steps = seen[is_fed] = list[int]()

        def grow(reservation: Reservation, added: int, steps: list[int] = steps) -> None:
            steps += [reservation.output_tokens] * added

        def ended(meter: RequestMeter, output_tokens: int, steps: list[int] = steps) -> None:
            steps.append(output_tokens)

        with patch.object(Reservation, "_grow", grow), patch.object(RequestMeter, "ended", ended):
            _, count = await answered(APART, fields, is_chat=True, is_fed=is_fed, is_kv=True)
        assert (count > 10) is is_fed
    assert seen[True] == seen[False] == [*range(3, ALL + 1, BLOCK), ALL]


@pytest.mark.parametrize("how", ["reads on", "leaves"])
async def test_a_client_that_does_not_read_holds_its_worker_back(how: str) -> None:
    with patch("serving.http.generation.reply.BUFFER_BYTES", 600):
        async with serving(APART, is_fed=True, window_items=8) as served, anyio.create_task_group() as tasks:
            exchange = chat(served.app, stream=True, max_tokens=100)
            tasks.start_soon(exchange.run)
            await exchange.until(lambda it: len(it.writes) > 4)
            exchange.stop_reading()
            await anyio.sleep(1.0)
            fed = len(served.fed)
            assert 4 <= fed < 10
            assert len(served.made) < fed + 15
            if how == "leaves":
                exchange.leave()
            else:
                exchange.read_on()
            await anyio.sleep(2.0)
            assert exchange.returned
            if how == "reads on":
                assert exchange.text == TEXT
                assert len(served.fed) > fed + 10, "it is fed again"


async def test_fed_tokens_are_no_silence() -> None:
    async with serving(Recipe((1.0,)), is_fed=True, http=HttpOptions(silence_timeout_s=10)) as served:
        exchange = await chat(served.app, stream=True, max_tokens=100).run()
    assert exchange.text == TEXT
    assert "error" not in exchange.chunks[-1]
    assert len(served.fed) == ALL - 2


@pytest.mark.parametrize("index", [None, 0])
@pytest.mark.parametrize("decodes", [True, False])
async def test_an_answer_that_breaks_after_its_last_token_ends_with_length_if_all_were_fed(
    decodes: bool, index: int | None
) -> None:
    fed: list[tuple[Any, ...]] = []

    def take(*parts: object) -> bool:
        fed.append(parts)
        return True

    async with two_runtimes("tcp") as (worker, caller):
        await worker.serve(WHERE, Slow(Recipe((0.01,), breaks_after=2, index=index), [], breaks=True), instance_id=1)
        workers = caller.workers(WHERE, Annotated[LLMEngineOutput])
        await workers.wait_for_instances()
        below = Detokenize(Model.byte_level("m")) >> PushRouter(workers) if decodes else PushRouter(workers)
        request = PreprocessedRequest(list(PROMPT.encode()), stop_conditions=StopConditions(max_tokens=2))
        async with await (Migration(3) >> below).generate(Context(request)) as stream:
            assert stream.feed(take, Gate())
            (end,) = [item.ok().into_data() async for item in stream]
    assert fed == ([(87, index, "W"), (195, index, "")] if decodes else [(87, index), (195, index)])
    assert type(end) is (BackendOutput if decodes else LLMEngineOutput)
    assert (end.finish_reason, end.index) == (FinishReason.LENGTH, index)


async def test_a_failure_of_the_reply_ends_the_request_as_it_does_for_an_item_that_is_read() -> None:
    for is_fed in (True, False):
        with patch("serving.openai.answers.encode", side_effect=ValueError("no text")):
            exchange, _ = await answered(APART, {"max_tokens": 100, "stream": True}, is_chat=True, is_fed=is_fed)
        assert exchange.status == 200
        assert exchange.chunks[-1]["error"]["type"] == "internal_server_error"
        assert exchange.content.endswith(b"data: [DONE]\n\n")
