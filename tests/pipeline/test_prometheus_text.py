"""Labels added to metrics that are text already."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipeline import InvalidArgument
from pipeline.prometheus_text import with_labels


@pytest.mark.parametrize(
    ("line", "labelled"),
    [
        ("up 1", 'up{w="7"} 1'),
        ("up \t1  1700000000", 'up{w="7"} 1  1700000000'),
        ("up{} 1", 'up{w="7"} 1'),
        ("up{}1", 'up{w="7"} 1'),
        ('up{a="b"} +Inf', 'up{a="b",w="7"} +Inf'),
        ('up{a="b",} 1', 'up{a="b",w="7"} 1'),
        ('up { a = "b" } NaN', 'up{a = "b",w="7"} NaN'),
        ('up{a="}{, \\" w=\\"1"} 1', 'up{a="}{, \\" w=\\"1",w="7"} 1'),
        ('a:b{le="0.5"} 1 # {id="x"} 0.4', 'a:b{le="0.5",w="7"} 1 # {id="x"} 0.4'),
        ('{"odd name",a="b"} 1', '{"odd name",a="b",w="7"} 1'),
    ],
)
def test_every_sample_gets_the_labels(line: str, labelled: str) -> None:
    assert with_labels(line, {"w": "7"}) == labelled


@pytest.mark.parametrize("line", ['up{w="1"} 1', 'up{a="b", w = "" } 1', 'up{"w"="1"} 1'])
def test_a_label_that_is_there_stays_as_it_is(line: str) -> None:
    """BE-92."""
    assert with_labels(line, {"w": "7"}) == line


def test_only_what_is_missing_is_added() -> None:
    assert with_labels('up{w="1"} 1', {"w": "7", "v": "8"}) == 'up{w="1",v="8"} 1'


@pytest.mark.parametrize(
    "text", ["", "\n", "# HELP up is it up\n# TYPE up gauge\n", "  # odd", "up", 'up{a="b} 1', "?"]
)
def test_what_is_no_sample_stays_unchanged(text: str) -> None:
    assert with_labels(text, {"w": "7"}) == text


def test_without_labels_nothing_changes() -> None:
    text = 'up 1\nup{a="b"}   2\n'
    assert with_labels(text, {}) == text


@pytest.mark.parametrize("name", ["", "a-b", "1a", 'a="x",b'])
def test_a_label_without_a_valid_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        with_labels("up 1", {name: "x"})


@given(own=st.text(), added=st.text())
def test_a_reader_finds_both_labels_whatever_they_say(own: str, added: str) -> None:
    registry = CollectorRegistry()
    Gauge("up", "is it\nup", ["own"], registry=registry).labels(own).set(1.5)
    text = with_labels(generate_latest(registry).decode(), {"added": added})
    (family,) = text_string_to_metric_families(text)
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"own": own, "added": added}, 1.5)]
