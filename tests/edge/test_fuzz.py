"""Whatever is in the fields of a request and in its headers: an answer of the known form or a clear refusal.

No 500, no hang, no traceback, nothing left open.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import anyio
import openai.types
import openai.types.chat
import pytest
from hypothesis import given, settings
from starlette.types import ASGIApp

from pipeline.testing import watch_streams
from serving.deployment import GraphConfig, standard_graph
from serving.http import app
from tests.edge.fuzz import Case, cases
from tests.serving.worlds import Exchange

LEAVES_AFTER_S = 0.5
"""When the client goes away: some answers would have a million tokens."""
TOKEN_S = 0.005
HANG_S = 30.0
FAST, ALL = 50, 10_000
"""Cases on each of the two loops."""
_IN_TEXT = {"user": "user id"}
"""What a message calls a field whose name alone would be no word of it."""


@pytest.fixture
async def service() -> AsyncIterator[ASGIApp]:
    config = GraphConfig(engine="echo", engine_args={"delay_s": str(TOKEN_S)}, model_name="m")
    async with standard_graph(config) as graph:
        yield app({"m": graph})


@given(case=cases())
@settings(max_examples=FAST)
async def test_a_fuzzed_request_gets_an_answer_or_a_clear_refusal(
    service: ASGIApp, caplog: pytest.LogCaptureFixture, case: Case
) -> None:
    await _hold(service, caplog, case)


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=ALL)
async def test_ten_thousand_fuzzed_requests_get_an_answer_or_a_clear_refusal(
    service: ASGIApp, caplog: pytest.LogCaptureFixture, case: Case
) -> None:
    await _hold(service, caplog, case)


async def _hold(service: ASGIApp, caplog: pytest.LogCaptureFixture, case: Case) -> None:
    caplog.clear()
    headers = {"content-type": "application/json"} | case.headers
    exchange = Exchange(service, case.path, json.dumps(case.body).encode(), headers=headers)
    with watch_streams() as streams:
        left = await _ask(exchange)
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not logged, logged[0].getMessage()
    assert not streams.unclosed
    if exchange.status == 0:
        assert left
    elif exchange.status == 200:
        _check_answer(case, exchange, left)
    else:
        _check_refusal(case, exchange)


async def _ask(exchange: Exchange) -> bool:
    """Send the request, and go away if the answer takes too long; return whether that was so."""
    left = False
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            with anyio.move_on_after(LEAVES_AFTER_S) as waiting:
                await exchange.until(lambda so_far: so_far.returned)
            left = waiting.cancelled_caught
            if left:
                exchange.leave()
    return left


def _check_refusal(case: Case, exchange: Exchange) -> None:
    """A 4xx or 501 as JSON that names a field of the request, or a header."""
    assert 400 <= exchange.status < 500 or exchange.status == 501
    assert exchange.response_headers["content-type"] == "application/json"
    assert len(exchange.content) < 4096
    problem = exchange.json
    assert problem["code"] == exchange.status
    message = problem["message"].casefold()
    if exchange.status in (404, 431):
        return
    # The refusal of too many choices names `n` also where the request leaves it at 1 and has too many prompts.
    names = [*case.changed, *case.body, "model", "messages", "prompt", "n"]
    assert any(_names(message, name) for name in names), problem


def _names(message: str, name: str) -> bool:
    name = name.casefold()
    words = {name, name.replace("_", " "), name.removeprefix("guided_"), _IN_TEXT.get(name, name)}
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message) for word in words)


def _check_answer(case: Case, exchange: Exchange, left: bool) -> None:
    """Check the answer as OpenAI's own client reads it, streamed or whole."""
    is_chat = case.path.endswith("chat/completions")
    if not case.body.get("stream"):
        kind: Any = openai.types.chat.ChatCompletion if is_chat else openai.types.Completion
        kind.model_validate(exchange.json)
        return
    assert exchange.response_headers["content-type"] == "text/event-stream"
    kind = openai.types.chat.ChatCompletionChunk if is_chat else openai.types.Completion
    events = exchange.data
    if not left:
        assert events[-1] == "[DONE]"
    for text in events:
        if text == "[DONE]":
            continue
        event = json.loads(text)
        if "error" in event:
            assert event["error"]["code"] < 500
            continue
        for choice in event["choices"]:
            if not is_chat and choice["finish_reason"] is None:  # as it is in all chunks but the last: see OpenAI's API
                choice["finish_reason"] = "stop"
        kind.model_validate(event)
