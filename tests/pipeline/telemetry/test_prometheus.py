"""Labels added to metrics that are text already."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipeline import InvalidArgument
from pipeline.telemetry import Sample, family, merged, with_labels


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
def test_a_reader_finds_both_labels_whatever_they_contain(own: str, added: str) -> None:
    registry = CollectorRegistry()
    Gauge("up", "is it\nup", ["own"], registry=registry).labels(own).set(1.5)
    text = with_labels(generate_latest(registry).decode(), {"added": added})
    (family,) = text_string_to_metric_families(text)
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"own": own, "added": added}, 1.5)]


# -- families and texts of several programs


def test_a_family_is_what_a_reader_takes_for_one() -> None:
    labels = {"path": 'a"b\\c\nd'}
    text = family("up", "gauge", "is it\nup, or \\ not", [Sample(labels, 2), Sample({}, 0.5)])
    (read,) = text_string_to_metric_families(text)
    assert (read.name, read.type, read.documentation) == ("up", "gauge", "is it\nup, or \\ not")
    assert [(sample.labels, sample.value) for sample in read.samples] == [(labels, 2.0), ({}, 0.5)]


def test_parts_of_a_family_differ_by_the_rest_of_the_name() -> None:
    parts = [Sample({"le": "+Inf"}, 3, "_bucket"), Sample({}, 3, "_count"), Sample({}, 4.5, "_sum")]
    (read,) = text_string_to_metric_families(family("wait", "histogram", "", parts))
    assert [sample.name for sample in read.samples] == ["wait_bucket", "wait_count", "wait_sum"]


GAUGE = '# HELP up Is it up\n# TYPE up gauge\nup{w="%d"} 1\n'
HISTOGRAM = '# TYPE wait histogram\nwait_bucket{le="+Inf",w="%d"} 3\nwait_sum{w="%d"} 1\nwait_count{w="%d"} 3\n'


def test_texts_together_have_each_family_once_with_all_its_samples() -> None:
    both = merged([GAUGE % 1 + HISTOGRAM % (1, 1, 1), GAUGE % 2 + HISTOGRAM % (2, 2, 2)])
    assert both.split("\n")[:4] == ["# HELP up Is it up", "# TYPE up gauge", 'up{w="1"} 1', 'up{w="2"} 1']
    up, wait = text_string_to_metric_families(both)
    assert (len(up.samples), len(wait.samples)) == (2, 6)
    assert both.count("# TYPE") == 2


def test_a_part_without_its_type_goes_with_the_family_that_has_one() -> None:
    bare = 'wait_sum{w="2"} 1\nwait_count{w="2"} 3\n'
    (read,) = text_string_to_metric_families(merged([HISTOGRAM % (1, 1, 1) + GAUGE % 1, bare]).partition("# HELP")[0])
    assert len(read.samples) == 5


def test_a_name_that_only_looks_like_a_part_is_a_family_of_its_own() -> None:
    text = "# TYPE up gauge\nup 1\n# TYPE up_sum gauge\nup_sum 4\nup_count 2\n"
    assert merged([text, text]).split("\n") == [
        *("# TYPE up gauge", "up 1", "up 1"),
        *("# TYPE up_sum gauge", "up_sum 4", "up_sum 4"),
        *("up_count 2", "up_count 2", ""),
    ]


def test_of_two_helps_the_first_one_counts() -> None:
    assert merged(["# HELP up a\nup 1", "# HELP up b\n# TYPE up gauge\nup 2\n"]) == (
        "# HELP up a\n# TYPE up gauge\nup 1\nup 2\n"
    )


def test_the_end_of_a_text_is_not_the_end_of_all() -> None:
    assert merged(["up 1\n# EOF\n", "\n\nup 2"]) == "up 1\nup 2\n"


def test_a_line_that_is_no_sample_stays_with_the_one_before() -> None:
    assert merged(["up 1\n# so far\ndown 1", "up 2"]) == "up 1\n# so far\nup 2\ndown 1\n"


@pytest.mark.parametrize("texts", [[], [""], ["", "\n"]])
def test_no_texts_are_no_text(texts: list[str]) -> None:
    assert merged(texts) == ""


@given(st.lists(st.sampled_from([GAUGE % 1, HISTOGRAM % (1, 1, 1), 'bare{a="# HELP up"} 1\n', "# odd\n"]), max_size=5))
def test_what_is_merged_stays_as_it_is_and_loses_no_line(texts: list[str]) -> None:
    both = merged(texts)
    assert merged([both]) == both
    samples = [line for text in texts for line in text.split("\n") if line and not line.startswith("#")]
    assert sorted(line for line in both.split("\n") if line and not line.startswith("#")) == sorted(samples)
