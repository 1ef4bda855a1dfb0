"""docs/contributing.md is true: its files exist, and its operator, tests and router rule run as they stand there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

import operators
from operators import PushRouter
from pipeline import Annotated, Context
from pipeline.network import static_workers
from pipeline.protocols import PreprocessedRequest
from pipeline.testing import ScriptedEngine

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
NEW = ("answer_limit", "count_down")
"""Parts of the names of files that a reader of the page makes."""
PLACE = re.compile(r"`((?:pipeline|operators|engines|serving|tests|docs|examples|benchmarks)/[\w/.]*)`")


def block(number: int) -> str:
    """A block of Python code of the page, from 0."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    return blocks[number]


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The tests that the page has for its operator, which is exported as the page describes it."""
    space: dict[str, Any] = {"__name__": "answer_limit"}
    exec(compile(block(0), "operator of docs/contributing.md", "exec"), space)
    monkeypatch.setattr(operators, "AnswerLimit", space["AnswerLimit"], raising=False)
    tests: dict[str, Any] = {"__name__": "test_answer_limit"}
    exec(compile(block(1), "tests of docs/contributing.md", "exec"), tests)
    return tests


def test_every_file_of_the_page_exists() -> None:
    places = {place for place in PLACE.findall(TEXT) if not any(new in place for new in NEW)}
    assert len(places) > 40
    assert [place for place in sorted(places) if not (ROOT / place).exists()] == []


async def test_its_operator_holds_the_contract(proofs: dict[str, Any]) -> None:
    await proofs["test_it_holds_the_operator_contract"]()


@pytest.mark.parametrize(("requested", "sent"), [(None, 5), (9, 5), (3, 3)])
async def test_its_operator_sends_the_lower_limit(proofs: dict[str, Any], requested: int | None, sent: int) -> None:
    await proofs["test_the_lower_limit_holds"](requested, sent)


async def test_its_router_rule_keeps_prompts_together_that_begin_alike() -> None:
    space: dict[str, Any] = {"Sequence": Sequence, "Loads": object, "AnyContext": object, "Random": Random}
    exec(compile(block(2), "rule of docs/contributing.md", "exec"), space)
    rule: Callable[..., int] = space["by_prompt"]
    engines = {number: ScriptedEngine([Annotated(number)]) for number in range(8)}
    router: PushRouter[Any, Any] = PushRouter(static_workers(dict(engines)), pick=rule)
    for prompt in range(20):
        for turn in range(3):
            request = PreprocessedRequest([prompt] * 2048 + [turn] * 16)
            await (await router.generate(Context(request))).aclose()
    taken = [len(engine.requests) for engine in engines.values()]
    assert sum(taken) == 60
    assert all(count % 3 == 0 for count in taken)
    assert sum(count > 0 for count in taken) > 3
