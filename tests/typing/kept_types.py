"""What type checkers must know of typed operators, and of streams behind reactivex operators.

The project's own type checks read this file, as `test_kept_types.py` does. Nothing here is ever run.
"""

from __future__ import annotations

from typing import Any, assert_type

from examples.typed_operator import Ask, Question
from operators import Detokenize, Model, Preprocess
from pipeline import AsyncEngine, ResponseStream, Segment
from pipeline.annotated import Annotated
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.rx import ops


def words(number: int) -> list[str]:
    return ["word"] * number


def is_even(number: int) -> bool:
    return number % 2 == 0


def streams_keep_their_types(numbers: ResponseStream[int]) -> None:
    assert_type(numbers.rx(), ResponseStream[int])
    assert_type(numbers.rx(ops.take(2)), ResponseStream[int])
    assert_type(numbers.rx(ops.map(words)), ResponseStream[list[str]])
    assert_type(numbers.rx(ops.filter(is_even), ops.map(words)), ResponseStream[list[str]])
    assert_type(numbers.rx(ops.map(words), ops.take(2), ops.map(len)), ResponseStream[int])
    assert_type(numbers.rx(ops.take(1), ops.skip(1), ops.map(words), ops.take(1)), ResponseStream[list[str]])
    assert_type(numbers.rx(ops.take(1), ops.skip(1), ops.take(1), ops.skip(1), ops.map(str)), ResponseStream[str])
    assert_type(
        numbers.rx(ops.take(1), ops.skip(1), ops.map(words), ops.take(1), ops.map(len), ops.buffer_with_count(2)),
        ResponseStream[list[int]],
    )
    seven = numbers.rx(ops.take(1), ops.skip(1), ops.take(1), ops.skip(1), ops.take(1), ops.skip(1), ops.map(str))
    assert_type(seven, ResponseStream[Any])


def graphs_are_known_by_their_ends(
    model: Model, engine: AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]
) -> None:
    graph = Ask() >> Preprocess(model) >> Detokenize(model) >> engine
    assert_type(graph, Segment[Question, str])
