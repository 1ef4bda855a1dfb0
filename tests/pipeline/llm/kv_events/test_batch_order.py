"""Which batch of an engine comes next, which came before, and which shows that the engine restarted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.llm.kv_events.batch_order import BatchOrder, Place


def order_after(*sequences: int, remembered: int = 8) -> BatchOrder:
    order = BatchOrder(remembered)
    for sequence in sequences:
        order.take(sequence, b"%d" % sequence)
    return order


def test_the_first_batch_has_sequence_zero() -> None:
    order = BatchOrder()
    assert (order.next_sequence, order.place(0, b""), order.place(1, b"")) == (0, Place.NEXT, Place.LATER)


def test_a_batch_that_was_taken_is_known_by_its_payload() -> None:
    order = order_after(0, 1, 2)
    assert (order.place(1, b"1"), order.place(1, b"another")) == (Place.TAKEN, Place.OTHER)
    assert (order.place(3, b"3"), order.place(4, b"4")) == (Place.NEXT, Place.LATER)


def test_a_batch_that_was_given_up_comes_late() -> None:
    order = order_after(0, 3)
    assert [order.place(n, b"%d" % n) for n in range(5)] == [
        *(Place.TAKEN, Place.LATE, Place.LATE, Place.TAKEN),
        Place.NEXT,
    ]


def test_a_batch_of_long_ago_is_another() -> None:
    order = order_after(*range(20), remembered=8)
    assert (order.place(12, b"12"), order.place(11, b"11")) == (Place.TAKEN, Place.OTHER)


def test_a_long_gap_forgets_all_that_was_there() -> None:
    order = order_after(*range(8), 2**63, remembered=8)
    assert order.place(2**63 - 3, b"5") is Place.LATE
    assert order.place(2**63 + 1, b"") is Place.NEXT


@given(st.lists(st.integers(1, 5), max_size=30))
def test_every_remembered_batch_has_the_place_it_was_given(steps: list[int]) -> None:
    order, taken, sequence = BatchOrder(8), set[int](), -1
    for step in steps:
        sequence += step
        order.take(sequence, b"%d" % sequence)
        taken.add(sequence)
    for number in range(max(0, order.next_sequence - 8), order.next_sequence):
        expected = Place.TAKEN if number in taken else Place.LATE
        assert order.place(number, b"%d" % number) is expected
