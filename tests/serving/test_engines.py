"""Engines by name and by `module:factory`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import EchoEngine
from pipeline import InvalidArgument, PenstockError, Unknown
from serving.config import GraphConfig
from serving.engines import Deployment, find_engine

OWN = """
from engines import EchoEngine

class Loud(EchoEngine):
    def __init__(self, volume: int = 1) -> None:
        super().__init__()
        self.volume = volume

class Hungry(Loud):
    made = 0

    def __init__(self, volume: int) -> None:
        Hungry.made += 1
        if volume > 10:
            raise MemoryError("too loud")
        if volume < 0:
            raise ValueError("below zero")
        super().__init__()

def deaf() -> str:
    return "not an engine"

async def late() -> Loud:
    return Loud()

NAME = "loud"
"""


@pytest.fixture
def own_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the current folder, with engines of somebody else."""
    (tmp_path / "own_engine.py").write_text(OWN)
    (tmp_path / "broken_engine.py").write_text("raise RuntimeError('no device')")
    (tmp_path / "unreadable_engine.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_engine"
    sys.modules.pop("own_engine", None)


def test_a_factory_of_somebody_else_is_found_and_given_its_arguments(own_engine: str) -> None:
    engine = find_engine(f"{own_engine}:Loud").build({"volume": "11"}, Deployment())
    assert isinstance(engine, EchoEngine)
    assert getattr(engine, "volume", None) == 11


@pytest.mark.parametrize(
    "name",
    [
        *("gpt", "nowhere:Engine", "own_engine:Missing", "own_engine:NAME", ":Loud", "own_engine:"),
        *("..own_engine:Loud", "broken_engine:Loud", "unreadable_engine:Loud"),
    ],
)
def test_what_is_no_engine_is_refused(own_engine: str, name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        find_engine(name)
    assert refused.value.field == "engine"


@pytest.mark.parametrize(("factory", "kind"), [("deaf", "str"), ("late", "coroutine")])
def test_what_a_factory_makes_must_be_an_engine(own_engine: str, factory: str, kind: str) -> None:
    with pytest.raises(InvalidArgument, match=f"makes a {kind}") as refused:
        find_engine(f"{own_engine}:{factory}").build({}, Deployment())
    assert refused.value.field == "engine"


@pytest.mark.parametrize(
    ("texts", "raised", "message"),
    [
        ({}, InvalidArgument, "missing 1 required positional argument: 'volume'"),
        ({"volume": "-1"}, InvalidArgument, "below zero"),
        ({"volume": "11"}, Unknown, "too loud"),
    ],
)
def test_what_a_factory_raises_is_typed(
    own_engine: str, texts: dict[str, str], raised: type[PenstockError], message: str
) -> None:
    choice = find_engine(f"{own_engine}:Hungry")
    choice.check(texts, Deployment())
    with pytest.raises(raised, match=message):
        choice.build(texts, Deployment())


def test_an_engine_of_somebody_else_is_not_made_to_check_its_arguments(own_engine: str) -> None:
    config = GraphConfig(engine=f"{own_engine}:Hungry", engine_args={"volume": "3"}, workers=2)
    assert getattr(sys.modules[own_engine], "Hungry").made == 0  # noqa: B009
    config.make_engines(2)
    assert getattr(sys.modules[own_engine], "Hungry").made == 2  # noqa: B009
    with pytest.raises(InvalidArgument):
        GraphConfig(engine=f"{own_engine}:Hungry", engine_args={"volume": "loud"})


def test_a_wrong_argument_of_a_factory_is_named(own_engine: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        find_engine(f"{own_engine}:Loud").build({"volume": "loud"}, Deployment())
    assert refused.value.field == "engine_args.volume"
