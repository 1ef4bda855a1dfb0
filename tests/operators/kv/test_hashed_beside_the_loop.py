"""A long prompt is hashed in the threads that come with it, before a router looks it up."""

from __future__ import annotations

from random import Random
from threading import get_ident
from typing import Any

import pytest

from operators import KvPushRouter, Model, Preprocess, PushRouter
from operators.kv import PromptBlocks, kv_router
from operators.kv import prompt as block_hash
from operators.kv.request import RouteRequest, hash_beside_the_loop
from operators.text import PromptThreads, offered_threads
from operators.text.prompt_threads import offer_threads
from pipeline import Annotated, Cancelled, Context, InvalidArgument, link
from pipeline.llm import block_hash_array
from pipeline.network import static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.protocols.limits import PromptWork
from pipeline.protocols.openai import CompletionRequest
from pipeline.testing import ScriptedEngine
from pipeline.wire import from_plain


@pytest.fixture
def hashing_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which prompts are hashed."""
    threads: list[int] = []
    hashed = block_hash_array

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(get_ident())
        return hashed(*args, **options)

    monkeypatch.setattr(block_hash, "block_hash_array", noted)
    return threads


def route(tokens: list[int]) -> RouteRequest:
    return RouteRequest(blocks=PromptBlocks(tokens, 4))


async def test_with_threads_the_hashes_are_made_there_and_found_in_the_loop(hashing_threads: list[int]) -> None:
    request, asked = Context(None), route(list(range(100)))
    offer_threads(request, PromptThreads())
    await hash_beside_the_loop(asked, request)
    plain = PromptBlocks(list(range(100)), 4)
    assert asked.blocks.local_hashes == plain.local_hashes
    assert asked.blocks.sequence_hashes == plain.sequence_hashes
    there, here = hashing_threads
    assert (there != get_ident(), here) == (True, get_ident())


async def test_without_threads_nothing_is_hashed_before_it_is_looked_up(hashing_threads: list[int]) -> None:
    await hash_beside_the_loop(route([1, 2, 3, 4]), Context(None))
    assert not hashing_threads


async def test_a_stopped_request_and_tokens_that_are_none_fail_as_they_do_in_the_loop() -> None:
    request = Context(None)
    offer_threads(request, PromptThreads())
    with pytest.raises(InvalidArgument):
        await hash_beside_the_loop(route([-1] * 4), request)
    request.stop()
    with pytest.raises(Cancelled):
        await hash_beside_the_loop(route([1, 2, 3, 4]), request)


async def test_the_router_hashes_a_long_prompt_in_its_threads_and_nowhere_else(hashing_threads: list[int]) -> None:
    engine: Any = ScriptedEngine([Annotated(LLMEngineOutput([1]))])
    workers = static_workers({1: engine, 2: engine})
    push: PushRouter[Any, Any] = PushRouter(workers)
    with kv_router(workers, block_size_tokens=4, health=push.health, rng=Random(1)) as router:
        graph: Any = KvPushRouter(router) >> push
        request = Context(PreprocessedRequest(list(range(100))))
        offer_threads(request, PromptThreads())
        async with await graph.generate(request) as stream:
            assert [item.data.token_ids async for item in stream] == [[1]]
    assert hashing_threads
    assert get_ident() not in hashing_threads


@pytest.mark.parametrize(("tokens", "has_threads"), [(8, False), (9, True)])
async def test_only_long_prompts_bring_their_threads_along(tokens: int, has_threads: bool) -> None:
    graph: Any = link(
        Preprocess(Model.byte_level("m"), work=PromptWork(inline_prompt_characters=8)), ScriptedEngine([])
    )
    request = Context(from_plain({"model": "m", "prompt": [1] * tokens}, CompletionRequest))
    await (await graph.generate(request)).aclose()
    assert (offered_threads(request) is not None) is has_threads
