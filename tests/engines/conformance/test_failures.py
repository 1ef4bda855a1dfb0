"""Each failure of the conformance kit in a life without stop, kill and close has engines with just this failure."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import anyio
import numpy
import pytest

from engines import ConformanceFailure, EngineConfig, LLMEngine, MetricsBindings, PushSource, run_conformance
from engines.conformance import MEANINGS
from pipeline import Disconnected, InvalidArgument
from pipeline.protocols import CompletionUsage, LLMEngineOutput

pytestmark = pytest.mark.anyio

TOKEN_S = 0.01
Tokens = AsyncGenerator[LLMEngineOutput, None]

BROKEN: list[tuple[str, Callable[[], LLMEngine]]] = []
"""Name of the failure -> an engine that has it."""
ELSEWHERE = {
    *("CancellationNotObserved", "CancellationIgnored", "StopInWaitIgnored", "StopInWaitUnanswered"),
    *("AbortFailed", "AbortNotHeard", "KillNotHeard", "CloseFailed", "NotServedAfterwards"),
    *("TokenRepeatedAfterStop", "TokensLeftOver", "StreamsShareState", "LimitUsageMismatch"),
    *("PromptTokensMismatch", "RequestChanged", "MaxTokensIgnored", "LimitNotNamed", "MinTokensIgnored"),
    *("IgnoreEosIgnored", "ChoicesIgnored", "LockHeldOverYield", "CancelScopeHeldOverYield"),
    *("TaskGroupHeldOverYield", "HeldUpByPausedReader", "LoopBlocked", "TasksLeftByCleanup"),
    *("ThreadsLeftByCleanup", "TasksLeftByStream", "ThreadsLeftByStream", "WorkLeftByStream"),
    *("ChunkChanged", "CancellationSwallowed"),
}
"""Those of the other files."""
HOSTED = {f"E{rule}" for rule in range(1, 14)}
"""Most of these the adapter holds, whatever an engine does."""
ASKED_FOR = {"BadRequestServed"}
"""Checked only where a test names a bad request."""


def breaks(name: str, *, hears_kill: bool = False) -> Callable[[Any], Any]:
    """Notes a class, or a function that takes the place of `generate`, as broken in this one way."""

    def note(broken: Any) -> Any:
        made = broken
        if not isinstance(broken, type):
            made = type(broken.__name__, (Good,), {"generate": staticmethod(broken), "hears_kill": hears_kill})
        BROKEN.append((name, made))
        return broken

    return note


def refuse_more(request: Any, tokens: int) -> None:
    """What an engine does that has so many tokens to say, and one choice of them."""
    stop = request.stop_conditions
    least = stop.max_tokens if stop.ignore_eos else stop.min_tokens
    if (least or 0) > tokens or (request.sampling_options.n or 1) > 1:
        raise InvalidArgument("there is nothing more to say")


async def sevens(request: Any, context: Any) -> Tokens:
    """Says 7 until there are `max_tokens`, four without."""
    refuse_more(request, 10_000)
    count = request.stop_conditions.max_tokens or 4
    for said in range(count):
        await anyio.sleep(TOKEN_S)
        if context.is_stopped:
            yield LLMEngineOutput.cancelled().with_usage(CompletionUsage.of(len(request.token_ids), said))
            return
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.length().with_usage(CompletionUsage.of(len(request.token_ids), count))


class Good(LLMEngine):
    """Every engine below changes it in one place."""

    is_started = False

    async def start(self, worker_id: int) -> EngineConfig:
        self.is_started = True
        return EngineConfig(model="sevens")

    def generate(self, request: Any, context: Any) -> Any:
        return sevens(request, context)

    async def cleanup(self) -> None:
        """There is nothing to release."""


# -- around the requests


@breaks("StartFailed")
class StartRaises(Good):
    async def start(self, worker_id: int) -> EngineConfig:
        raise RuntimeError("no such model")


@breaks("StartFailed")
class StartHangs(Good):
    async def start(self, worker_id: int) -> Any:
        await anyio.sleep_forever()


@breaks("StartFailed")
class StartForgetsItsConfig(Good):
    async def start(self, worker_id: int) -> Any:
        """Gives None."""


@breaks("EmptyModelInConfig")
class Nameless(Good):
    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="")


@breaks("BackgroundFailed")
class BackgroundRaises(Good):
    async def background(self) -> None:
        await anyio.sleep(TOKEN_S)
        raise RuntimeError("lost the scheduler")


@breaks("KvEventSourcesFailed")
class SourcesRaise(Good):
    async def kv_event_sources(self) -> Any:
        raise RuntimeError("no sources")


@breaks("KvEventSourcesFailed")
class SourcesHang(Good):
    async def kv_event_sources(self) -> Any:
        await anyio.sleep_forever()


@breaks("KvEventSourcesFailed")
class SourcesNameARankTwice(Good):
    async def kv_event_sources(self) -> Any:
        return [PushSource(print), PushSource(print)]


@breaks("KvEventSourcesNotIdempotent")
class SourcesChangeTheirOrder(Good):
    """BE-103."""

    ranks = (1, 0)

    async def kv_event_sources(self) -> Any:
        self.ranks = self.ranks[::-1]
        return [PushSource(print, rank) for rank in self.ranks]


@breaks("SetupMetricsFailed")
class MetricsRaise(Good):
    async def setup_metrics(self, context: Any) -> Any:
        raise RuntimeError("no metrics")


@breaks("SetupMetricsFailed")
class MetricsHang(Good):
    async def setup_metrics(self, context: Any) -> Any:
        await anyio.sleep_forever()


@breaks("SetupMetricsFailed")
class MetricsNameARankTwice(Good):
    async def setup_metrics(self, context: Any) -> Any:
        return MetricsBindings([3, 3])


@breaks("ComponentMetricsNotIdempotent")
class MetricsGrow(Good):
    ranks = 0

    async def setup_metrics(self, context: Any) -> Any:
        self.ranks += 1
        return MetricsBindings(range(self.ranks))


@breaks("CleanupFailed")
class CleanupRaises(Good):
    async def cleanup(self) -> None:
        if self.is_started:
            raise RuntimeError("still in use")


@breaks("CleanupFailed")
class CleanupHangs(Good):
    async def cleanup(self) -> None:
        if self.is_started:
            await anyio.sleep_forever()


@breaks("SecondCleanupFailed")
class CleansUpOnce(Good):
    is_clean = False

    async def cleanup(self) -> None:
        if self.is_clean:
            raise RuntimeError("freed twice")
        self.is_clean = True


@breaks("CleanupWithoutStartFailed")
class CleansUpOnlyWhatStarted(Good):
    async def cleanup(self) -> None:
        if not self.is_started:
            raise AttributeError("no model")


@breaks("DrainFailed")
class DrainRaises(Good):
    async def drain(self) -> None:
        raise RuntimeError("still in use")


@breaks("DrainFailed")
class DrainHangs(Good):
    async def drain(self) -> None:
        await anyio.sleep_forever()


# -- one request


@breaks("GenerateFailed")
async def generate_raises(request: Any, context: Any) -> Any:
    raise InvalidArgument("not me")


@breaks("GenerateFailed")
def generate_raises_at_once(request: Any, context: Any) -> Any:
    raise TypeError("not me")


@breaks("GenerateFailed")
async def generate_hangs(request: Any, context: Any) -> Any:
    await anyio.sleep_forever()


@breaks("GenerateFailed")
async def generate_gives_a_list(request: Any, context: Any) -> Any:
    return [LLMEngineOutput.stop()]


@breaks("GenerateFailed")
async def first_chunk_never_comes(request: Any, context: Any) -> Tokens:
    await context.stopped()
    yield LLMEngineOutput.cancelled()


@breaks("GenerateFailed")
async def endless(request: Any, context: Any) -> Tokens:
    """Never waits, so that no clock runs meanwhile."""
    while not context.is_stopped:
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.cancelled()


@breaks("NoChunksYielded")
async def silent(request: Any, context: Any) -> Tokens:
    if context is None:
        yield LLMEngineOutput.stop()


@breaks("StreamYieldedError")
async def stream_raises(request: Any, context: Any) -> Tokens:
    yield LLMEngineOutput.token(1)
    raise Disconnected("lost the device")


@breaks("StreamYieldedError")
async def raises_after_its_terminal_chunk(request: Any, context: Any) -> Tokens:
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            yield chunk
    raise KeyError("request")


@breaks("NotAChunk")
async def yields_numbers(request: Any, context: Any) -> AsyncGenerator[int, None]:
    yield 7


@breaks("StreamYieldedError")
async def only_fails(request: Any, context: Any) -> Tokens:
    """By the word of its last chunk."""
    yield LLMEngineOutput.cancelled() if context.is_stopped else LLMEngineOutput.error("no memory")


@breaks("StreamYieldedError")
async def only_gives_up(request: Any, context: Any) -> Tokens:
    yield LLMEngineOutput.cancelled()


@breaks("NotAChunk")
async def says_no_list(request: Any, context: Any) -> Tokens:
    yield LLMEngineOutput(None)  # type: ignore[arg-type]


@breaks("NotAChunk")
async def says_numbers_of_numpy(request: Any, context: Any) -> Tokens:
    """As engines have them at hand: nothing of it crosses the wire."""
    yield LLMEngineOutput([numpy.int64(7)])  # type: ignore[list-item]


@breaks("NotAChunk")
async def finishes_with_a_text(request: Any, context: Any) -> Tokens:
    yield LLMEngineOutput([7], finish_reason="stop")  # type: ignore[arg-type]


@breaks("NotAChunk")
async def says_another_choice(request: Any, context: Any) -> Tokens:
    yield LLMEngineOutput([7], index=1)


@breaks("ChunkAfterTerminal")
async def goes_on(request: Any, context: Any) -> Tokens:
    """BE-98."""
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            yield chunk
    if not context.is_stopped:
        yield LLMEngineOutput.token(8)


@breaks("ChunkAfterTerminal")
async def ends_twice(request: Any, context: Any) -> Tokens:
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            yield chunk
    yield LLMEngineOutput.cancelled()


@breaks("ChunkAfterTerminal")
async def ends_another_choice_too(request: Any, context: Any) -> Tokens:
    yield LLMEngineOutput.cancelled() if context.is_stopped else LLMEngineOutput.stop()
    if not context.is_stopped:
        yield LLMEngineOutput([5], index=1)


@breaks("NoTerminalChunk")
async def just_ends(request: Any, context: Any) -> Tokens:
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            if chunk.finish_reason is None or context.is_stopped:
                yield chunk


@breaks("CompletionTokensMismatch")
async def miscounts(request: Any, context: Any) -> Tokens:
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            yield chunk if chunk.finish_reason is None else chunk.with_usage(CompletionUsage.of(3, 5))


@breaks("StopUsageMismatch")
async def miscounts_when_stopped(request: Any, context: Any) -> Tokens:
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            yield chunk.with_usage(CompletionUsage.of(3, 99)) if context.is_stopped else chunk


# -- several requests


@breaks("ConcurrentGenerateFailed")
class EmptyAmongOthers(Good):
    running = 0

    async def generate(self, request: Any, context: Any) -> Any:
        self.running += 1
        await anyio.sleep(TOKEN_S)
        is_alone, self.running = self.running == 1, 0
        return sevens(request, context) if is_alone else silent(request, context)


@breaks("ConcurrentGenerateFailed")
class SharesItsCount(Good):
    said = 0

    async def generate(self, request: Any, context: Any) -> Any:
        self.said = 0
        return self._counted(sevens(request, context))

    async def _counted(self, source: Tokens) -> Tokens:
        async with aclosing(source) as chunks:
            async for chunk in chunks:
                self.said += len(chunk.token_ids)
                yield chunk if chunk.finish_reason is None else chunk.with_usage(CompletionUsage.of(3, self.said))


@breaks("ConcurrentGenerateFailed")
class RefusesASecond(Good):
    is_running = False

    async def generate(self, request: Any, context: Any) -> Any:
        if self.is_running:
            raise RuntimeError("busy")
        return self._alone(sevens(request, context))

    async def _alone(self, source: Tokens) -> Tokens:
        self.is_running = True
        try:
            async with aclosing(source) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.is_running = False


@breaks("ConcurrentGenerateFailed")
class StopsAllForOne(Good):
    """Among undisturbed ones nothing shows."""

    running = stopped = 0

    async def generate(self, request: Any, context: Any) -> Any:
        self.running += 1
        try:
            async with aclosing(sevens(request, context)) as chunks:
                async for chunk in chunks:
                    self.stopped |= context.is_stopped
                    if self.stopped:
                        yield LLMEngineOutput.cancelled()
                        return
                    yield chunk
        finally:
            self.running -= 1
            if not self.running:
                self.stopped = 0


@pytest.mark.parametrize(("name", "factory"), BROKEN, ids=lambda part: getattr(part, "__name__", None))
async def test_a_broken_engine_fails_its_check_and_no_other(
    name: str, factory: Callable[[], LLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.conformance.answer.MOST_CHUNKS", 12_000)  # still above the long request
    with pytest.raises(ExceptionGroup) as caught:
        await run_conformance(factory)
    (failure,) = caught.value.exceptions
    assert isinstance(failure, ConformanceFailure)
    assert failure.name == name
    assert str(failure).startswith(f"{name}: ")


def test_every_other_failure_has_an_engine_that_fails_it() -> None:
    assert {name for name, _ in BROKEN} == set(MEANINGS) - ELSEWHERE - ASKED_FOR - HOSTED
