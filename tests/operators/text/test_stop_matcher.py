"""Stop strings: the visible text does not depend on the pieces a text comes in."""

from __future__ import annotations

from itertools import pairwise
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.text.decoding import StopMatcher

LETTERS = "abé"
TEXTS = st.text(LETTERS, max_size=24)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


def run(matcher: StopMatcher, pieces: list[str]) -> str:
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            return shown
    return shown + matcher.flush()


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The whole text cut at its earliest stop string: position first, then order in the list."""
    found = [(text.find(stop), order) for order, stop in enumerate(stops) if stop in text]
    if not found:
        return text, None
    at, order = min(found)
    return text[: at + len(stops[order]) * include], stops[order]


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(at % (len(text) + 1) for at in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 99)), include=st.booleans())
def test_any_pieces_give_the_text_cut_at_the_earliest_stop_string(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include=include)
    shown = run(matcher, pieces_of(text, cuts))
    assert (shown, matcher.matched) == cut(text, stops, include)


@given(text=TEXTS, stops=STOPS)
def test_what_is_held_is_the_beginning_of_a_stop_string_and_shorter_than_the_longest(
    text: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    for character in text:
        matcher.feed(character)
        assert len(matcher.held) <= max(map(len, stops)) - 1
        if matcher.matched is not None:
            break
        assert not matcher.held or any(stop.startswith(matcher.held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["User:"], ["ok Us", "ers"], ["ok ", "Users"], None),
        (["User:"], ["ok Us", "er: hi"], ["ok ", ""], "User:"),
        (["<|a|>", "<|b|>"], ["x<|", "b|>y"], ["x", ""], "<|b|>"),
        (["aab"], ["aaa", "b"], ["a", ""], "aab"),
        (["abcd", "bc"], ["abc", "x"], ["", "a"], "bc"),
        (["abcd", "bc"], ["abc", "d"], ["", ""], "abcd"),
        (["ab", "abc"], ["abc"], [""], "ab"),
        (["日本"], ["今日", "本語"], ["今", ""], "日本"),
        (["", "b"], ["ab"], ["a"], "b"),
    ],
)
def test_held_text_is_shown_once_it_is_decided(
    stops: list[str], pieces: list[str], shown: list[str], matched: str | None
) -> None:
    """With characters for bytes: nothing is cut inside a character."""
    matcher = StopMatcher(stops)
    assert [matcher.feed(piece) for piece in pieces] == shown
    assert matcher.matched == matched


def test_the_end_decides_what_is_held() -> None:
    undecided = StopMatcher(["User:"])
    assert undecided.feed("Us") == ""
    assert undecided.flush() == "Us"
    assert undecided.matched is None
    waiting = StopMatcher(["abcd", "bc"])
    assert waiting.feed("abc") == ""
    assert waiting.flush() == "a"
    assert waiting.matched == "bc"


def test_a_long_stop_string_that_almost_matches_costs_no_more_than_its_length() -> None:
    stop = "a" * 5000 + "b"
    matcher = StopMatcher([stop])
    shown = "".join(matcher.feed("a") for _ in range(6000))
    assert len(shown) == 1000
    assert matcher.feed("b") == ""
    assert matcher.matched == stop


def decided(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What may be shown of all text so far, and the stop string found: the definition, without any state."""
    first, found = len(text), None
    for stop in stops:
        at = text.find(stop)
        is_whole = at >= 0
        if not is_whole:
            at = next((i for i in range(len(text)) if stop.startswith(text[i:])), len(text))
        if at < first:
            first, found = at, stop if is_whole else None
    return text[:first], found


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 99)),
    taken_over=st.integers(0, 8),
)
def test_after_each_piece_as_much_is_shown_as_the_definition_allows(
    text: str, stops: list[str], cuts: list[int], taken_over: int
) -> None:
    matcher, shown, so_far = StopMatcher(stops), "", ""
    held = decided(text[:taken_over], stops)
    if held == ("", None):  # what another matcher held back
        matcher.resume(text[:taken_over])
        so_far, text = text[:taken_over], text[taken_over:]
    for piece in pieces_of(text, cuts):
        so_far += piece
        shown += matcher.feed(piece)
        assert (shown, matcher.matched) == decided(so_far, stops)
        if matcher.matched is not None:
            return
        assert shown + matcher.held == so_far


def test_a_megabyte_of_stop_strings_that_nearly_match_costs_no_more_than_reading_the_answer_for_each() -> None:
    """They cost 60 seconds before; a limit on their length stands in front of this."""
    size = 32_768
    matcher = StopMatcher(["x" + "a" * size, *("a" + letter * size for letter in "bcdefghijklmnopqrstuvwyzABCDEFG")])
    began_s = thread_time()
    shown = matcher.feed("x" + "a" * (size - 300))
    for _ in range(64):
        shown += matcher.feed("aaaa")
    assert (shown, len(matcher.held)) == ("", size - 43)
    assert thread_time() - began_s < 10
