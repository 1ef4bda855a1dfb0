"""Graphs that are wrong, one each: both type checkers and `link` must refuse every one.

The `# wrong` comment marks the line a checker must report and names the two stages that `link` must name. This file is
left out of the project's own type checks; `test_wrong_graphs.py` runs them on it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from engines import EchoEngine, as_engine
from operators import Detokenize, Model, Preprocess
from pipeline import Annotated, AsyncEngine, Context, Operator, ResponseStream, function_engine
from pipeline.protocols import BackendOutput, PreprocessedRequest

MODEL = Model.byte_level("echo")


class Length(Operator[str, int, int, int]):
    async def generate(self, request: Context[str], next: AsyncEngine[int, int]) -> ResponseStream[int]:
        return await next.generate(request.map(len))


class Shout(Operator[str, str, str, str]):
    async def generate(self, request: Context[str], next: AsyncEngine[str, str]) -> ResponseStream[str]:
        return (await next.generate(request)).map(str.upper)


class Count(AsyncEngine[int, int]):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        return ResponseStream.of(range(request.payload), request)


class Spell(AsyncEngine[int, str]):
    async def generate(self, request: Context[int]) -> ResponseStream[str]:
        return ResponseStream.of([str(request.payload)], request)


class Answer(AsyncEngine[PreprocessedRequest, Annotated[BackendOutput]]):
    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Annotated[BackendOutput]]:
        return ResponseStream.of([], request)


@function_engine
async def characters(text: str) -> AsyncIterator[str]:
    for character in text:
        yield character


def an_engine_that_takes_another_request() -> object:
    return Shout() >> Count()  # wrong: Shout, Count


def an_engine_that_gives_other_items() -> object:
    return Length() >> Spell()  # wrong: Length, Spell


def an_operator_that_takes_another_request() -> object:
    return Length() >> Shout()  # wrong: Length, Shout


def an_operator_that_gives_other_items() -> object:
    return Shout() >> Length()  # wrong: Shout, Length


def a_function_engine_of_other_types() -> object:
    return Length() >> characters  # wrong: Length, characters


def a_wrong_edge_in_a_longer_line() -> object:
    return Shout() >> Shout() >> Length() >> Spell()  # wrong: Shout, Length


def a_chat_straight_into_an_engine_of_tokens() -> object:
    return Preprocess(MODEL) >> as_engine(EchoEngine())  # wrong: Preprocess, EchoEngine


def detokenizing_what_is_text_already() -> object:
    return Detokenize(MODEL) >> Answer()  # wrong: Detokenize, Answer


def detokenizing_twice() -> object:
    return Detokenize(MODEL) >> Detokenize(MODEL) >> as_engine(EchoEngine())  # wrong: Detokenize, Detokenize


def preprocessing_below_detokenizing() -> object:
    return Detokenize(MODEL) >> Preprocess(MODEL)  # wrong: Detokenize, Preprocess


def a_number_for_an_engine() -> object:
    return Shout() >> 3  # wrong: Shout, 3
