"""Leases that a prefill worker gives and a decode worker of another process takes. In virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from attrs import define, evolve

from engines import DisaggregationMode, LLMEngine, Peers, ShutdownTimes, Worker, WorkerConfig
from engines.upstream import kv_connector
from engines.upstream.lease_calls import LeaseRest, limit_lease
from engines.upstream.leases import Leases
from pipeline import Annotated, AsyncEngine, Control, WorkerOverloaded, function_engine
from pipeline.errors import TransferFailed
from pipeline.network import Runtime
from pipeline.protocols import LLMEngineOutput, PrefillResult
from tests.engines.upstream.handover_worlds import Blocks, FakeHalf, answer_of, bodies, decode_of, prefill_of
from tests.engines.upstream.worlds import all_running, continued, prompt, tokens_of
from tests.pipeline.network.worlds import deployment

LEASE_S = 30.0
QUICK_END = ShutdownTimes(grace_s=0.0, timeout_s=5.0)


@define
class Processes:
    """A prefill and a decode worker, as the process of a front end calls them."""

    prefill: AsyncEngine[Any, Annotated[LLMEngineOutput]]
    decode: AsyncEngine[Any, Annotated[LLMEngineOutput]]
    prefill_worker: Worker
    blocks: Blocks
    decode_server: FakeHalf

    async def offered(self) -> Any:
        """Return what a prompt's prefill hands over."""
        (chunk,) = await answer_of(self.prefill, prompt(5))
        return chunk.disaggregated_params

    async def answered(self, offered: Any) -> list[int]:
        """Return the answer to the prompt."""
        return tokens_of(await answer_of(self.decode, evolve(prompt(5), prefill_result=PrefillResult(offered))))


def hosted(runtime: Runtime, engine: LLMEngine, mode: DisaggregationMode) -> Worker:
    config = WorkerConfig(namespace="ns", component=mode.value, disaggregation_mode=mode)
    return Worker(engine, config, runtime=runtime, times=QUICK_END, environment={})


@asynccontextmanager
async def processes(name: str = "nixl") -> AsyncIterator[Processes]:
    blocks = Blocks(LEASE_S)
    first, then = FakeHalf(blocks=blocks), FakeHalf(blocks=blocks)
    async with all_running(first, then), deployment() as world, world.runtime() as one, world.runtime() as other:
        prefill = hosted(one, prefill_of(first, 1, kv_connector(name, LEASE_S)), DisaggregationMode.PREFILL)
        decode = hosted(other, decode_of(then, 2, kv_connector(name, LEASE_S)), DisaggregationMode.DECODE)
        async with prefill, decode, world.runtime() as front:
            calls = [
                front.requests.engine(worker.served.instance, Annotated[LLMEngineOutput])
                for worker in (prefill, decode)
                if worker.served is not None
            ]
            yield Processes(calls[0], calls[1], prefill, blocks, then)


@pytest.mark.parametrize("after_s", [0.0, 12.0, 24.0])
async def test_blocks_are_fetched_as_long_as_they_are_there(after_s: float) -> None:
    async with processes() as both:
        offered = await both.offered()
        await anyio.sleep(after_s)
        assert await both.answered(offered) == continued([5, 6, 7], 5)
        assert both.blocks.count == 0


@pytest.mark.parametrize("after_s", [25.5, 40.0])
async def test_the_time_before_decode_counts_too(after_s: float) -> None:
    """Otherwise the answer would be wrong: the blocks hold something else by then."""
    async with processes() as both:
        offered = await both.offered()
        await anyio.sleep(after_s)
        with pytest.raises(WorkerOverloaded, match="too late"):
            await both.answered(offered)
        assert not bodies(both.decode_server)


@pytest.mark.parametrize("how", ["abort", "cut"])
async def test_a_lease_whose_prefill_worker_cannot_be_reached_is_not_relied_on(how: str) -> None:
    async with processes() as both:
        offered = await both.offered()
        getattr(both.prefill_worker._peers, how)()
        begun_s = anyio.current_time()
        with pytest.raises(TransferFailed, match="it is not known how long"):
            await both.answered(offered)
        assert anyio.current_time() - begun_s <= 2.01


class SilentPeers(Peers):
    """Peers none of which ever answers."""

    async def serve(self, engine: AsyncEngine[Any, Any]) -> str:
        raise NotImplementedError

    async def engine(self, address: str, item_type: type[Any]) -> AsyncEngine[Any, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    def is_address(self, text: str) -> bool:
        return True


@pytest.mark.parametrize("verb", ["stop", "kill", None])
async def test_the_wait_for_a_silent_prefill_worker_ends_with_the_request_or_soon(verb: str | None) -> None:
    leases, written, control = Leases(LEASE_S), Leases(LEASE_S).begin("one", "ns/prefill/peers/1/0"), Control()
    begun_s = anyio.current_time()
    async with anyio.create_task_group() as tasks:

        async def end() -> None:
            await anyio.sleep(0.5)
            getattr(control, verb)() if verb else None

        tasks.start_soon(end)
        if verb:
            await limit_lease(leases.find(written), written, leases, SilentPeers(), control)
        else:
            with pytest.raises(TransferFailed):
                await limit_lease(leases.find(written), written, leases, SilentPeers(), control)
    assert anyio.current_time() - begun_s == pytest.approx(0.5 if verb else 2.0)


class OnePeer(SilentPeers):
    """Peers all of which are one engine."""

    def __init__(self, engine: AsyncEngine[Any, Any]) -> None:
        self.one = engine

    async def engine(self, address: str, item_type: type[Any]) -> AsyncEngine[Any, Any]:
        return self.one


class CountedControl(Control):
    waiting = 0

    def on_stop(self, callback: Callable[[], object]) -> Callable[[], None]:
        forget = super().on_stop(callback)
        self.waiting += 1

        def forget_once() -> None:
            self.waiting -= 1
            forget()

        return forget_once


@pytest.mark.parametrize(("answered_s", "left_s"), [(10.0, 10.0), (1000.0, LEASE_S)])
async def test_a_lease_never_becomes_longer_than_it_was(answered_s: float, left_s: float) -> None:
    async def rest(_: Any) -> AsyncIterator[LeaseRest]:
        yield LeaseRest(answered_s)

    leases, written, control = Leases(LEASE_S), Leases(LEASE_S).begin("one", "ns/prefill/peers/1/0"), CountedControl()
    lease = leases.find(written)
    before_s = lease.ends_s
    await limit_lease(lease, written, leases, OnePeer(function_engine(rest)), control)
    assert lease.ends_s == (before_s if left_s == LEASE_S else pytest.approx(anyio.current_time() + left_s))
    assert control.waiting == 0


async def test_the_leases_of_this_process_are_known_without_a_call() -> None:
    leases = Leases(LEASE_S)
    written = leases.begin("one", "ns/prefill/peers/1/0")
    begun_s = anyio.current_time()
    await limit_lease(leases.find(written), written, leases, SilentPeers(), Control())
    assert anyio.current_time() == begun_s


async def test_an_offer_of_workers_without_peers_is_taken_as_before() -> None:
    async with processes() as both:
        offered = await both.offered()
        del offered["lease"]["address"]
        assert await both.answered(offered) == continued([5, 6, 7], 5)
