"""Runs contract tests with the tokens of all engines in bundles of one, of seven and of all: among the slow tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from engines.adapter import RequestAdapter
from pipeline import Context, ResponseStream
from pipeline.testing import Bundles, ScriptedEngine

TESTS = Path(__file__).parent

AS_IT_IS = "as it is"
SIZES: dict[str, int | None] = {"bundles of 1": 1, "bundles of 7": 7, "one bundle": None}

CHECKS = {"check_engine", "check_operator", "run_conformance"}
"""A test that calls one of these is a contract test."""

KIT = ("pipeline/testing/", "engines/conformance/", "packaging/")
"""Folders whose tests check these checks, on stages that break a contract."""

WHOLE_ANSWERS = {
    "graphs/test_any_bundles.py",
    "graphs/test_standard_graph.py",
    "operators/migration/test_random.py",
    "operators/text/test_text_pipeline.py",
    "serving/http/generation/test_answers.py",
    "serving/http/generation/test_whole_answers.py",
}
"""Files whose tests look at whole answers of graphs and servers."""


def bundle(metafunc: pytest.Metafunc) -> None:
    """Run such a test once as it is, and, among the slow tests, once for each size."""
    path = metafunc.definition.path.relative_to(TESTS).as_posix()
    if path not in WHOLE_ANSWERS and (path.startswith(KIT) or not _is_contract_test(metafunc)):
        return
    metafunc.fixturenames.append("bundling")
    sizes = [pytest.param(name, marks=pytest.mark.slow) for name in SIZES]
    metafunc.parametrize("bundling", [AS_IT_IS, *sizes], indirect=True)


def _is_contract_test(metafunc: pytest.Metafunc) -> bool:
    return bool(CHECKS.intersection((*_names(metafunc.function.__code__), *metafunc.fixturenames)))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names in a function and in those within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


@pytest.fixture
def bundling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Bundle the tokens of every engine behind an adapter, and of scripted ones."""
    name: str = request.param
    if name != AS_IT_IS:
        bundles = Bundles(SIZES[name])
        for kind in (RequestAdapter, ScriptedEngine):
            monkeypatch.setattr(kind, "generate", _bundled(kind.generate, bundles))
    return name


def _bundled(generate: Any, bundles: Bundles) -> Any:
    async def bundling_generate(self: Any, request: Context[Any]) -> ResponseStream[Any]:
        stream: ResponseStream[Any] = await generate(self, request)
        return bundles.of(stream, request)

    return bundling_generate
