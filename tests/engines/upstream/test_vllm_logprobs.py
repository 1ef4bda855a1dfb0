"""Log probabilities in the chunks of vLLM's two routes, each with its own token."""

from __future__ import annotations

from typing import Any

import pytest

from engines.upstream import of_completion, of_generate
from engines.upstream.token_answer import TokenAnswer
from pipeline.errors import InvalidMessage
from pipeline.protocols import TopLogprob
from tests.engines.upstream.wire import as_event


def entry(token: int, logprob: float, rank: int, *others: tuple[int, float, int]) -> dict[str, Any]:
    """The entry of a token by `/inference/v1/generate`, which is the first of its own candidates."""
    names = ("token_id", "logprob", "rank")
    top = [dict(zip(names, one, strict=True)) for one in ((token, logprob, rank), *others)]
    return {**top[0], "top_logprobs": top}


def test_each_token_has_its_own_value_and_candidates_by_likelihood() -> None:
    content = [entry(8, -2.5, 7, (1, -0.5, 1), (2, -1.5, 2)), entry(9, -0.25, 1, (3, -3.5, 2))]
    found = of_generate({"logprobs": {"content": content}}, [8, 9])
    assert (found.token_ids, found.log_probs) == ([8, 9], [-2.5, -0.25])
    assert found.top_logprobs == [
        [TopLogprob(1, 1, -0.5), TopLogprob(2, 2, -1.5), TopLogprob(7, 8, -2.5)],
        [TopLogprob(1, 9, -0.25), TopLogprob(2, 3, -3.5)],
    ]


def test_candidates_named_by_id_are_ranked_by_likelihood() -> None:
    top = [{"token_id:8": -2.5, "token_id:1": -0.5}, {"token_id:9": -0.25}]
    found = of_completion({"logprobs": {"token_logprobs": [-2.5, -0.25], "top_logprobs": top}}, [8, 9])
    assert (found.token_ids, found.log_probs) == ([8, 9], [-2.5, -0.25])
    assert found.top_logprobs == [[TopLogprob(1, 1, -0.5), TopLogprob(2, 8, -2.5)], [TopLogprob(1, 9, -0.25)]]


@pytest.mark.parametrize("top", [None, [], [None, None], [{}, {}]])
def test_without_candidates_the_values_stay(top: Any) -> None:
    found = of_completion({"logprobs": {"token_logprobs": [-2.5, -0.25], "top_logprobs": top}}, [8, 9])
    assert (found.log_probs, found.top_logprobs) == ([-2.5, -0.25], None)


@pytest.mark.parametrize(
    "logprobs",
    [
        5,
        {},
        {"content": 5},
        {"content": []},
        {"content": [entry(8, -1.0, 1)] * 3},
        {"content": [entry(8, -1.0, 1) | {"logprob": None}] * 2},
        {"content": [entry(8, -1.0, 1) | {"top_logprobs": None}] * 2},
    ],
)
def test_what_are_no_values_of_the_tokens_is_refused(logprobs: Any) -> None:
    answer = TokenAnswer(1, 3, of_generate)
    with pytest.raises(InvalidMessage):
        list(answer.feed(as_event({"choices": [{"index": 0, "token_ids": [8, 9], "logprobs": logprobs}]})))


@pytest.mark.parametrize(
    "logprobs",
    [
        {"token_logprobs": [-1.0]},
        {"token_logprobs": [-1.0, None]},
        {"token_logprobs": [-1.0, -2.0], "top_logprobs": [{"hello": -1.0}, {}]},
        {"token_logprobs": [-1.0, -2.0], "top_logprobs": [{"token_id:x": -1.0}, {}]},
    ],
)
def test_texts_in_place_of_ids_are_refused(logprobs: Any) -> None:
    answer = TokenAnswer(1, 3, of_completion)
    with pytest.raises(InvalidMessage):
        list(answer.feed(as_event({"choices": [{"index": 0, "token_ids": [8, 9], "logprobs": logprobs}]})))
