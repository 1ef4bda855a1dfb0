"""Text as subjects."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from pipeline.errors import InvalidMessage
from pipeline.network import Scope
from pipeline.network.names import matches_prefix
from pipeline.network.nats.subjects import (
    SUBJECT_BYTES_MAX,
    event_subject,
    key_headers,
    key_of,
    key_subject,
    prefix_subjects,
    text_of,
    token_of,
)

ROOT = "$KV.b"
ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=20)
KEYS = st.one_of(ANY_TEXT, st.lists(ANY_TEXT, max_size=4).map("/".join), ANY_TEXT.map(lambda text: text * 200))


@given(ANY_TEXT)
def test_a_token_is_safe_in_a_subject_and_gives_its_text_back(text: str) -> None:
    token = token_of(text)
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", token)
    assert text_of(token) == text


@given(st.text("=AaF0 /.é", max_size=8))
def test_a_token_that_no_text_has_is_refused(token: str) -> None:
    try:
        text = text_of(token)
    except InvalidMessage:
        return
    assert token_of(text) == token


@given(KEYS)
def test_a_subject_gives_its_key_back_however_long_it_is(key: str) -> None:
    subject = key_subject(ROOT, key)
    assert len(subject) <= SUBJECT_BYTES_MAX
    assert key_of(ROOT, subject, key_headers(subject, key)) == key


@given(KEYS, st.integers(0, 5))
def test_the_subjects_of_a_prefix_match_every_key_below_it(key: str, parts: int) -> None:
    prefix = "/".join(key.split("/")[:parts]).removesuffix("/")
    assert matches_prefix(key, prefix)
    assert any(matched(pattern, key_subject(ROOT, key)) for pattern in prefix_subjects(ROOT, prefix))


def matched(pattern: str, subject: str) -> bool:
    """Return whether NATS delivers a message of the subject to the pattern."""
    if pattern.endswith(".>"):
        return subject.startswith(pattern[:-1]) and len(subject) > len(pattern) - 1
    return pattern == subject


def test_a_prefix_matches_whole_parts_only() -> None:
    assert prefix_subjects(ROOT, "v1/ns") == ["$KV.b.v1.ns", "$KV.b.v1.ns.>"] == prefix_subjects(ROOT, "v1/ns/")
    assert prefix_subjects(ROOT, "") == ["$KV.b.>"]


def test_a_long_key_comes_with_its_text_or_not_at_all() -> None:
    key = "ä" * 1000
    subject = key_subject(ROOT, key)
    headers = key_headers(subject, key)
    for wrong in ({}, dict.fromkeys(headers, "other"), dict.fromkeys(headers, "%ff%fe")):
        with pytest.raises(InvalidMessage):
            key_of(ROOT, subject, wrong)
    with pytest.raises(InvalidArgument):
        key_subject(ROOT, "k" * 20_000)


def test_another_programs_subject_is_no_key() -> None:
    for subject in ("$KV.other.a", "$KV.b.a=zz", "$KV.b.a..b", "$KV.b.ü", "$KV.b."):
        with pytest.raises(InvalidMessage):
            key_of(ROOT, subject, {})


@pytest.mark.parametrize(
    ("scope", "subject"),
    [
        (Scope("ns"), "namespace.ns.load"),
        (Scope("ns", "comp"), "namespace.ns.component.comp.load"),
        (Scope("ns", "comp", "ep"), "namespace.ns.component.comp.endpoint.ep.load"),
        (Scope("a.b", "c d", "*"), "namespace.a=2Eb.component.c=20d.endpoint.=2A.load"),
    ],
)
def test_an_events_subject_spells_out_its_scope(scope: Scope, subject: str) -> None:
    assert event_subject(scope, "load") == subject


def test_no_topic_reaches_into_another_scope() -> None:
    assert event_subject(Scope("ns"), "component.comp.load") != event_subject(Scope("ns", "comp"), "load")
    assert event_subject(Scope("ns"), ">") == "namespace.ns.=3E"
    with pytest.raises(InvalidArgument):
        event_subject(Scope("ns"), "t" * 2000)
