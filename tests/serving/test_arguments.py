"""Texts that become arguments, and the mistakes in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import frozen

from pipeline import InvalidArgument
from serving.deployment import converted


@frozen
class Corner:
    x: int
    y: int = 0


def takes(
    count: int,
    ratio: float = 1.0,
    *,
    loud: bool = False,
    name: str | None = None,
    place: Path = Path(),
    tone: Literal["high", "low"] = "low",
    limit: int | None = None,
    corner: Corner | None = None,
) -> Any:
    return (count, ratio, loud, name, place, tone, limit, corner)


class Named:
    """Takes an argument of a type that only type checkers know, and one that has no annotation."""

    def __init__(self, count: int = 1, thing: Unheard | None = None, bare=None) -> None:  # type: ignore[no-untyped-def, name-defined]  # noqa: F821
        ...

    @classmethod
    def made(cls, count: int) -> Named:
        return cls(count)


def takes_any(count: str, /, *rest: int, **options: int) -> Any:
    return (count, rest, options)


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
        ("tone", "high", "high"),
        ("limit", "7", 7),
        ("limit", "none", None),
        ("name", "none", None),
        ("corner", '{"x": 1}', Corner(1)),
        ("corner", "none", None),
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
        ("limit", "many", "must be an integer or none, got 'many'"),
        ("corner", "1", "must be a JSON object or none, got '1'"),
        ("corner", '{"y": 1}', "x: is required"),
        ("volume", "1", "no such argument; there are: count, ratio, loud, name, place, tone, limit, corner"),
    ],
)
def test_a_wrong_argument_of_the_engine_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}$") as failure:
        converted(takes, {name: text})
    assert failure.value.field == name


def test_an_argument_is_read_whatever_the_others_are() -> None:
    assert converted(Named, {"count": "3", "bare": "x"}) == {"count": 3, "bare": "x"}
    assert converted(Named.made, {"count": "3"}) == {"count": 3}
    with pytest.raises(InvalidArgument, match="Unheard") as failure:
        converted(Named, {"thing": "3"})
    assert failure.value.field == "thing"


def test_what_takes_any_argument_is_given_any_by_its_name() -> None:
    assert converted(takes_any, {"volume": "3", "options": "4"}) == {"volume": 3, "options": 4}
    with pytest.raises(InvalidArgument, match="must be an integer") as failure:
        converted(takes_any, {"volume": "x"})
    assert failure.value.field == "volume"


def test_without_texts_a_callable_is_not_inspected() -> None:
    assert converted(int, {}) == {}
