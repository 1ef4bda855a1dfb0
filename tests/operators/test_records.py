"""shallow_copy: the records that every request goes through."""

from __future__ import annotations

from typing import Any

import pytest

from operators.records import shallow_copy
from pipeline.protocols import PreprocessedRequest, RoutingHints, StopConditions

RECORDS: list[Any] = [
    PreprocessedRequest([1, 2], annotations=["a"], routing=RoutingHints(dp_rank=1)),
    RoutingHints(prefill_worker_id=3, priority=1),
    StopConditions(max_tokens=4, ignore_eos=True),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_copy_is_equal_and_another_and_shares_what_it_holds(record: Any) -> None:
    copy = shallow_copy(record)
    assert copy == record
    assert copy is not record
    for field in record.__attrs_attrs__:
        assert getattr(copy, field.name) is getattr(record, field.name)


def test_a_copy_may_be_changed() -> None:
    record = RoutingHints(dp_rank=1)
    shallow_copy(record).dp_rank = 2
    assert record.dp_rank == 1
