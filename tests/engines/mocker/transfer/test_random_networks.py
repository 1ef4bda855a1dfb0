"""Transfers over a network that is slow, cut or silent, with halves that leave at any moment: all blocks come free."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.mocker.transfer import DestinationTurn, TransferExchange, TransferKey
from engines.mocker.transfer.across import DestinationCall, TransferDoor
from pipeline import Context, PenstockError
from pipeline.testing import run_in_virtual_time

from .process_worlds import ARGS, Half, Processes, networked
from .worlds import ScriptedSide

LONGEST_S = 400.0
"""Longer than a session may take."""
ROOMS = 3


@frozen
class Fault:
    """What happens at some moment."""

    at_ms: float
    kind: str
    room: int
    half: str

    def strike(self, both: Processes, contexts: dict[tuple[int, str], Context[Any]]) -> None:
        network = both.network
        assert network is not None
        match self.kind:
            case "cut":
                network.cut()
            case "freeze":
                network.freeze()
            case "unserve":
                both.prefill._peers.cut()
            case verb:
                getattr(contexts[self.room, self.half], verb)()


FAULTS = st.builds(
    Fault,
    st.floats(0.0, 120.0),
    st.sampled_from(["stop", "kill", "cut", "freeze", "unserve"]),
    st.integers(0, ROOMS - 1),
    st.sampled_from(["prefill", "decode"]),
)


async def _held_out(delay_ms: float, faults: list[Fault], engine_type: Any, num_gpu_blocks: int) -> None:
    args = evolve(ARGS, engine_type=engine_type, block_size=4 if engine_type == "vllm" else 1)
    async with networked(evolve(args, num_gpu_blocks=num_gpu_blocks * 4 // args.block_size)) as both:
        assert both.network is not None
        both.network.delay_s = delay_ms / 1000
        contexts = {(room, half): both.half_of(room) for room in range(ROOMS) for half in ("prefill", "decode")}
        halves = {key: Half() for key in contexts}
        with anyio.fail_after(LONGEST_S):
            async with anyio.create_task_group() as tasks:
                for (room, half), context in contexts.items():
                    tasks.start_soon(both.read, half, context, halves[room, half])
                passed_ms = 0.0
                for fault in sorted(faults, key=lambda fault: fault.at_ms):
                    await anyio.sleep((fault.at_ms - passed_ms) / 1000)
                    passed_ms = fault.at_ms
                    fault.strike(both, contexts)
        await anyio.sleep(60)
        both.check_empty()
        for (_, half), read in halves.items():
            assert read.error is None or isinstance(read.error, PenstockError)
            if not faults:
                assert read.error is None
                assert len(read.tokens) == (6 if half == "decode" else 1)


@settings(max_examples=settings().max_examples // 4)
@given(
    st.floats(0.0, 30.0),
    st.lists(FAULTS, max_size=4),
    st.sampled_from(["vllm", "sglang"]),
    st.integers(4, 16),
)
def test_every_half_ends_and_every_block_comes_free(
    delay_ms: float, faults: list[Fault], engine_type: str, num_gpu_blocks: int
) -> None:
    run_in_virtual_time(lambda: _held_out(delay_ms, faults, engine_type, num_gpu_blocks))


CALLS = st.tuples(
    st.sampled_from(["join", "room", "close"]),
    st.integers(0, 2),
    st.sampled_from([0, 3, 2**53, -1]),
    st.sampled_from(["here", "elsewhere"]),
)


async def _attended(exchange: TransferExchange, key: TransferKey, side: ScriptedSide) -> None:
    """Take the source's part until it ends."""
    with suppress(PenstockError):
        async with exchange.source(key, side) as endpoint:
            await endpoint.done()


async def _read(door: TransferDoor, context: Context[DestinationCall]) -> None:
    with suppress(PenstockError):
        async with await door.generate(context) as stream:
            assert all(isinstance(turn, DestinationTurn) for turn in await stream.collect())


async def _called(calls: list[tuple[str, int, int, str]], order: Any) -> None:
    """Make the calls of a wrong or malicious peer, beside a source that waits for its destination."""
    exchange, side = TransferExchange(order), ScriptedSide()
    door = TransferDoor(exchange)
    door.address = "here"
    keys = {place: TransferKey(place, 1, 2, "request") for place in ("here", "elsewhere")}
    opened = list[Context[DestinationCall]]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_attended, exchange, keys["here"], side)
        for kind, join, tokens, place in [*calls, ("close", 0, 0, "here")]:
            await anyio.sleep(0.1)
            if kind == "close":
                for context in opened:
                    context.kill()
            else:
                call = DestinationCall(keys[place], f"join-{join}", None if kind == "join" else tokens)
                opened.append(Context(call))
                tasks.start_soon(_read, door, opened[-1])
    assert side.held == 0
    assert (exchange.sessions, exchange.waiting, len(door._waiting)) == (0, 0, 0)


@given(st.lists(CALLS, max_size=8), st.sampled_from(["source_first", "destination_first"]))
def test_calls_in_any_order_leave_nothing_behind(calls: list[tuple[str, int, int, str]], order: str) -> None:
    run_in_virtual_time(lambda: _called(calls, order))
