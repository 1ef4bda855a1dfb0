"""Long prompts in a standard graph: their settings reach the stage, and a refusal reaches the client as an overload."""

from __future__ import annotations

import json
from typing import Any

import pytest

from operators import Preprocess
from operators.text import TooManyPrompts
from pipeline import Context
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import PromptWork, RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest
from pipeline.wire import from_plain
from serving.deployment import GraphConfig, standard_graph
from serving.problems import explain


async def test_the_settings_of_a_graph_are_those_of_its_first_stage() -> None:
    work = PromptWork(inline_prompt_characters=3, tokenizer_threads=1, max_waiting_prompts=5)
    async with standard_graph(GraphConfig(prompt_work=work)) as graph:
        (stage,) = [each for each in graph.stages if isinstance(each, Preprocess)]
        assert stage._threads.settings is work


@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_a_long_prompt_has_the_answer_that_it_has_without_threads(router: Any) -> None:
    plain = {"model": "echo", "messages": [{"role": "user", "content": "hello " * 2_000}], "max_tokens": 40}
    texts = []
    for characters in (0, 10**9):
        config = GraphConfig(router=router, prompt_work=PromptWork(inline_prompt_characters=characters))
        request = Context(from_plain(plain, ChatCompletionRequest))
        async with standard_graph(config) as graph, await graph.generate(request) as stream:
            texts.append("".join([item.data.text or "" async for item in stream if item.data is not None]))
    assert texts[0] == texts[1] == ("hello " * 7)[:40]


def test_too_many_long_prompts_are_an_overload_with_the_limit_and_when_to_come_back() -> None:
    exceeded = ExceededLimit("max_waiting_prompts", 6, 5)
    problem = explain(TooManyPrompts("6 long prompts wait", exceeded=exceeded))
    assert problem.status == 529
    assert (b"retry-after", b"1") in problem.headers()
    assert json.loads(problem.body())["limit"] == {"name": "max_waiting_prompts", "value": 6, "threshold": 5}


def test_defaults_let_long_contexts_and_large_batches_pass() -> None:
    assert PromptWork().max_waiting_prompts >= 1_000
    assert RequestLimits().max_unbroken_characters >= 100_000
