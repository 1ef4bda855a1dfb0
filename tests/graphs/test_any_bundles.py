"""However an engine bundles its tokens, callers of the graph and clients get the same answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from attrs import evolve, frozen
from hypothesis import example, given
from hypothesis import strategies as st

from engines import EngineConfig, GenerateContext, LLMEngine, as_engine
from operators import Detokenize, Migration, Model, Preprocess, PushRouter
from pipeline import AsyncEngine, Context, EngineShutdown
from pipeline.network import static_workers
from pipeline.protocols import (
    BackendOutput,
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    PromptTokensDetails,
    SamplingOptions,
    StopConditions,
    TopLogprob,
)
from pipeline.testing import bundled, watch_streams
from serving.http import app
from tests.serving.worlds import chat, complete

PROMPT = "hi"
TEXT = "Wört ab, STOP abc and 日本 STOPPED; the rest of it. "


@frozen
class Recipe:
    """An answer, and how it comes."""

    cuts: tuple[int, ...]
    """Tokens of the engine's chunks, over and over."""
    joins_end: bool
    """Whether the last tokens come with the finish reason."""
    breaks_after: int | None
    """Tokens of the first worker before its stream breaks."""
    size: int | None
    """Of the bundles between router and worker."""


class Recorded(LLMEngine):
    """Answers each choice with the bytes of a text, in chunks as the recipe has them."""

    def __init__(self, recipe: Recipe, *, breaks: bool) -> None:
        self._recipe = recipe
        self._breaks = breaks

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m")

    async def cleanup(self) -> None:
        """There is nothing to release."""

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        recipe, choices = self._recipe, request.sampling_options.n or 1
        tokens = list(TEXT.encode())[len(request.token_ids) - len(PROMPT) :][: request.stop_conditions.max_tokens]
        emitted = 0
        for start, end in _places(len(tokens), recipe):
            if self._breaks and recipe.breaks_after is not None and end > recipe.breaks_after:
                raise EngineShutdown("the engine broke")
            for index in range(choices):
                if context.is_stopped:
                    yield LLMEngineOutput.cancelled()
                    return
                emitted += end - start
                chunk = _chunk(tokens, start, end, request.output_options.logprobs)
                chunk.index = index if choices > 1 else None
                if recipe.joins_end and end == len(tokens):
                    chunk.finish_reason = FinishReason.LENGTH
                if start == 0 or chunk.finish_reason is not None:
                    chunk.completion_usage = _usage(request, emitted)
                yield chunk
        for index in range(0 if recipe.joins_end and tokens else choices):
            chunk = LLMEngineOutput.length()
            chunk.index = index if choices > 1 else None
            chunk.completion_usage = _usage(request, emitted)
            yield chunk


def _chunk(tokens: list[int], start: int, end: int, top: int | None) -> LLMEngineOutput:
    """Return a chunk of these tokens, with their log probabilities and so many candidates if they are wanted."""
    chunk = LLMEngineOutput(tokens[start:end])
    if top is not None:
        chunk.log_probs = [-token / 64 for token in tokens[start:end]]
        chunk.cum_log_probs = -sum(tokens[:end]) / 64
        chunk.top_logprobs = [
            [TopLogprob(rank + 1, (token + rank) % 128, -rank / 8) for rank in range(top + 1)]
            for token in tokens[start:end]
        ]
    return chunk


def _usage(request: PreprocessedRequest, tokens: int) -> CompletionUsage:
    usage = CompletionUsage.of(len(request.token_ids), tokens)
    usage.prompt_tokens_details = PromptTokensDetails(1)
    return usage


def _places(tokens: int, recipe: Recipe) -> list[tuple[int, int]]:
    """Return where each chunk begins and ends."""
    found, at, number = [], 0, 0
    while at < tokens:
        end = min(tokens, at + recipe.cuts[number % len(recipe.cuts)])
        found.append((at, end))
        at, number = end, number + 1
    return found


ONE_BY_ONE = Recipe((1,), joins_end=False, breaks_after=None, size=0)

recipes = st.builds(
    Recipe,
    st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple),
    joins_end=st.booleans(),
    breaks_after=st.none() | st.integers(0, 40),
    size=st.sampled_from([0, 1, 7, None]),
)
stop_lists = st.lists(
    st.sampled_from(["STOP", "STOPPED", "b, S", "日", "rest of it. ", " ", "zz", "abc an"]), max_size=2, unique=True
)
limits = st.sampled_from([1, 7, 30, 100])


@asynccontextmanager
async def serving(recipe: Recipe) -> AsyncIterator[AsyncEngine[Any, Any]]:
    """The stages above two workers, of which the streams of the first may break."""
    model = Model.byte_level("m")
    async with AsyncExitStack() as stack:
        engines: dict[int, AsyncEngine[Any, Any]] = {}
        for number, breaks in ((1, True), (2, False)):
            engine = await stack.enter_async_context(as_engine(Recorded(recipe, breaks=breaks)))
            engines[number] = engine if recipe.size == 0 else bundled(engine, recipe.size)
        yield Migration(3) >> Detokenize(model) >> PushRouter(static_workers(engines))


def expected(stops: Sequence[str], max_tokens: int, include: bool) -> tuple[str, FinishReason, str | None]:
    """Return the text of each choice, why it ends, and its stop string."""
    text = TEXT.encode()[:max_tokens].decode(errors="replace")
    found = [(text.find(stop), place, stop) for place, stop in enumerate(stops) if stop in text]
    if not found:
        return text, FinishReason.LENGTH, None
    at, _, stop = min(found)
    return text[: at + len(stop) * include], FinishReason.STOP, stop


WHOLE = Recipe((9,), joins_end=True, breaks_after=None, size=None)
BROKEN = Recipe((5, 2), joins_end=True, breaks_after=20, size=7)


@example(recipe=WHOLE, stops=["STOP"], max_tokens=100, include=False, choices=1)
@example(recipe=WHOLE, stops=[" ab", "STOP"], max_tokens=100, include=True, choices=3)
@example(recipe=BROKEN, stops=["STOPPED"], max_tokens=100, include=False, choices=1)
@example(recipe=BROKEN, stops=[], max_tokens=30, include=False, choices=1)
@given(recipe=recipes, stops=stop_lists, max_tokens=limits, include=st.booleans(), choices=st.sampled_from([1, 1, 3]))
async def test_the_graph_gives_the_same_answer(
    recipe: Recipe, stops: list[str], max_tokens: int, include: bool, choices: int
) -> None:
    request = PreprocessedRequest(
        list(PROMPT.encode()),
        stop_conditions=StopConditions(max_tokens=max_tokens, stop=stops),
        sampling_options=SamplingOptions(n=choices, include_stop_str_in_output=include),
        output_options=OutputOptions(logprobs=2),
    )
    if choices > 1:
        recipe = evolve(recipe, breaks_after=None)  # such a request does not migrate
    bundles, one_by_one = await answered(recipe, request), await answered(ONE_BY_ONE, request)
    text, reason, stop = expected(stops, max_tokens, include)
    for index in range(choices):
        whole = [item for item in bundles if (item.index or 0) == index]
        assert "".join(item.text or "" for item in whole) == text
        assert [(item.finish_reason, item.stop_reason) for item in whole if item.finish_reason] == [(reason, stop)]
        assert whole[-1].finish_reason == reason
        assert of_tokens(whole) == of_tokens([item for item in one_by_one if (item.index or 0) == index])
        sums = [item.cum_log_probs for item in whole if item.token_ids]
        assert sums[-1] == pytest.approx(sum(of_tokens(whole)["log_probs"]))
    if choices == 1:
        counted = 0
        for item in bundles:
            counted += len(item.token_ids)
            if item.completion_usage is not None:
                assert item.completion_usage.completion_tokens == counted
                assert item.completion_usage.total_tokens == counted + len(PROMPT)


async def answered(recipe: Recipe, request: PreprocessedRequest) -> list[BackendOutput]:
    with watch_streams() as streams:
        async with serving(recipe) as graph, await graph.generate(Context(request)) as stream:
            items = [item.ok().data async for item in stream]
    assert streams.open == []
    return items


def of_tokens(items: list[BackendOutput]) -> dict[str, list[Any]]:
    """Return all lists with an entry for each token, joined."""
    names = ("token_ids", "tokens", "log_probs", "top_logprobs")
    return {name: [one for item in items for one in getattr(item, name) or ()] for name in names}


@example(recipe=WHOLE, stops=["STOP"], max_tokens=100, choices=1, logprobs=True, is_chat=True)
@example(recipe=WHOLE, stops=["STOPPED"], max_tokens=100, choices=2, logprobs=True, is_chat=False)
@example(recipe=BROKEN, stops=["STOPPED"], max_tokens=100, choices=1, logprobs=True, is_chat=False)
@example(recipe=BROKEN, stops=["zz"], max_tokens=30, choices=1, logprobs=False, is_chat=True)
@given(
    recipe=recipes,
    stops=stop_lists,
    max_tokens=limits,
    choices=st.sampled_from([1, 1, 2]),
    logprobs=st.booleans(),
    is_chat=st.booleans(),
)
async def test_clients_get_the_same_answer(
    recipe: Recipe, stops: list[str], max_tokens: int, choices: int, logprobs: bool, is_chat: bool
) -> None:
    if choices > 1:
        recipe = evolve(recipe, breaks_after=None)
    fields: dict[str, Any] = {"max_tokens": max_tokens, "n": choices} | ({"stop": stops} if stops else {})
    if logprobs:
        fields |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    bundles, one_by_one = await bodies(recipe, fields, is_chat), await bodies(ONE_BY_ONE, fields, is_chat)
    assert bundles == one_by_one
    streamed, whole = bundles
    assert streamed == whole
    text, reason, _ = expected(stops, max_tokens, include=False)
    for shown in streamed["choices"].values():
        assert shown["text"] == text
        assert shown["finish_reason"] == [str(reason)]


async def bodies(recipe: Recipe, fields: dict[str, Any], is_chat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a client has of the streamed answer, and of the whole one."""
    send = chat if is_chat else complete
    prompt: dict[str, Any] = {} if is_chat else {"prompt": PROMPT}
    async with serving(recipe) as graph:
        served = app({"m": Preprocess(Model.byte_level("m")) >> graph})
        streamed = await send(served, stream=True, stream_options={"include_usage": True}, **prompt, **fields).run()
        whole = await send(served, **prompt, **fields).run()
    assert (streamed.status, whole.status) == (200, 200), whole.content
    return client_view(streamed.chunks), client_view([whole.json])


def client_view(chunks: list[Any]) -> dict[str, Any]:
    """Return the deltas of each choice, joined, and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            shown = choices.setdefault(choice["index"], {"text": "", "finish_reason": [], "logprobs": {}})
            message = choice.get("delta") or choice.get("message") or {}
            shown["text"] += choice.get("text") or message.get("content") or ""
            shown["finish_reason"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
            for name, entries in (choice.get("logprobs") or {}).items():
                shown["logprobs"].setdefault(name, []).extend(entries or [])
    return {"choices": choices, "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")]}
