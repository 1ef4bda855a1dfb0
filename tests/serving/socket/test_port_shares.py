"""PortShares: the connections of the processes behind one port."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.socket import PORT_SHARES, PortShares
from serving.socket.port_shares import ABSENT


def shares(path: Path, *counts: int) -> list[PortShares]:
    """Those of processes that have so many connections."""
    PortShares.make(path, len(counts))
    made = [PortShares(path, number) for number in range(len(counts))]
    for one, count in zip(made, counts, strict=True):
        one.set(count)
    return made


@pytest.mark.parametrize(
    ("counts", "waiting", "part"),
    [
        ((3, 3), 1, 1),
        ((3, 2), 1, 0),
        ((3, 4), 1, 1),
        ((3, 9, 2), 1, 0),
        ((3, 9, 2), 2, 1),
        ((3, 9, 2), 100, 35),
        ((0, 0), 1, 1),
        ((0, 0), 256, 128),
        ((10, 0), 256, 123),
        ((10, 0), 5, 0),
        ((0, 10), 5, 5),
        ((5, ABSENT), 7, 7),
        ((5,), 7, 7),
    ],
)
def test_the_part_of_a_process_brings_it_level_with_the_others(
    counts: tuple[int, ...], waiting: int, part: int, tmp_path: Path
) -> None:
    one = shares(tmp_path / "shares", *counts)[0]
    assert one.part(counts[0], waiting) == part


@given(st.lists(st.integers(0, 50) | st.just(ABSENT), min_size=1, max_size=5), st.integers(0, 50), st.integers(1, 100))
def test_parts_are_enough_for_all_and_none_is_above_another_that_gets_more(
    others: list[int], own: int, waiting: int
) -> None:
    with TemporaryDirectory() as folder:
        counts = [own, *others]
        made = shares(Path(folder) / "shares", *counts)
        present = [(count, one) for count, one in zip(counts, made, strict=True) if count != ABSENT]
        parts = [one.part(count, waiting) for count, one in present]
        assert waiting <= sum(parts) < waiting + len(parts)
        levels = {count + part for (count, _), part in zip(present, parts, strict=True) if part}
        assert max(levels) - min(levels) <= 1
        assert all(part or count >= max(levels) - 1 for (count, _), part in zip(present, parts, strict=True))


def test_a_process_that_takes_none_is_passed_over(tmp_path: Path) -> None:
    one, other = shares(tmp_path / "shares", 5, 2)
    assert one.part(5, 1) == 0
    other.set(ABSENT)
    assert one.part(5, 1) == 1


def test_a_process_finds_its_own_in_the_environment(tmp_path: Path) -> None:
    one, other = shares(path := tmp_path / "a:b", 7, 0)
    found = PortShares.of({PORT_SHARES: f"1:{path}"})
    assert found is not None
    found.set(9)
    assert one.part(9, 1) == 1
    assert one.part(10, 1) == 0
    assert other.part(8, 1) == 0
    assert PortShares.of({}) is None


def test_none_is_there_before_it_reports(tmp_path: Path) -> None:
    PortShares.make(path := tmp_path / "shares", 2)
    assert PortShares(path, 0).part(5, 3) == 3
