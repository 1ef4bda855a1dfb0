"""Tagged unions of records: external and internal tags, and lists of records read at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

import pytest
from attrs import define

from pipeline import InvalidArgument
from pipeline.protocols.field_rules import U32, Tagged
from pipeline.wire import from_plain, to_plain


@define
class Circle:
    radius: U32


@define
class Line:
    wire_nullable: ClassVar[Sequence[str]] = ("start",)

    start: U32 | None
    end: U32


@define
class Nothing:
    pass


Shape: TypeAlias = Annotated[Circle | Line | Nothing, Tagged({"circle": Circle, "line": Line, "nothing": Nothing})]


@define
class Drawing:
    shape: Shape


class Command:
    wire_union: ClassVar[Tagged]


@define
class Draw(Command):
    shape: Shape


@define
class Clear(Command):
    pass


Command.wire_union = Tagged({"draw": Draw, "clear": Clear}, key="do")


class Point(NamedTuple):
    x: U32
    y: U32 = 0


@define
class Pair:
    """Two integers and a name that is mostly absent."""

    a: U32
    b: U32
    name: str | None = None


@define
class Lists:
    pairs: list[Pair]
    points: list[Point]


@pytest.mark.parametrize(
    ("shape", "plain"),
    [
        (Circle(3), {"circle": {"radius": 3}}),
        (Line(None, 4), {"line": {"start": None, "end": 4}}),
        (Nothing(), "nothing"),
    ],
)
def test_an_external_tag_is_the_one_key_and_a_record_without_fields_is_its_tag(shape: Shape, plain: Any) -> None:
    assert to_plain(Drawing(shape)) == {"shape": plain}
    assert from_plain({"shape": plain}, Drawing) == Drawing(shape)


@pytest.mark.parametrize(
    ("plain", "place"),
    [
        ({}, "shape"),
        ([], "shape"),
        (None, "shape"),
        ("circle", "shape"),
        ("square", "shape"),
        ({"nothing": {}}, "shape"),
        ({"circle": {"radius": 1}, "line": {"end": 1}}, "shape"),
        ({"circle": {"radius": -1}}, "shape.circle.radius"),
        ({"circle": 1}, "shape.circle"),
        ({"line": {"start": 1}}, "shape.line.end"),
    ],
)
def test_any_other_value_is_refused_with_its_place(plain: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain({"shape": plain}, Drawing)
    assert refused.value.field == place


def test_the_error_lists_the_tags() -> None:
    with pytest.raises(InvalidArgument, match="an object with the one key circle or line, or the text nothing"):
        from_plain({"shape": "square"}, Drawing)


def test_a_nullable_field_may_be_absent() -> None:
    assert from_plain({"shape": {"line": {"end": 4}}}, Drawing) == Drawing(Line(None, 4))


@pytest.mark.parametrize(
    ("command", "plain"),
    [(Draw(Circle(3)), {"do": "draw", "shape": {"circle": {"radius": 3}}}), (Clear(), {"do": "clear"})],
)
def test_an_internal_tag_stands_beside_the_fields(command: Command, plain: Any) -> None:
    assert to_plain(command) == plain
    assert from_plain(plain, Command) == command
    assert from_plain(plain, type(command)) == command


@pytest.mark.parametrize(
    ("plain", "place"),
    [
        ([], ""),
        ({}, "do"),
        ({"do": 1}, "do"),
        ({"do": "erase"}, "do"),
        ({"do": "draw"}, "shape"),
        ({"do": "draw", "shape": {"circle": {}}}, "shape.circle.radius"),
    ],
)
def test_an_object_with_another_tag_is_refused_with_its_place(plain: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain(plain, Command)
    assert refused.value.field == place


def test_a_record_of_a_union_reads_only_itself() -> None:
    with pytest.raises(InvalidArgument, match="clear"):
        from_plain({"do": "draw", "shape": "nothing"}, Clear)


@pytest.mark.parametrize(
    "pairs", [[], [Pair(1, 2)], [Pair(1, 2), Pair(0, 2**32 - 1)], [Pair(1, 2), Pair(3, 4, "named")]]
)
def test_lists_of_integer_records_and_named_tuples_cross_as_objects(pairs: list[Pair]) -> None:
    lists = Lists(pairs, [Point(1), Point(2, 3)])
    assert from_plain(to_plain(lists), Lists) == lists
    assert to_plain(lists)["points"] == [{"x": 1, "y": 0}, {"x": 2, "y": 3}]


@pytest.mark.parametrize(
    ("second", "place"),
    [
        ({"a": 1}, "pairs[1].b"),
        ({"a": True, "b": 1}, "pairs[1].a"),
        ({"a": 1, "b": 2**32}, "pairs[1].b"),
        ({"a": 1, "b": 2, "name": 3}, "pairs[1].name"),
        ([1, 2], "pairs[1]"),
        ("ab", "pairs[1]"),
    ],
)
def test_a_wrong_record_of_a_list_is_refused_with_its_place(second: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain({"pairs": [{"a": 1, "b": 2}, second], "points": []}, Lists)
    assert refused.value.field == place


def test_unknown_keys_of_records_in_a_list_are_ignored() -> None:
    plain = {"pairs": [{"a": 1, "b": 2, "later": 3}], "points": [{"x": 1, "later": 2}]}
    assert from_plain(plain, Lists) == Lists([Pair(1, 2)], [Point(1)])
