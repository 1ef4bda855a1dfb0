"""Engines by name and by `module:factory`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from engines import EchoEngine, LLMEngine
from pipeline import InvalidArgument, PenstockError, Unknown
from serving.deployment import GraphConfig, find_engine
from serving.deployment.engines import Deployment

OWN = """
import sys

import anyio

from engines import EchoEngine

class Loud(EchoEngine):
    def __init__(self, volume: int = 1) -> None:
        super().__init__()
        self.volume = volume

class Hungry(Loud):
    made = 0

    def __init__(self, volume: int) -> None:
        Hungry.made += 1
        if volume == 12:
            sys.exit("much too loud")
        if volume > 10:
            raise MemoryError("too loud")
        if volume < 0:
            raise ValueError("below zero")
        super().__init__()

def deaf() -> str:
    return "not an engine"

async def late(volume: int) -> Loud:
    await anyio.sleep(0)
    return Loud(volume)

class Late:
    @classmethod
    async def made(cls, volume: int) -> Loud:
        return await late(volume)

    async def __call__(self, volume: int) -> Loud:
        return await late(volume)

late_callable = Late()

async def late_deaf() -> None:
    pass

async def late_hungry(volume: int) -> Hungry:
    await anyio.sleep(0)
    return Hungry(volume)

released = []

async def slow() -> Loud:
    try:
        await anyio.sleep(60)
    finally:
        released.append(True)

NAME = "loud"
"""


@pytest.fixture
def own_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the current folder, with engines from outside this project."""
    (tmp_path / "own_engine.py").write_text(OWN)
    (tmp_path / "broken_engine.py").write_text("raise RuntimeError('no device')")
    (tmp_path / "unreadable_engine.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_engine"
    sys.modules.pop("own_engine", None)


def build(name: str, **texts: str) -> LLMEngine:
    return anyio.run(find_engine(name).build, texts, Deployment())


def test_a_factory_of_another_package_is_found_and_given_its_arguments(own_engine: str) -> None:
    engine = build(f"{own_engine}:Loud", volume="11")
    assert isinstance(engine, EchoEngine)
    assert getattr(engine, "volume", None) == 11


@pytest.mark.parametrize("factory", ["late", "Late.made", "late_callable"])
def test_a_factory_may_be_async(own_engine: str, factory: str) -> None:
    engine = build(f"{own_engine}:{factory}", volume="11")
    assert isinstance(engine, EchoEngine)
    assert getattr(engine, "volume", None) == 11


def test_an_async_factory_that_is_cancelled_releases_what_it_holds(own_engine: str) -> None:
    async def cancelled() -> None:
        with anyio.move_on_after(0.01):
            await find_engine(f"{own_engine}:slow").build({}, Deployment())

    anyio.run(cancelled)
    assert getattr(sys.modules[own_engine], "released") == [True]  # noqa: B009


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


@pytest.mark.parametrize(("factory", "kind"), [("deaf", "str"), ("late_deaf", "NoneType")])
def test_what_a_factory_makes_must_be_an_engine(own_engine: str, factory: str, kind: str) -> None:
    with pytest.raises(InvalidArgument, match=f"makes a {kind}") as refused:
        build(f"{own_engine}:{factory}")
    assert refused.value.field == "engine"


@pytest.mark.parametrize(
    ("texts", "raised", "message"),
    [
        ({}, InvalidArgument, "missing 1 required positional argument: 'volume'"),
        ({"volume": "-1"}, InvalidArgument, "below zero"),
        ({"volume": "11"}, Unknown, "too loud"),
        ({"volume": "12"}, Unknown, "SystemExit: much too loud"),
    ],
)
@pytest.mark.parametrize("factory", ["Hungry", "late_hungry"])
def test_what_a_factory_raises_is_typed(
    own_engine: str, factory: str, texts: dict[str, str], raised: type[PenstockError], message: str
) -> None:
    choice = find_engine(f"{own_engine}:{factory}")
    choice.check(texts, Deployment())
    with pytest.raises(raised, match=message):
        build(f"{own_engine}:{factory}", **texts)


def test_an_engine_of_another_package_is_not_made_to_check_its_arguments(own_engine: str) -> None:
    config = GraphConfig(engine=f"{own_engine}:Hungry", engine_args={"volume": "3"}, workers=2)
    assert getattr(sys.modules[own_engine], "Hungry").made == 0  # noqa: B009
    anyio.run(config.make_engines, 2)
    assert getattr(sys.modules[own_engine], "Hungry").made == 2  # noqa: B009
    with pytest.raises(InvalidArgument):
        GraphConfig(engine=f"{own_engine}:Hungry", engine_args={"volume": "loud"})


def test_a_wrong_argument_of_a_factory_is_named(own_engine: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        build(f"{own_engine}:Loud", volume="loud")
    assert refused.value.field == "engine_args.volume"
