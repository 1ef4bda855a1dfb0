"""Sampling options and limits of a request, as values."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from engines.torch import Limits, ModelFacts, Sampling, order_of, sampling_of
from pipeline import InvalidArgument
from pipeline.protocols import (
    FinishReason,
    GuidedDecodingOptions,
    OutputOptions,
    PreprocessedRequest,
    RoutingHints,
    StopConditions,
)

from .worlds import FACTS, request_of

PROMPT = [1, 2, 3]


def sampling(**options: Any) -> Sampling:
    return sampling_of(request_of(PROMPT, **options), default_temperature=0.0, seed=5)


def test_a_request_without_options_takes_the_most_likely_tokens() -> None:
    assert sampling() == Sampling(seed=5)
    assert sampling().is_greedy


def test_the_default_temperature_counts_only_where_none_is_named() -> None:
    plain = request_of(PROMPT)
    assert sampling_of(plain, default_temperature=0.7, seed=5).temperature == 0.7
    named = request_of(PROMPT, temperature=0.0)
    assert sampling_of(named, default_temperature=0.7, seed=5).is_greedy


def test_a_seed_of_the_request_comes_first() -> None:
    assert sampling(seed=0).seed == 0


def test_no_top_k_may_be_written_in_three_ways() -> None:
    assert [sampling(top_k=k).top_k for k in (None, 0, -1, 3)] == [0, 0, 0, 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("use_beam_search", True),
        ("best_of", 2),
        ("guided_decoding", GuidedDecodingOptions(regex="a*")),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        sampling(**{field: value})
    assert refused.value.field == field


def test_draws_depend_on_seed_choice_and_place_only() -> None:
    one, other = Sampling(seed=1), Sampling(seed=2, temperature=0.5)
    assert one.uniform(0, 10) == evolve(one, top_k=4).uniform(0, 10)
    draws = {one.uniform(0, 10), one.uniform(1, 10), one.uniform(0, 11), other.uniform(0, 10)}
    assert len(draws) == 4
    assert all(0 <= draw < 1 for draw in draws)


LIMITS = Limits(max_tokens=4, min_tokens=2, eos_token_ids=frozenset({0}), stop_token_ids=frozenset({9}))


@pytest.mark.parametrize(
    ("generated", "token_id", "ending"),
    [
        (1, 0, None),
        (2, 0, (FinishReason.EOS, None)),
        (2, 9, (FinishReason.STOP, 9)),
        (3, 5, None),
        (4, 5, (FinishReason.LENGTH, None)),
        (4, 9, (FinishReason.STOP, 9)),
    ],
)
def test_a_choice_ends_at_its_ids_and_at_its_length(generated: int, token_id: int, ending: Any) -> None:
    assert LIMITS.ending(generated, token_id) == ending


def test_ids_that_would_end_too_early_are_not_drawn() -> None:
    assert [LIMITS.forbidden(generated) for generated in range(3)] == [frozenset({0, 9}), frozenset(), frozenset()]


def test_the_ends_of_model_and_request_both_count() -> None:
    request = request_of(PROMPT)
    request.eos_token_ids = [7]
    request.stop_conditions.stop_token_ids_hidden = [7, 8]
    limits = order_of(request, FACTS, seed=1).limits
    assert limits.eos_token_ids == {0, 7}
    assert limits.stop_token_ids == {8}


def test_ignore_eos_leaves_only_the_length() -> None:
    request = request_of(PROMPT, max_tokens=9)
    request.stop_conditions = StopConditions(max_tokens=9, ignore_eos=True, stop_token_ids=[4])
    assert order_of(request, FACTS, seed=1).limits == Limits(max_tokens=9)


def test_an_answer_is_no_longer_than_there_is_room() -> None:
    facts = ModelFacts(vocab_size=1000, capacity_tokens=10)
    assert order_of(request_of(PROMPT, max_tokens=50), facts, seed=1).limits.max_tokens == 7
    assert order_of(request_of(PROMPT), facts, seed=1).limits.max_tokens == 7


def refused(field: str, request: PreprocessedRequest, facts: ModelFacts = FACTS) -> None:
    with pytest.raises(InvalidArgument) as error:
        order_of(request, facts, seed=1)
    assert error.value.field == field


def test_prompts_that_cannot_be_computed_are_refused() -> None:
    refused("token_ids", request_of([]))
    refused("token_ids", request_of([1, 1000]))
    refused("token_ids", request_of([1, -1]))
    refused("token_ids", request_of(range(10)), evolve(FACTS, capacity_tokens=10))
    refused("prompt_embeds", evolve(request_of(PROMPT), prompt_embeds="AAAA"))
    refused("lora_name", evolve(request_of(PROMPT), routing=RoutingHints(lora_name="x")))
    refused("prompt_logprobs", evolve(request_of(PROMPT), output_options=OutputOptions(prompt_logprobs=1)))
    refused("max_thinking_tokens", evolve(request_of(PROMPT), stop_conditions=StopConditions(max_thinking_tokens=3)))
    refused("n", request_of(PROMPT, n=0))
    refused("max_tokens", request_of(PROMPT, max_tokens=3, min_tokens=4))


def test_every_option_is_taken_over() -> None:
    given: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.4, "min_p": 0.2, "seed": 9}
    penalties: dict[str, Any] = {"presence_penalty": -1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2}
    assert sampling(**given, **penalties) == Sampling(**given, **penalties)


@pytest.mark.parametrize("option", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_each_penalty_alone_is_one(option: str) -> None:
    assert sampling(**{option: 0.5}).has_penalties
    assert not sampling(**{option: 1.0 if option == "repetition_penalty" else 0.0}).has_penalties


@pytest.mark.parametrize("count", [None, 0, 5])
def test_log_probabilities_may_be_wanted_of_the_token_alone(count: int | None) -> None:
    request = evolve(request_of(PROMPT), output_options=OutputOptions(logprobs=count))
    assert order_of(request, FACTS, seed=1).sampling.logprobs == count


@pytest.mark.parametrize("ids", ["stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden"])
def test_stop_ids_of_each_kind_end_a_choice(ids: str) -> None:
    given: dict[str, Any] = {ids: [4, 5]}
    request = evolve(request_of(PROMPT), stop_conditions=StopConditions(**given))
    assert order_of(request, FACTS, seed=1).limits.stop_token_ids == {4, 5}


def test_adapters_have_blocks_of_their_own() -> None:
    facts = evolve(FACTS, adapters=("legal", "medical"))
    routes = (None, RoutingHints(lora_name="legal"), RoutingHints(lora_name="medical"))
    found = [order_of(evolve(request_of(PROMPT), routing=routing), facts, seed=1) for routing in routes]
    assert [one.adapter for one in found] == [None, "legal", "medical"]
    assert len({one.hash_seed for one in found}) == 3


def test_tenants_have_blocks_of_their_own() -> None:
    request = evolve(request_of(PROMPT), routing=RoutingHints(cache_namespace="tenant"))
    assert order_of(request, FACTS, seed=1).hash_seed != order_of(request_of(PROMPT), FACTS, seed=1).hash_seed
