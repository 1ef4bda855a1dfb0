"""A long answer that is ready does not keep the server from others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from pipeline import Annotated, function_engine
from pipeline.protocols import BackendOutput
from serving.http import app

pytestmark = pytest.mark.anyio

TOKENS = 20_000


@pytest.mark.parametrize("stream", [False, True])
async def test_others_are_answered_while_a_long_answer_is_made(
    chat: Any, request_to: Any, token: Any, last: Any, stream: bool
) -> None:
    """Issue 12, point 20: `/live` waited until the last token of a whole answer was made."""
    at_once, end, begun, made = token("a"), last(), anyio.Event(), 0
    made_until_live = 0

    @function_engine
    async def ready(request: Any) -> AsyncIterator[Annotated[BackendOutput]]:
        nonlocal made
        begun.set()
        for _ in range(TOKENS):
            made += 1
            yield at_once
        yield end

    service = app({"m": ready})
    answer, live = chat(service, stream=stream), request_to(service, "/live", method="GET")

    async def ask_meanwhile() -> None:
        nonlocal made_until_live
        await begun.wait()
        await live.run()
        made_until_live = made

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_meanwhile)
        tasks.start_soon(answer.run)
    assert live.status == 200
    assert 0 < made_until_live < TOKENS
    assert (answer.text if stream else answer.json["choices"][0]["message"]["content"]) == "a" * TOKENS
