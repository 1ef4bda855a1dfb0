"""LoopShare: readers have their turns, first tokens leave at once, and ranks go on for as long as these took."""

from __future__ import annotations

from statistics import mean, mode

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines.mocker.loop_share import (
    FIRST_TURNS,
    LONG_SHARE_MAX_S,
    QUIET_TURN_S,
    REST_TURNS,
    SHARE_MAX_S,
    SHARE_MAX_STEPS,
    LoopShare,
)


class Cpu:
    """CPU time that passes when a test lets it."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> float:
        return self.now_s


class Counted(LoopShare):
    """Records the steps of each share."""

    def __init__(self, cpu: Cpu) -> None:
        super().__init__(cpu)
        self.shares = [0]

    async def step_done(self) -> None:
        self.shares[-1] += 1
        await super().step_done()

    async def _yield_turn(self) -> None:
        self.shares.append(0)
        await super()._yield_turn()


async def shares(cpu: Cpu, *, step_s: float, others_s: float, turns: int, ranks: int = 1) -> list[list[int]]:
    """Return the steps of each share of each rank, while another task takes so long in each turn of the loop."""
    counted = [Counted(cpu) for _ in range(ranks)]

    async def steps(share: Counted) -> None:
        while len(share.shares) <= turns:
            cpu.now_s += step_s
            await share.step_done()

    async def read() -> None:
        while True:
            cpu.now_s += others_s
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        async with anyio.create_task_group() as working:
            for share in counted:
                working.start_soon(steps, share)
        tasks.cancel_scope.cancel()
    return [share.shares[:turns] for share in counted]


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
class TestInRealTime:
    async def test_each_share_is_a_step_while_first_tokens_are_on_their_way_and_grows_then(self) -> None:
        (found,) = await shares(Cpu(), step_s=1e-5, others_s=1.0, turns=40)
        most = [1] * (FIRST_TURNS + 1) + list(range(2, SHARE_MAX_STEPS)) + [SHARE_MAX_STEPS] * 40
        # On trio the others have no turn now and then, two another time.
        assert all(steps in (1, allowed) for steps, allowed in zip(found, most, strict=False))
        assert found[-10:].count(SHARE_MAX_STEPS) >= 3

    async def test_a_rank_steps_for_as_long_as_the_others_took(self) -> None:
        (found,) = await shares(Cpu(), step_s=1e-5, others_s=3.5e-5, turns=200)
        assert mean(found[20:]) == pytest.approx(4, abs=0.5)  # the share ends within the fourth step

    async def test_a_share_has_a_longest_time(self) -> None:
        (found,) = await shares(Cpu(), step_s=SHARE_MAX_S / 2.5, others_s=SHARE_MAX_S * 3.5 / REST_TURNS, turns=40)
        assert max(found) == 3

    async def test_others_have_a_turn_after_each_step_that_takes_longer_than_they_did(self) -> None:
        (found,) = await shares(Cpu(), step_s=1e-3, others_s=1e-4, turns=20)
        assert set(found) == {1}

    async def test_ranks_share_the_time_of_the_others_and_do_not_count_their_own(self) -> None:
        found = await shares(Cpu(), step_s=1e-6, others_s=6.8e-6, turns=200, ranks=3)
        assert [mean(one[20:]) for one in found] == pytest.approx([3, 3, 3], abs=0.7)

    async def test_after_a_wait_shares_are_short_again(self) -> None:
        cpu = Cpu()
        share = Counted(cpu)

        async def others() -> None:
            while True:
                cpu.now_s += 1.0
                await checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others)
            while len(share.shares) <= 40:
                await share.step_done()
            share.restart()
            while len(share.shares) <= 45:
                await share.step_done()
            tasks.cancel_scope.cancel()
        assert SHARE_MAX_STEPS in share.shares[:40]
        assert share.shares[40:44] == [1] * 4


# On trio others may have no turn now and then, and two another time.
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_share_is_longer_where_the_others_take_far_longer() -> None:
    (found,) = await shares(Cpu(), step_s=SHARE_MAX_S / 2.5, others_s=SHARE_MAX_S * 7.9 / REST_TURNS, turns=200)
    assert mode(found[20:]) == 5  # a quarter of their turns
    (found,) = await shares(Cpu(), step_s=LONG_SHARE_MAX_S / 2.5, others_s=1.0, turns=40)
    assert max(found) == 3


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("others_s", "turns"), [(QUIET_TURN_S * 1.1, REST_TURNS), (QUIET_TURN_S * 0.9, 1)])
async def test_a_rank_rests_for_more_turns_while_others_have_much_to_do(others_s: float, turns: int) -> None:
    """What is on its way takes some turns of the loop, and would go behind new tokens in each of them."""
    cpu, had = Cpu(), 0
    share = LoopShare(cpu)

    async def others() -> None:
        nonlocal had
        while True:
            cpu.now_s += others_s
            had += 1
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        for _ in range(100):
            cpu.now_s += 1e-3  # longer than any share
            await share.step_done()
        tasks.cancel_scope.cancel()
    assert had == pytest.approx(100 * turns, abs=turns)


async def test_in_virtual_time_each_share_is_one_step() -> None:
    (found,) = await shares(Cpu(), step_s=1e-5, others_s=1.0, turns=20)
    assert set(found) == {1}
