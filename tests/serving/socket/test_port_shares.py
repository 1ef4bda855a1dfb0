"""PortShares: the connections of the processes behind one port."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    ("counts", "own", "others_turn"),
    [
        ((3, 3), 3, False),
        ((3, 2), 3, True),
        ((3, 4), 3, False),
        ((3, 9, 2), 3, True),
        ((0, 0), 0, False),
        ((5, ABSENT), 5, False),
        ((5,), 5, False),
    ],
)
def test_it_is_the_turn_of_a_process_with_fewer(
    counts: tuple[int, ...], own: int, others_turn: bool, tmp_path: Path
) -> None:
    one = shares(tmp_path / "shares", *counts)[0]
    assert one.is_others_turn(own) is others_turn


def test_a_process_that_takes_none_is_passed_over(tmp_path: Path) -> None:
    one, other = shares(tmp_path / "shares", 5, 2)
    assert one.is_others_turn(5)
    other.set(ABSENT)
    assert not one.is_others_turn(5)


def test_a_process_finds_its_own_in_the_environment(tmp_path: Path) -> None:
    one, other = shares(path := tmp_path / "a:b", 7, 0)
    found = PortShares.of({PORT_SHARES: f"1:{path}"})
    assert found is not None
    found.set(9)
    assert not one.is_others_turn(7)
    assert other.is_others_turn(9)
    assert PortShares.of({}) is None


def test_none_is_there_before_it_reports(tmp_path: Path) -> None:
    PortShares.make(path := tmp_path / "shares", 2)
    assert not PortShares(path, 0).is_others_turn(5)
