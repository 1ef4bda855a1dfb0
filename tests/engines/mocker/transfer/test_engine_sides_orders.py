"""Handoffs whose halves begin, end, fail and begin again in any order: in the end no worker holds a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import anyio
import pytest
from anyio.abc import TaskGroup
from attrs import define, evolve, field
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines import GenerateContext
from engines.mocker import MockEngine, MockEngineArgs, TransferExchange
from engines.mocker.transfer import TransferOrder
from pipeline import Context, EngineShutdown, InvalidArgument
from pipeline.errors import BackendConnectionTimeout, BackendDisconnected
from pipeline.protocols import BootstrapInfo, FinishReason, LLMEngineOutput, PreprocessedRequest, StopConditions

Half = Literal["prefill", "decode"]
HALVES: tuple[Half, ...] = get_args(Half)
ARGS = MockEngineArgs(num_gpu_blocks=16, block_size=4, kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=1.0)
PROMPT = list(range(10))
"""A request that takes 17 ms to compute and 10 ms to transfer."""
MAX_TOKENS = 4


@define(eq=False)
class Attempt:
    """One half of the request, read by a task of its own."""

    context: Context[PreprocessedRequest]
    chunks: list[LLMEngineOutput] = field(factory=list)
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)
    error: Exception | None = None
    is_over: bool = False

    @property
    def is_undisturbed(self) -> bool:
        return not (self.is_over or self.context.is_stopped)

    async def read(self, engine: MockEngine) -> None:
        try:
            with self.scope:
                async for chunk in engine.generate(self.context.payload, GenerateContext(self.context)):
                    self.chunks.append(chunk)
        except Exception as error:
            self.error = error
        finally:
            self.is_over = True


@define(eq=False)
class Deployment:
    """A prefill and a decode worker, either of which may be replaced, and one request that is retried."""

    tasks: TaskGroup
    exchange: TransferExchange
    running: dict[Half, MockEngine] = field(factory=dict)
    loops: dict[Half, anyio.CancelScope] = field(factory=dict)
    engines: list[MockEngine] = field(factory=list)
    attempts: dict[Half, list[Attempt]] = field(factory=lambda: {half: [] for half in HALVES})
    room: int = 0

    async def start(self, half: Half) -> None:
        engine, scope = MockEngine(evolve(ARGS, worker_type=half), exchange=self.exchange), anyio.CancelScope()
        await engine.start(len(self.engines))

        async def run() -> None:
            with scope:
                await engine.background()

        self.tasks.start_soon(run)
        self.running[half], self.loops[half] = engine, scope
        self.engines.append(engine)

    async def begin(self, half: Half, max_tokens: int = MAX_TOKENS) -> None:
        info = BootstrapInfo("host", 1, self.room)
        stop = StopConditions(max_tokens=max_tokens)
        attempt = Attempt(
            Context(PreprocessedRequest(PROMPT, stop_conditions=stop, bootstrap_info=info), id="the request")
        )
        self.attempts[half].append(attempt)
        self.tasks.start_soon(self._read, half, attempt, self.running[half])

    async def _read(self, half: Half, attempt: Attempt, engine: MockEngine) -> None:
        has_rival = any(each.is_undisturbed for each in self.attempts[half] if each is not attempt)
        await attempt.read(engine)
        if isinstance(attempt.error, InvalidArgument):
            assert has_rival, "a retry is not kept out by what its earlier attempt left"

    async def retry(self, half: Half) -> None:
        """Begin the next attempt, in another room, with this half."""
        self.room += 1
        await self.begin(half)

    async def no_tokens(self, half: Half) -> None:
        await self.begin(half, max_tokens=0)

    async def stop(self, half: Half) -> None:
        self._last(half, lambda attempt: attempt.context.control.stop())

    async def kill(self, half: Half) -> None:
        self._last(half, lambda attempt: attempt.context.control.kill())

    async def drop(self, half: Half) -> None:
        self._last(half, lambda attempt: attempt.scope.cancel())

    async def restart(self, half: Half) -> None:
        """Close the engine in order and put a new one in its place."""
        await self.running[half].cleanup()
        self.loops[half].cancel()
        await self.start(half)

    async def crash(self, half: Half) -> None:
        """End the loop first; a half that still reads is cut."""
        self.loops[half].cancel()
        for attempt in self.attempts[half]:
            attempt.scope.cancel()
        await self.start(half)

    def _last(self, half: Half, end: Callable[[Attempt], object]) -> None:
        for attempt in self.attempts[half][-1:]:
            end(attempt)

    def check_empty(self) -> None:
        for engine in self.engines:
            for rank in engine.ranks:
                rank.scheduler.pool.check()
                assert rank.scheduler.pool.active == rank.live == 0
                assert rank.scheduler.is_idle
        assert self.exchange.sessions == self.exchange.waiting == 0

    async def check_serves(self) -> None:
        """Run a last attempt, which succeeds after any history."""
        self.room += 1
        for half in HALVES:
            await self.begin(half)
        await anyio.sleep(1.0)
        sent, received = (self.attempts[half][-1] for half in HALVES)
        assert (sent.error, received.error) == (None, None)
        assert [len(chunk.token_ids) for chunk in sent.chunks] == [1, 0]
        assert [len(chunk.token_ids) for chunk in received.chunks] == [1] * MAX_TOKENS + [0]

    def check_endings(self) -> None:
        allowed = (BackendDisconnected, BackendConnectionTimeout, EngineShutdown, InvalidArgument)
        for attempt in (each for half in HALVES for each in self.attempts[half]):
            assert attempt.is_over
            assert attempt.error is None or isinstance(attempt.error, allowed)
            reasons = [chunk.finish_reason for chunk in attempt.chunks if chunk.finish_reason is not None]
            assert len(reasons) <= 1
            assert FinishReason.LENGTH not in reasons or attempt.error is None


ACTS = ("begin", "begin", "begin", "retry", "no_tokens", "stop", "kill", "drop", "restart", "crash")
WAITS_MS = (0, 0, 1, 10, 20, 28, 40, 31_000)
Step = tuple[str, Half, int]
steps = st.lists(st.tuples(st.sampled_from(ACTS), st.sampled_from(HALVES), st.sampled_from(WAITS_MS)), max_size=10)
"""An action, its half, and the milliseconds until the next action; 0: the same turn of the loop."""


async def play(order: TransferOrder, story: list[Any]) -> Deployment:
    tasks = anyio.create_task_group()
    deployment = Deployment(tasks, TransferExchange(order))
    async with tasks:
        for half in HALVES:
            await deployment.start(half)
        for act, half, wait_ms in story:
            await getattr(deployment, act)(half)
            if wait_ms:
                await anyio.sleep(wait_ms / 1000)
        await anyio.sleep(62.0)  # a half whose other half never comes gives up by itself
        deployment.check_endings()
        deployment.check_empty()
        await deployment.check_serves()
        deployment.check_empty()
        for engine in deployment.engines:
            await engine.cleanup()
        tasks.cancel_scope.cancel()
    return deployment


@settings(max_examples=3 * settings().max_examples // 5)
@given(st.sampled_from(get_args(TransferOrder)), steps)
@example("source_first", [("begin", "prefill", 10), ("kill", "prefill", 0), ("begin", "prefill", 0)])
@example(
    "source_first", [("kill", "decode", 0), ("begin", "decode", 0), ("kill", "decode", 0), ("begin", "prefill", 1)]
)
async def test_no_order_of_begins_and_ends_leaves_blocks_held(order: TransferOrder, story: list[Step]) -> None:
    await play(order, story)


@pytest.mark.parametrize("order", get_args(TransferOrder))
@pytest.mark.parametrize("ending", ["stop", "kill"])
@pytest.mark.parametrize("room", ["same", "another"])
@pytest.mark.parametrize("after_ms", [1, 10, 20])
async def test_a_request_that_is_tried_again_at_once_is_not_kept_out_by_its_earlier_attempt(
    order: TransferOrder, ending: str, room: str, after_ms: int
) -> None:
    """The halves end and come again before the workers had a turn to release the old ones."""
    again = "begin" if room == "same" else "retry"
    story = [
        ("begin", "prefill", 0),
        ("begin", "decode", after_ms),
        (ending, "decode", 0),
        (ending, "prefill", 0),
        (again, "decode", 0),
        ("begin", "prefill", 0),
    ]
    deployment = await play(order, story)
    for half in HALVES:
        _, retried, _ = deployment.attempts[half]
        assert retried.error is None
        assert retried.chunks[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("order", get_args(TransferOrder))
async def test_a_decode_half_without_output_still_takes_the_blocks(order: TransferOrder) -> None:
    deployment = await play(order, [("begin", "prefill", 1), ("no_tokens", "decode", 100)])
    sent, received = (deployment.attempts[half][0] for half in HALVES)
    assert (sent.error, received.error) == (None, None)
    assert [chunk.token_ids for chunk in received.chunks] == [[]]
