"""Data parallel ranks of requests and workers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engines.roles import forced_dp_rank, own_dp_rank
from pipeline import InvalidArgument
from pipeline.protocols import PreprocessedRequest, RoutingHints


@pytest.mark.parametrize(
    ("request_", "rank"),
    [
        (PreprocessedRequest([1]), None),
        (PreprocessedRequest([1], routing=RoutingHints()), None),
        (PreprocessedRequest([1], routing=RoutingHints(dp_rank=0)), 0),
        ({"token_ids": [1]}, None),
        ({"routing": None}, None),
        ({"routing": {}}, None),
        ({"routing": {"dp_rank": 3}}, 3),
        ({"routing": {"dp_rank": "2"}}, 2),
    ],
)
def test_a_request_may_name_its_rank(request_: Any, rank: int | None) -> None:
    assert forced_dp_rank(request_) == rank


@pytest.mark.parametrize("rank", ["two", [], "", 2.7, float("inf")])
def test_a_rank_that_is_no_number_is_refused(rank: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        forced_dp_rank({"routing": {"dp_rank": rank}})
    assert caught.value.field == "routing.dp_rank"


@pytest.mark.parametrize(
    ("rank", "start", "size", "own", "warns"),
    [
        (4, 4, 2, 4, False),
        (5, 4, 2, 5, False),
        (6, 4, 2, None, True),
        (3, 4, 2, None, True),
        (None, 4, 2, None, False),
        (9, 0, 1, None, False),
        (0, 0, 0, None, False),
    ],
)
def test_a_worker_serves_only_its_own_ranks(
    rank: int | None, start: int, size: int, own: int | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert own_dp_rank(rank, start, size) == own
    assert [record.getMessage().endswith(f"[{start}, {start + size})") for record in caplog.records] == [True] * warns
