"""Tokens of a server that arrive together: the answer is the same as that of tokens which arrive alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from serving.http import app
from tests.engines.upstream import worlds
from tests.engines.upstream.sglang_worlds import FakeSglang
from tests.engines.upstream.vllm_worlds import FakeVllm
from tests.engines.upstream.wire import Line
from tests.engines.upstream.worlds import FakeServer
from tests.serving.upstream_worlds import ONE, TWO, site_of
from tests.serving.worlds import chat

ALL = 10_000
TOKENS = 40


@pytest.fixture(autouse=True)
def _ids_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "VOCABULARY", 256)


@frozen
class Choice:
    """What a client got of one choice."""

    text: str
    finish_reason: str | None
    logprobs: list[Any]


@frozen
class Got:
    """What a client got."""

    choices: dict[int, Choice]
    usage: dict[str, Any]


def got_of(chunks: list[dict[str, Any]]) -> Got:
    found: dict[int, Choice] = {}
    usage: dict[str, Any] = {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            before = found.get(choice["index"], Choice("", None, []))
            assert before.finish_reason is None
            found[choice["index"]] = Choice(
                before.text + (choice["delta"].get("content") or ""),
                choice["finish_reason"],
                before.logprobs + ((choice.get("logprobs") or {}).get("content") or []),
            )
    return Got(found, usage)


Kind = type[FakeVllm] | type[FakeSglang]


def _killed(server: FakeServer) -> Callable[[Line], Awaitable[None]]:
    async def kill(line: Line) -> None:
        server.kill()

    return kill


async def answered(
    folder: Path, kind: Kind, parts_per_write: int, *, has_fault: bool = False, **fields: Any
) -> tuple[Got, int]:
    """What a client gets of servers that write so many events at once, and in how many chunks."""
    async with site_of(folder) as site:
        for url in (ONE, TWO):
            server = site.add(url, kind, parts_per_write=parts_per_write, natural_tokens=1000)
            if has_fault and url == ONE:
                server.faults[10] = _killed(server)
        async with site.graph() as opened:
            body: dict[str, Any] = {"max_tokens": TOKENS, "stream_options": {"include_usage": True}} | fields
            answer = await chat(app(opened.graph), model="tiny", stream=True, **body).run()
            assert answer.status == 200
            return got_of(answer.chunks), len(answer.chunks)


CASES: dict[str, dict[str, Any]] = {
    "tokens": {},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "two choices": {"n": 2},
    "a worker that breaks": {"has_fault": True},
    "a worker that breaks, log probabilities": {"has_fault": True, "logprobs": True, "top_logprobs": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
async def test_tokens_that_arrive_together_are_the_same_answer(kind: Kind, case: str, folder: Path) -> None:
    alone, chunks = await answered(folder, kind, 1, **CASES[case])
    assert [choice.finish_reason for choice in alone.choices.values()] == ["length"] * len(alone.choices)
    assert alone.usage["completion_tokens"] == TOKENS * len(alone.choices)
    if "logprobs" in CASES[case]:
        assert len(alone.choices[0].logprobs) == TOKENS
    for together in (7, ALL):
        found, fewer = await answered(folder, kind, together, **CASES[case])
        assert found == alone
        if "n" not in CASES[case]:  # two choices come by turns
            assert fewer < chunks / 2


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
@pytest.mark.parametrize("place", [1, 6, 7, 20])
async def test_a_stop_string_ends_at_the_same_place(kind: Kind, place: int, folder: Path) -> None:
    whole, _ = await answered(folder, kind, 1)
    text = whole.choices[0].text
    stop = text[place : place + 3]
    alone, _ = await answered(folder, kind, 1, stop=[stop])
    assert alone.choices[0].finish_reason == "stop"
    assert text.startswith(alone.choices[0].text)
    for together in (7, ALL):
        found, _ = await answered(folder, kind, together, stop=[stop])
        assert found.choices == alone.choices
