"""The times and counts of one request, as attributes of its span."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.chunks import GenerateRecord, gap_attributes, milliseconds, nearest_rank
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest


def record(times_s: list[float]) -> GenerateRecord:
    """Return a record whose clock returns these times, one per call."""
    clock: Iterator[float] = iter(times_s)
    return GenerateRecord(PreprocessedRequest([1, 2, 3], model="requested"), "agg", "", lambda: next(clock))


def attributes_of(kept: GenerateRecord, **ending: Any) -> dict[str, Any]:
    return dict(kept.attributes(**{"cancelled": False, "dropped": False, "error_kind": None, **ending}))


def test_the_gaps_of_the_specification() -> None:
    assert gap_attributes([10, 20, 30, 40, 50]) == {
        "avg_itl_ms": "30.00",
        "itl_p50_ms": "30.00",
        "itl_p99_ms": "50.00",
        "itl_max_ms": "50.00",
    }
    assert gap_attributes([]) == {}


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [([7], 0.99, 7), ([1, 2], 0.5, 2), ([1, 2, 3, 4], 0.5, 3), ([1, 2, 3], 0.0, 1), (list(range(101)), 0.99, 99)],
)
def test_a_percentile_is_the_value_at_the_nearest_rank(values: list[float], share: float, found: float) -> None:
    assert nearest_rank(values, share) == found


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_the_median_lies_between_and_the_order_of_the_gaps_does_not_matter(gaps_ms: list[float]) -> None:
    ordered = sorted(gaps_ms)
    assert nearest_rank(ordered, 0.5) in ordered
    assert nearest_rank(ordered, 0.99) <= ordered[-1]
    assert gap_attributes(gaps_ms)["itl_p50_ms"] == gap_attributes(ordered)["itl_p50_ms"]


@pytest.mark.parametrize(("value", "text"), [(0, "0.00"), (1.005, "1.00"), (12.346, "12.35"), (1000, "1000.00")])
def test_milliseconds_have_two_decimals(value: float, text: str) -> None:
    assert milliseconds(value) == text


def test_only_chunks_with_tokens_are_timed_and_tokens_are_counted_not_chunks() -> None:
    kept = record([10.0, 10.1, 10.3])
    for chunk in (LLMEngineOutput([]), LLMEngineOutput([1, 2]), LLMEngineOutput([]), LLMEngineOutput([3])):
        kept.observe(chunk)
    found = attributes_of(kept)
    assert (found["output_tokens"], found["ttft_ms"], found["itl_max_ms"]) == (3, "100.00", "200.00")
    assert (found["input_tokens"], found["model"], found["disagg_role"]) == (3, "requested", "agg")


def test_unknown_attributes_are_left_out() -> None:
    assert attributes_of(record([0.0])) == {
        "model": "requested",
        "input_tokens": 3,
        "disagg_role": "agg",
        "output_tokens": 0,
        "cancelled": False,
    }


def test_the_ending_is_recorded() -> None:
    kept = record([0.0])
    kept.observe(LLMEngineOutput.error("no memory"))
    assert attributes_of(kept)["finish_reason"] == "error: no memory"
    assert attributes_of(kept, cancelled=True)["cancelled"] is True
    dropped = attributes_of(kept, dropped=True)
    assert (dropped["finish_reason"], dropped["cancelled"]) == ("Dropped", True)
    assert attributes_of(kept, error_kind="Disconnected")["error_kind"] == "Disconnected"
