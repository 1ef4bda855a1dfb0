"""What a stage declares, read at run time, and which types fit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Generic, Literal, Optional, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Annotated, AsyncEngine, Context, Operator, ResponseStream, function_engine
from pipeline.signatures import Signature, assignable, type_text

T = TypeVar("T")
U = TypeVar("U")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Animal: ...


class Dog(Animal): ...


class Box(Generic[T]): ...


class DogBox(Box[Dog]): ...


class Source(Generic[T_co]): ...


class Sink(Generic[T_contra]): ...


@pytest.mark.parametrize(
    ("given_type", "wanted", "fits"),
    [
        (Dog, Animal, True),
        (Animal, Dog, False),
        (Any, Dog, True),
        (Dog, Any, True),
        (Dog, object, True),
        (int, float, True),
        (float, int, False),
        (bool, int, True),
        (int, str, False),
        (Dog, Dog | str, True),
        (Dog | str, Animal | str, True),
        (Dog | int, Dog | str, False),
        (Dog | None, Dog, False),
        (Dog, Dog | None, True),
        (None, Dog | None, True),
        (None, Dog, False),
        (Box[Dog], Box[Dog], True),
        (Box[Dog], Box[Animal], False),
        (Box[Dog], Box, True),
        (Box, Box[Dog], True),
        (Box[Any], Box[Dog], True),
        (DogBox, Box[Dog], True),
        (DogBox, Box[Animal], False),
        (Source[Dog], Source[Animal], True),
        (Source[Animal], Source[Dog], False),
        (Sink[Animal], Sink[Dog], True),
        (Sink[Dog], Sink[Animal], False),
        (list[int], list[int], True),
        (list[int], list[str], False),
        (Annotated[Dog], Annotated[Dog], True),
        (Annotated[Dog], Annotated[str], False),
        (Literal["a"], str, True),
        ("Somewhere", Dog, True),
    ],
)
def test_which_types_fit_where(given_type: Any, wanted: Any, fits: bool) -> None:
    assert assignable(given_type, wanted) is fits


LEAVES = st.sampled_from([int, float, str, Dog, Animal, Any, None, type(None)])


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    makers: list[Any] = [Box.__class_getitem__, list.__class_getitem__, Optional.__getitem__]  # type: ignore[attr-defined]
    return st.builds(lambda make, kind: make(kind), st.sampled_from(makers), inner)


TYPES = st.recursive(LEAVES, _around, max_leaves=4)


@given(TYPES)
def test_every_type_fits_itself_and_anything_fits_the_unknown(kind: Any) -> None:
    assert assignable(kind, kind)
    assert assignable(kind, Any)
    assert assignable(Any, kind)
    assert assignable(kind, Optional[kind])  # noqa: UP045  # made at run time


class Generic2(Operator[T, U, T, U]):
    async def generate(self, request: Context[T], next: AsyncEngine[T, U]) -> ResponseStream[U]:
        return await next.generate(request)


class Middle(Generic2[str, U]):
    pass


class Leaf(Middle[int]):
    pass


def test_arguments_are_followed_through_the_bases() -> None:
    assert Signature.of(Leaf(), Operator) == Signature(str, int, str, int)


def test_arguments_given_to_the_instance_count() -> None:
    assert Signature.of(Generic2[str, bytes](), Operator) == Signature(str, bytes, str, bytes)


def test_variables_that_stay_free_are_kept_to_be_bound_by_the_neighbours() -> None:
    assert Signature.of(Middle(), Operator) == Signature(str, U, str, U)


def test_a_stage_that_declares_nothing_takes_and_gives_anything() -> None:
    class Bare(AsyncEngine):  # type: ignore[type-arg]
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            return ResponseStream.of([], request)

    assert Signature.of(Bare(), AsyncEngine).takes is Any or isinstance(
        Signature.of(Bare(), AsyncEngine).takes, TypeVar
    )


def test_a_function_is_read_from_its_annotations() -> None:
    @function_engine
    async def spell(number: int, context: Context[int]) -> AsyncIterator[str]:
        yield str(number)

    @function_engine
    async def bare(payload):  # type: ignore[no-untyped-def]
        yield payload

    assert Signature.of(spell, AsyncEngine) == Signature(int, str)
    assert Signature.of(bare, AsyncEngine) == Signature(Any, Any)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "int"),
        (Box[Dog], "Box[Dog]"),
        (Dog | None, "Dog | None"),
        (Annotated[list[int]], "Annotated[list[int]]"),
        (Any, "Any"),
    ],
)
def test_types_are_spelled_as_one_writes_them(kind: Any, text: str) -> None:
    assert type_text(kind) == text
