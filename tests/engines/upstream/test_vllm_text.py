"""VllmText: tokens of prompts and texts of answers come from the server, and what is neither is an error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.upstream import VllmText
from pipeline import InvalidArgument, PenstockError
from pipeline.errors import InvalidMessage, StatusError
from pipeline.protocols import OutputOptions, RoutingHints
from tests.engines.upstream.vllm_worlds import Tokenizing
from tests.engines.upstream.wire import Line
from tests.engines.upstream.worlds import continued, outputs, prompt, running, started_on, tokens_of

RECORDED = Path(__file__).parent / "recorded" / "vllm.json"


@asynccontextmanager
async def started(**fields: Any) -> AsyncIterator[tuple[Tokenizing, VllmText]]:
    async with running(Tokenizing, **fields) as server, started_on(VllmText, server) as engine:
        yield server, engine


@pytest.mark.parametrize("generates", [True, False])
async def test_an_answer_has_the_ids_and_the_texts_of_the_server(generates: bool) -> None:
    async with started(generates=generates) as (server, engine):
        found = await outputs(engine, prompt(5))
        assert tokens_of(found) == continued([5, 6, 7], 5)
        assert "".join(one.text or "" for one in found) == "".join(f"<{token}>" for token in tokens_of(found))
        assert not [one for one in server.requests("/inference/v1/generate") if one.json.get("stream")]


async def test_a_priority_is_left_out_where_the_server_has_none() -> None:
    async with started() as (server, engine):
        assert len(tokens_of(await outputs(engine, prompt(2, routing=RoutingHints(priority=3))))) == 2
        assert "priority" not in server.requests("/v1/completions")[-1].json


async def test_log_probabilities_come_with_the_texts() -> None:
    async with started() as (_, engine):
        found = await outputs(engine, prompt(3, output_options=OutputOptions(logprobs=1)))
        assert all(one.log_probs and one.text for one in found if one.token_ids)


async def test_the_tokens_of_a_prompt_are_read_as_the_server_was_recorded() -> None:
    exchanges = json.loads(RECORDED.read_text())["exchanges"]
    (recorded,) = [one for one in exchanges if one["name"] == "tokenize"]
    async with started(tokenized=recorded["answer"]["json"]) as (server, engine):
        assert await engine.tokenized(recorded["body"]) == recorded["answer"]["json"]["tokens"]
        assert server.requests("/tokenize")[-1].json == recorded["body"]


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (200, {}, InvalidMessage),
        (200, [1], InvalidMessage),
        (200, {"tokens": "7"}, InvalidMessage),
        (200, {"tokens": [7, -1]}, InvalidMessage),
        (200, {"tokens": [7, True]}, InvalidMessage),
        (400, {"error": {"message": "too long", "code": 400}}, InvalidArgument),
        (401, {"error": {"message": "no key", "code": 401}}, StatusError),
        (404, {"detail": "Not Found"}, InvalidArgument),
    ],
)
async def test_what_are_no_tokens_is_a_typed_error(status: int, answer: Any, error: type[PenstockError]) -> None:
    async with started() as (server, engine):
        server.tokenize_status, server.tokenized = status, answer
        with pytest.raises(error) as raised:
            await engine.tokenized({"prompt": "a"})
    assert type(raised.value) is error


async def test_a_text_that_is_none_is_an_error() -> None:
    async def garbled(line: Line) -> None:
        await line.event({"id": "x", "choices": [{"index": 0, "token_ids": [1], "text": 7, "finish_reason": None}]})

    async with started(faults={1: garbled}) as (_, engine):
        with pytest.raises(InvalidMessage):
            await outputs(engine, prompt(5))
