"""One choice: which rule ends it, what stays visible, and what the caller gets of it. No loop."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import define
from hypothesis import given
from hypothesis import strategies as st

from operators import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from operators.text.choice_decoder import ChoiceDecoder, StopRules
from pipeline.protocols import FinishReason, PreprocessedRequest, SamplingOptions, StopConditions

EOS = ByteTokenizer.eos_token_id
DOT = ord(".")


@define
class Decoded:
    """The text and the end of a choice."""

    text: str
    tokens: list[str | None]
    finish: FinishReason | None
    stop_reason: int | str | None


def decode(
    answer: str | list[int], tokenizer: Tokenizer | None = None, *, include: bool = False, **conditions: Any
) -> Decoded:
    """Feed the answer at once, and flush if nothing ended it."""
    request = PreprocessedRequest(
        [],
        stop_conditions=StopConditions(**conditions),
        sampling_options=SamplingOptions(include_stop_str_in_output=include),
        eos_token_ids=[EOS],
    )
    tokenizer = tokenizer or ByteTokenizer()
    choice = ChoiceDecoder(tokenizer.decoder(), StopRules.of(request))
    tokens: list[str | None] = []
    text = choice.feed(tokenizer.encode(answer) if isinstance(answer, str) else answer, tokens)
    if choice.finish is None:
        text += choice.flush()
    return Decoded(text, tokens, choice.finish, choice.stop_reason)


def test_without_a_rule_everything_is_visible_and_nothing_ends() -> None:
    assert decode("ab") == Decoded("ab", ["a", "b"], None, None)


def test_a_hidden_id_ends_without_its_text_and_a_user_id_is_the_reason() -> None:
    assert decode("a.b", stop_token_ids=[DOT]) == Decoded("a", ["a", None], FinishReason.STOP, DOT)


@pytest.mark.parametrize("conditions", [{"stop_token_ids_hidden": [EOS]}, {"stop_token_ids": [EOS]}])
def test_the_models_own_id_ends_without_a_reason(conditions: dict[str, Any]) -> None:
    assert decode([97, EOS, 98], **conditions) == Decoded("a", ["a", None], FinishReason.STOP, None)


def test_a_visible_id_ends_with_its_text() -> None:
    assert decode("a.b", stop_token_ids_visible=[DOT]) == Decoded("a.", ["a", "."], FinishReason.STOP, DOT)


def test_a_visible_id_counts_before_a_hidden_one() -> None:
    decoded = decode("a.", stop_token_ids_visible=[DOT], stop_token_ids_hidden=[DOT])
    assert (decoded.text, decoded.finish) == ("a.", FinishReason.STOP)


def test_a_hidden_id_needs_no_text() -> None:
    assert decode([97, 9999], stop_token_ids_hidden=[9999]).finish == FinishReason.STOP


def test_an_id_that_would_complete_a_stop_string_ends_as_an_id() -> None:
    decoded = decode("a#.", stop=["#."], stop_token_ids=[DOT])
    assert (decoded.text, decoded.stop_reason) == ("a#", DOT)


def test_a_stop_string_complete_before_the_id_is_the_reason() -> None:
    decoded = decode("abc.", stop=["abcd", "bc"], stop_token_ids=[DOT])
    assert (decoded.text, decoded.stop_reason) == ("a", "bc")


@pytest.mark.parametrize(("include", "text", "last"), [(False, "a", None), (True, "aSTOP", "P")])
def test_a_stop_string_is_the_reason_and_is_visible_if_wanted(include: bool, text: str, last: str | None) -> None:
    decoded = decode("aSTOPb", stop=["STOP"], include=include)
    assert decoded == Decoded(text, ["a", "S", "T", "O", last], FinishReason.STOP, "STOP")


def test_tokens_before_the_minimum_are_not_looked_at() -> None:
    assert decode("a.b.c", min_tokens=3, stop_token_ids=[DOT]).text == "a.b"
    assert decode("a.b.c", min_tokens=2, stop_token_ids=[DOT]).text == "a"
    assert decode("xyxyxy", min_tokens=4, stop=["xy"]).text == "xyxy"


def test_a_stop_string_that_began_before_the_minimum_does_not_count() -> None:
    assert decode("xyz", min_tokens=2, stop=["xy"]).finish is None


def test_a_token_that_cannot_be_decoded_ends_with_an_error() -> None:
    decoded = decode([97, 9999, 98])
    assert decoded.text == "a"
    assert decoded.finish is not None
    assert str(decoded.finish).startswith("error: decode error: token id 9999")


def test_text_held_before_an_error_is_still_shown() -> None:
    assert decode([97, ord("S"), 9999], stop=["STOP"]).text == "aS"


def test_an_unfinished_character_is_not_shown_before_the_end() -> None:
    cut_off = "日".encode()[:2]
    assert decode(list(b"a" + cut_off)).text == "a\ufffd"
    assert decode([*b"a" + cut_off, EOS], stop_token_ids_hidden=[EOS]).text == "a\ufffd"


TEXTS = st.text("ab.é日🙂", max_size=16)


@given(
    text=TEXTS,
    stops=st.lists(st.text("ab.é日🙂", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    is_byte_level=st.booleans(),
    sizes=st.lists(st.integers(1, 4), min_size=1),
)
def test_any_split_into_tokens_and_chunks_gives_the_text_cut_at_the_earliest_stop_string(
    byte_level: HuggingFaceTokenizer, text: str, stops: list[str], include: bool, is_byte_level: bool, sizes: list[int]
) -> None:
    tokenizer: Tokenizer = byte_level if is_byte_level else ByteTokenizer()
    choice = ChoiceDecoder(tokenizer.decoder(), StopRules(stops=tuple(stops), include_stop=include))
    token_ids, shown = tokenizer.encode(text), ""
    while token_ids and choice.finish is None:
        size = sizes[len(token_ids) % len(sizes)]
        chunk, token_ids = token_ids[:size], token_ids[size:]
        shown += choice.feed(chunk, [])
    if choice.finish is None:
        shown += choice.flush()
    found = sorted((text.find(stop), order) for order, stop in enumerate(stops) if stop in text)
    if not found:
        assert (shown, choice.finish) == (text, None)
        return
    at, order = found[0]
    assert shown == text[: at + len(stops[order]) * include]
    assert (choice.finish, choice.stop_reason) == (FinishReason.STOP, stops[order])
