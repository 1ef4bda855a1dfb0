"""TransferExchange: a side that ends at any turn of the loop, of either side's waits, leaves nothing behind."""

from __future__ import annotations

from typing import get_args

import anyio
import pytest

from engines.mocker.transfer import TransferOrder, TransferRole
from pipeline import Cancelled
from pipeline.errors import BackendConnectionTimeout, BackendDisconnected
from tests.engines.mocker.transfer.worlds import (
    ROLES,
    ScriptedSide,
    pair,
    turns,
)

WAIT_TURNS = 3
ALL_TURNS = 32
"""There are more turns than a transfer takes; the last ones disturb nothing."""


@pytest.mark.parametrize("order", get_args(TransferOrder))
@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("late", [None, *ROLES])
async def test_at_whatever_turn_a_side_ends_both_give_back_once_what_they_have(
    order: TransferOrder, how: str, role: TransferRole, late: TransferRole | None
) -> None:
    went_well = []
    for turn in range(ALL_TURNS):
        both = pair(
            order, ScriptedSide(turns=WAIT_TURNS, missing_tokens=0), ScriptedSide(turns=WAIT_TURNS, missing_tokens=0)
        )
        async with anyio.create_task_group() as tasks:
            for coming in ROLES:
                tasks.start_soon(both.attend, coming, 0.0, WAIT_TURNS if coming == late else 0)
            await turns(turn)
            both.end(role, how)
        source, destination = both.sides["source"].calls, both.sides["destination"].calls
        has_moved = "release" in source
        assert source in ([], ["submit", "cancel"], ["submit", "hold", "cancel"], ["submit", "hold", "release"])
        assert destination in ([], ["cancel"], ["reserve", "cancel"], ["reserve", "activate"])
        assert has_moved == ("activate" in destination)
        assert both.exchange.sessions == both.exchange.waiting == 0
        both.check_freed()
        for error in both.errors.values():
            expected = (Cancelled, BackendDisconnected, BackendConnectionTimeout)
            assert error is None or (isinstance(error, expected) and not has_moved)
        went_well.append(has_moved)
    assert not went_well[0]
    assert went_well[-1]
