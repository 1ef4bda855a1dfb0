"""Counting Python calls: the same figures in every run, from the product's files, in another checkout too."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks.calls import MODES, SIMULATION, Calls, count, count_in, summary

ROOT = Path(__file__).parents[2]


@cache
def counted(mode: str) -> Calls:
    """The calls of this checkout, counted once for all tests."""
    return count(mode)


@pytest.mark.parametrize("mode", MODES)
def test_parts_sum_up_to_the_calls_of_the_product(mode: str) -> None:
    calls = counted(mode)
    parts = {name: (request, token) for name, request, token in calls.parts()}
    assert min(request for request, _ in parts.values()) >= 0
    request, token = (sum(part[i] for name, part in parts.items() if name != "libraries") for i in (0, 1))
    assert (request, token) == pytest.approx(calls.product)
    # Each stage is entered once a request, some of them once a token.
    assert parts["operators"][0] > parts["operators"][1] > 1
    assert parts[SIMULATION][1] > 1


def test_a_prefill_pool_costs_calls_of_a_request_and_none_of_a_token() -> None:
    alone, pooled = counted("kv").product, counted("kv-prefill").product
    assert pooled[0] > alone[0] + 100
    assert pooled[1] == pytest.approx(alone[1], abs=1)


def test_files_are_those_of_the_packages_and_most_entered_first() -> None:
    files = counted("kv").files(10)
    assert len(files) == 10
    assert all((ROOT / name).is_file() for name, _, _ in files)
    assert files[0][1] + files[0][2] > files[-1][1] + files[-1][2]


def test_another_checkout_is_counted_alike() -> None:
    here = counted("round-robin")
    there = count_in(ROOT, ["round-robin"])
    assert there["round-robin"].product == pytest.approx(here.product, rel=0.01)
    assert summary({"round-robin": here}, there).row_count == 7
