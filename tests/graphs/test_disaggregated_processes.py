"""The disaggregated graph over a front end, prefill and decode workers in processes of their own. In virtual time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import PenstockError
from pipeline.testing import run_in_virtual_time

from .process_worlds import Processes, open_processes
from .test_disaggregated import prefilled, settle, text_of
from .worlds import Half, open_fleet

REQUESTS = 8


async def texts_of(graph: Any) -> list[str]:
    """Return the answers to requests that come at the same time."""
    texts = [""] * REQUESTS

    async def ask(number: int) -> None:
        texts[number] = await text_of(graph, number)

    async with anyio.create_task_group() as tasks:
        for number in range(REQUESTS):
            tasks.start_soon(ask, number)
    return texts


@pytest.mark.parametrize("router", ["round-robin", "kv"])
@pytest.mark.parametrize("meets", [True, False])
async def test_the_answers_are_those_of_one_process(router: str, meets: bool) -> None:
    async with open_fleet(1, 1, meets=meets, router=router) as fleet:
        expected = await texts_of(fleet.graph)
    async with open_processes(2, 2, meets=meets, router=router) as every:
        assert await texts_of(every.fleet.graph) == expected
        assert prefilled(every.fleet) == REQUESTS
        (one, *_), (other, *_) = every.fleet.of("prefill"), every.fleet.of("decode")
        assert one.engine.exchange is not other.engine.exchange
        await settle()
        every.fleet.assert_idle()


@pytest.mark.parametrize("half", ["prefill", "decode"])
@pytest.mark.parametrize("after_s", [0.0, 0.018, 0.025, 0.1])
@pytest.mark.parametrize("meets", [True, False])
async def test_a_process_that_is_killed_costs_no_answer(half: str, after_s: float, meets: bool) -> None:
    """While prompts are queued, computed, on their way, or answered; another worker of either half is there."""
    async with open_fleet(1, 1, meets=meets, router="round-robin") as fleet:
        expected = await texts_of(fleet.graph)
    async with open_processes(2, 2, meets=meets) as every, anyio.create_task_group() as tasks:
        victim = every.fleet.of(half)[0]  # type: ignore[arg-type]

        async def kill() -> None:
            await anyio.sleep(after_s)
            await every.kill(victim)

        tasks.start_soon(kill)
        assert await texts_of(every.fleet.graph) == expected
        await settle()
        every.fleet.assert_idle()


async def test_without_its_only_prefill_process_decode_computes_the_prompts() -> None:
    async with open_processes(1, 1) as every:
        expected = await texts_of(every.fleet.graph)
        async with anyio.create_task_group() as tasks:
            (victim,) = every.fleet.of("prefill")

            async def kill() -> None:
                await anyio.sleep(0.02)
                await every.kill(victim)

            tasks.start_soon(kill)
            assert await texts_of(every.fleet.graph) == expected
        await settle()
        assert await texts_of(every.fleet.graph) == expected
        await settle()
        every.fleet.assert_idle()


async def test_a_prefill_process_that_comes_back_is_used_again() -> None:
    async with open_processes(1, 1) as every:
        expected = await texts_of(every.fleet.graph)
        await every.kill(every.fleet.of("prefill")[0])
        await settle()
        host = await every.add("prefill")
        await anyio.sleep(1)
        assert await texts_of(every.fleet.graph) == expected
        assert host.engine.requests == REQUESTS
        await settle()
        every.fleet.assert_idle()


@pytest.mark.parametrize("after_s", [0.005, 0.018, 0.025])
async def test_connections_that_fall_silent_cost_no_answer(after_s: float) -> None:
    async with open_processes(2, 2) as every, anyio.create_task_group() as tasks:
        expected = await texts_of(every.fleet.graph)

        async def freeze() -> None:
            await anyio.sleep(after_s)
            every.world.network.freeze()

        tasks.start_soon(freeze)
        assert await texts_of(every.fleet.graph) == expected
        await settle()
        every.fleet.assert_idle()


@pytest.mark.parametrize("after_s", [0.001, 0.01, 0.018, 0.026])
async def test_a_cut_between_the_two_workers_alone_costs_no_answer(after_s: float) -> None:
    """Neither worker is at fault, and the front end still reaches both."""
    async with open_processes(1, 2) as every, anyio.create_task_group() as tasks:
        expected = await texts_of(every.fleet.graph)

        async def cut() -> None:
            await anyio.sleep(after_s)
            for decode in every.fleet.of("decode"):
                every.cut(every.fleet.of("prefill")[0], decode)

        tasks.start_soon(cut)
        assert await texts_of(every.fleet.graph) == expected
        await settle()
        every.fleet.assert_idle()


@pytest.mark.parametrize("half", ["prefill", "decode"])
@pytest.mark.parametrize("after_s", [0.014, 0.022])
async def test_a_cut_between_the_front_end_and_one_worker_costs_no_answer(half: Half, after_s: float) -> None:
    async with open_processes(2, 2) as every, anyio.create_task_group() as tasks:
        expected = await texts_of(every.fleet.graph)

        async def cut() -> None:
            await anyio.sleep(after_s)
            every.cut(every.fleet.of(half)[0])

        tasks.start_soon(cut)
        assert await texts_of(every.fleet.graph) == expected
        await settle()
        every.fleet.assert_idle()


@frozen
class Trouble:
    """What happens some time after the one before."""

    after_s: float
    kind: str
    half: Half

    async def strike(self, every: Processes) -> None:
        """A kill leaves one worker of the half."""
        network = every.world.network
        match self.kind:
            case "kill":
                if len(hosts := every.fleet.of(self.half)) > 1:
                    await every.kill(hosts[0])
            case "add":
                await every.add(self.half)
            case "cut":
                network.cut()
            case _:
                network.freeze()


HALVES = st.sampled_from(["prefill", "decode"])
TROUBLES = st.builds(Trouble, st.floats(0.0, 0.15), st.sampled_from(["kill", "add", "cut", "freeze"]), HALVES)


async def _troubled(troubles: list[Trouble], delay_s: float, router: str, expected: list[str]) -> None:
    answers: list[str | PenstockError] = [""] * REQUESTS

    async def ask(number: int) -> None:
        try:
            answers[number] = await text_of(every.fleet.graph, number)
        except PenstockError as error:
            answers[number] = error

    async with open_processes(2, 2, router=router) as every:
        every.world.network.delay_s = delay_s
        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                for number in range(REQUESTS):
                    tasks.start_soon(ask, number)
                for trouble in troubles:
                    await anyio.sleep(trouble.after_s)
                    await trouble.strike(every)
        await settle()
        await settle()
        every.fleet.assert_idle()
    may_fail = any(trouble.kind in ("cut", "freeze") for trouble in troubles)  # then all workers may cool down at once
    for answer, right in zip(answers, expected, strict=True):
        assert answer == right or (may_fail and isinstance(answer, PenstockError))


@settings(max_examples=settings().max_examples // 8)
@given(st.lists(TROUBLES, max_size=3), st.sampled_from([0.0, 0.0005, 0.005]), st.sampled_from(["round-robin", "kv"]))
def test_no_trouble_makes_an_answer_wrong_or_leaves_anything_behind(
    troubles: list[Trouble], delay_s: float, router: str
) -> None:
    async def main() -> None:
        async with open_fleet(1, 1, router="round-robin") as fleet:
            expected = await texts_of(fleet.graph)
        await _troubled(troubles, delay_s, router, expected)

    run_in_virtual_time(main)
