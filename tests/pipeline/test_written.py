"""What of its arguments a stage prints, and what it never prints."""

from __future__ import annotations

from enum import Enum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from reactivex.subject import Subject

from pipeline import AsyncEngine, Context, Operator, ResponseStream, map_request
from pipeline.testing import ScriptedEngine

if TYPE_CHECKING:
    from nowhere import Nothing  # type: ignore[import-not-found]

SECRET = "sk-live-0123456789"
Mode = Literal["fast", "careful"]


class Colour(Enum):
    RED = "the colour of a secret"


class Size(StrEnum):
    SMALL = "small"


class Stage(Operator[Any, Any, Any, Any]):
    """Takes anything and does nothing."""

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        return await next.generate(request)


class Auth(Stage):
    def __init__(self, key: Any, *others: Any, **options: Any) -> None:
        pass


class Router(Stage):
    shown_texts = ("label",)

    def __init__(
        self,
        mode: Mode | None = "fast",
        retries: int = 3,
        *,
        label: str = "",
        labels: Nothing | str = "",
        clock: Any = None,
        **rest: Any,
    ) -> None:
        pass


@frozen
class Account:
    user: str
    password: str


@frozen
class Named:
    name: str
    token: str


def double(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (Auth(SECRET), "Auth(...)"),
        (Auth(key=SECRET), "Auth(key=...)"),
        (Auth("k"), "Auth('k')"),
        (Auth(SECRET, 1, 2.5, True, None, 3j), "Auth(..., 1, 2.5, True, None, 3j)"),
        (Auth(SECRET, header=SECRET), "Auth(..., header=...)"),
        (Auth(SECRET.encode(), bytearray(SECRET.encode())), "Auth(..., ...)"),
        (Auth([SECRET, 1], {SECRET: SECRET}, {SECRET}, (SECRET,)), "Auth([..., 1], {1 item}, {1 item}, (...,))"),
        (Auth([[SECRET], [SECRET]], [], {}), "Auth([2 items], [], {0 items})"),
        (Auth(list(range(99))), "Auth([99 items])"),
        (Auth(Account("u", SECRET), urlsplit(f"https://u:{SECRET}@host/")), "Auth(Account, SplitResult)"),
        (Auth(Named("model", SECRET), object(), Path("/home") / SECRET), "Auth(model, object, PosixPath)"),
        (Auth(Colour.RED, Size.SMALL), "Auth(Colour.RED, Size.SMALL)"),
        (Auth(Auth(SECRET), [Auth(SECRET)]), "Auth(Auth(...), [Auth(...)])"),
        (Auth(10**60), "Auth(1000000000000000000000000000000000000...)"),
        (Router(), "Router()"),
        (Router("careful"), "Router('careful')"),
        (Router("fast", 3), "Router()"),
        (Router("fast", 4), "Router('fast', 4)"),
        (Router(mode="careful", retries=3), "Router(mode='careful')"),
        (Router(SECRET), "Router(...)"),  # type: ignore[arg-type]
        (Router(label="night shift"), "Router(label='night shift')"),
        (Router(label="x" * 99), "Router(label='xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...)"),
        (Router(labels="night shift"), "Router(labels=...)"),
        (Router(clock=double, changes=Subject(), on_change=lambda: None), "Router()"),
        (Router(clock=Account("u", SECRET), kind=Account), "Router(clock=Account, kind=Account)"),
        (map_request(double), "MapRequest(double)"),
        (Auth("k", Subject()), "Auth('k')"),
        (Auth("k", Subject(), 1), "Auth('k', ..., 1)"),
        (ScriptedEngine([1, 2], fails=ValueError(SECRET)), "ScriptedEngine([1, 2], fails=ValueError)"),
    ],
    ids=str,
)
def test_a_stage_prints_its_settings_and_no_secret(stage: Any, text: str) -> None:
    assert str(stage) == text
    for form in ("text", "mermaid", "dot"):
        assert SECRET not in (Auth("k") >> stage).draw(form)


TEXTS = st.text(min_size=4)
VALUES = st.recursive(
    TEXTS | TEXTS.map(str.encode),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(TEXTS, inner, max_size=2)
        | st.builds(Account, inner, inner)
        | st.builds(Auth, inner)
    ),
    max_leaves=6,
)


@given(args=st.lists(VALUES, min_size=1, max_size=4), kwargs=st.dictionaries(st.sampled_from("abc"), VALUES))
def test_a_text_shows_wherever_it_is_only_if_it_was_declared_harmless(args: list[Any], kwargs: dict[str, Any]) -> None:
    shown = str(Auth(*args, **kwargs))
    for word in ("Auth", "Account", "items", "item"):
        shown = shown.replace(word, "")
    assert set(shown) <= set("()[]{}.,= abc0123456789")
