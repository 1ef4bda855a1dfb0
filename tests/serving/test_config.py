"""What a standard graph may be built from, and which mistake is named how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines import EchoEngine
from pipeline import InvalidArgument
from serving.config import GraphConfig, converted


def takes(count: int, ratio: float = 1.0, *, loud: bool = False, name: str | None = None, place: Path = Path()) -> Any:
    return (count, ratio, loud, name, place)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "3", 3),
        ("ratio", "0.5", 0.5),
        ("ratio", "2", 2.0),
        ("loud", "true", True),
        ("loud", "False", False),
        ("name", "x", "x"),
        ("place", "/tmp", Path("/tmp")),
    ],
)
def test_texts_become_what_the_engine_wants(name: str, text: str, value: Any) -> None:
    assert converted(takes, {name: text}) == {name: value}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("count", "x", "must be an integer, got 'x'"),
        ("count", "1.5", "must be an integer, got '1.5'"),
        ("ratio", "", "must be a number, got ''"),
        ("loud", "1", "must be true or false, got '1'"),
        ("volume", "1", "no such argument; there are: count, ratio, loud, name, place"),
    ],
)
def test_a_wrong_argument_of_the_engine_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}$") as failure:
        converted(takes, {name: text})
    assert failure.value.field == f"engine_args.{name}"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"workers": 0}, "workers"),
        ({"router": "nearest"}, "router"),
        ({"engine": "gpt"}, "engine"),
        ({"engine_args": {"delay_s": "soon"}}, "engine_args.delay_s"),
        ({"model_name": " "}, "model_name"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidArgument) as failure:
        GraphConfig(**fields)
    assert failure.value.field == place


def test_each_worker_gets_an_engine_of_its_own() -> None:
    config = GraphConfig(engine_args={"delay_s": "0.5"}, workers=2)
    first, second = config.make_engine(), config.make_engine()
    assert first is not second
    assert isinstance(first, EchoEngine)
    assert first.delay_s == 0.5


def test_without_a_folder_the_built_in_model_is_served() -> None:
    assert GraphConfig().load_model().name == "echo"
    assert GraphConfig(model_name="parrot").load_model().name == "parrot"


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        GraphConfig(model_path=tmp_path).load_model()
