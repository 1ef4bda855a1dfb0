"""The engine contract's checks: they pass a good engine, and each is proved by an engine that breaks its rule."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline import (
    Annotated,
    AsyncEngine,
    Context,
    ContractViolation,
    Disconnected,
    GraphError,
    InvalidArgument,
    ReleaseOnce,
    ResponseStream,
    Unknown,
    function_engine,
    until_killed,
)
from pipeline.engine import FunctionEngine
from pipeline.testing import ENGINE_RULES, Fail, ScriptedEngine, Stall, Wait, check_engine

COUNT = 40
BAD = -1


class Good(AsyncEngine[int, int]):
    """Counts up to the payload; the subject that every broken one below changes in one place."""

    def __init__(self) -> None:
        self.open = 0

    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        if request.payload == BAD:
            raise InvalidArgument("negative", field="payload")
        self.open += 1
        release = ReleaseOnce(self._closed)
        return ResponseStream(self.items(request, release), request, release)

    def _closed(self) -> None:
        self.open -= 1

    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        try:
            for i in range(request.payload):
                if request.is_stopped:
                    return
                yield i
        finally:
            release.release()


class AnotherContext(Good):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        stream = await super().generate(request)
        stream.context = Context(None)
        return stream


class ForeignError(Good):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        if request.payload == BAD:
            raise KeyError("negative")
        return await super().generate(request)


class IgnoresStop(Good):
    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        try:
            for i in range(request.payload):
                if request.is_killed:
                    return
                yield i
        finally:
            release.release()


class RaisesOnStop(Good):
    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        async for item in super().items(request, release):
            yield item
        if request.is_stopped and not request.is_killed:
            raise Disconnected("stopped")


class DeliversAfterKill(Good):
    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        async for item in super().items(request, release):
            yield item
        if request.is_killed:
            yield -1


class NeverWakesForKill(Good):
    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        try:
            for i in range(request.payload):
                if request.is_stopped:
                    return
                await anyio.sleep(100)
                yield i
        finally:
            release.release()


class ReleasesOnlyWhenRead(Good):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        if request.payload == BAD:
            raise InvalidArgument("negative")
        self.open += 1
        return ResponseStream(self.items(request, ReleaseOnce(self._closed)), request)


class ReleasesOnlyOnClose(Good):
    """Holds its generator elsewhere, so that a dropped stream is not finalised."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        stream = await super().generate(request)
        self.kept.append(stream)
        return stream


class SwapsItems(Good):
    calls = 0

    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        self.calls += 1
        first = None
        async for item in super().items(request, release):
            if self.calls % 2 == 0 and item == 4:
                first = item
                continue
            yield item
            if first is not None:
                yield first
                first = None


class TalksAfterAnError(Good):
    async def generate(self, request: Context[int]) -> ResponseStream[Any]:
        if request.payload == BAD:
            return ResponseStream.of([Annotated.from_error("bad"), Annotated.from_data(1)], request)
        return await super().generate(request)


class LeavesATask(Good):
    def __init__(self, tasks: Any) -> None:
        super().__init__()
        self.tasks = tasks

    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        async for item in super().items(request, release):
            yield item
        self.tasks.start_soon(anyio.sleep_forever)


@asynccontextmanager
async def leaves_a_task() -> AsyncIterator[Good]:
    async with anyio.create_task_group() as tasks:
        yield LeavesATask(tasks)
        tasks.cancel_scope.cancel()


class SharesItsCounter(Good):
    def __init__(self) -> None:
        super().__init__()
        self.last = -1

    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        self.last = -1
        try:
            while self.last + 1 < request.payload and not request.is_stopped:
                self.last += 1
                yield self.last
        finally:
            release.release()


class IgnoresAnEarlierKill(Good):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        if request.is_killed:
            return ResponseStream(_ones(), request)
        return await super().generate(request)


async def _ones() -> AsyncGenerator[int, None]:
    yield 1


class KeepsACancelledRead(Good):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        stream = await super().generate(request)
        return ResponseStream(self.waiting(request, stream), request)

    async def waiting(self, request: Context[int], stream: ResponseStream[int]) -> AsyncGenerator[int, None]:
        self.kept = stream
        while not request.is_stopped:
            await checkpoint()
            try:
                yield await stream.__anext__()
            except (StopAsyncIteration, GeneratorExit):
                break
        await stream.aclose()


class SwallowsInEachRead(Good):
    """Goes on with the item after a cancellation: the task that reads never ends before the stream."""

    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        async with aclosing(super().items(request, release)) as items:
            async for item in items:
                with suppress(anyio.get_cancelled_exc_class()):
                    await anyio.sleep(1)
                yield item


class SkipsWhatWasCancelled(Good):
    """Swallows all in one read, and ends as if nothing had been."""

    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        async with aclosing(super().items(request, release)) as items:
            async for item in items:
                try:
                    await anyio.sleep(1)
                except BaseException:
                    continue
                yield item


class NeverEndsItsRead(Good):
    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        async with aclosing(super().items(request, release)) as items:
            async for item in items:
                while not request.is_stopped:
                    try:
                        await anyio.sleep(1)
                    except BaseException:
                        continue
                    break
                yield item


class TakesItsTimeToRelease(Good):
    """Waits at its end, at each of several levels, as a cancellation comes again and again: that is no fault."""

    async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
        async with aclosing(super().items(request, release)) as items:
            async for item in items:
                try:
                    try:
                        await anyio.sleep(1)
                    finally:
                        with suppress(anyio.get_cancelled_exc_class()):
                            await anyio.sleep(1)
                finally:
                    with anyio.move_on_after(1, shield=True):
                        await anyio.sleep(2)
                    for _ in range(3):
                        with suppress(anyio.get_cancelled_exc_class()):
                            await anyio.sleep(0.1)
                yield item


class RepeatsWhatItTook(Good):
    """Makes all its items of what it took from another stream, and never waits: its own stream is no source."""

    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        if request.payload == BAD:
            raise InvalidArgument("negative")
        self.open += 1
        taken, release = ResponseStream(_ones(), request), ReleaseOnce(self._closed)
        return ResponseStream(self.repeated(request, taken, release), request, taken, release)

    async def repeated(
        self, request: Context[int], taken: ResponseStream[int], release: ReleaseOnce
    ) -> AsyncGenerator[int, None]:
        async with taken, aclosing(self.items(request, release)) as items:
            async for item in items:
                yield item


BROKEN = {
    "E1": AnotherContext,
    "E2": ForeignError,
    "E3": IgnoresStop,
    "E4": DeliversAfterKill,
    "E5": ReleasesOnlyWhenRead,
    "E6": ReleasesOnlyOnClose,
    "E7": SwapsItems,
    "E8": TalksAfterAnError,
    "E9": leaves_a_task,
    "E10": SharesItsCounter,
    "E11": IgnoresAnEarlierKill,
    "E12": KeepsACancelledRead,
    "E13": RepeatsWhatItTook,
}


async def collect_what_broken_subjects_left() -> None:
    """Their streams are dropped here, and not with a warning in another test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(3):
            gc.collect()
            await checkpoint()


async def _broken_rules(factory: Any, rules: list[str] | None = None) -> set[str]:
    try:
        await check_engine(factory, request=COUNT, bad_request=BAD, open_count=lambda e: e.open, rules=rules)
    except ExceptionGroup as group:
        return {violation.rule for violation in group.exceptions if isinstance(violation, ContractViolation)}
    finally:
        await collect_what_broken_subjects_left()
    return set()


async def test_a_good_engine_passes_every_rule() -> None:
    assert await _broken_rules(Good) == set()


@pytest.mark.parametrize("rule", list(ENGINE_RULES))
async def test_each_rule_catches_the_engine_that_breaks_it(rule: str) -> None:
    assert rule in await _broken_rules(BROKEN[rule], [rule])


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        *((RaisesOnStop, "E3"), (NeverWakesForKill, "E4"), (NeverWakesForKill, "E3")),
        *((SwallowsInEachRead, "E12"), (SkipsWhatWasCancelled, "E12"), (NeverEndsItsRead, "E12")),
    ],
)
async def test_other_ways_to_break_a_rule_are_caught(broken: type[Good], rule: str) -> None:
    assert rule in await _broken_rules(broken, [rule])


async def test_what_a_cancelled_read_waits_for_at_its_end_is_not_swallowing() -> None:
    assert await _broken_rules(TakesItsTimeToRelease, ["E12"]) == set()


async def test_an_engine_that_lets_other_tasks_run_itself_holds_the_rule() -> None:
    class RepeatsAndRests(RepeatsWhatItTook):
        async def items(self, request: Context[int], release: ReleaseOnce) -> AsyncGenerator[int, None]:
            async with aclosing(super().items(request, release)) as items:
                async for item in items:
                    yield item
                    if item % 10 == 0:
                        await checkpoint()

    assert await _broken_rules(RepeatsAndRests) == set()


class GroupsItems(Good):
    """Yields pairs from its second request on."""

    calls = 0

    async def generate(self, request: Context[int]) -> ResponseStream[Any]:
        stream = await super().generate(request)
        if request.payload == BAD:
            return stream
        self.calls += 1
        return ResponseStream(self.groups(stream, 1 if self.calls == 1 else 2), request, stream)

    async def groups(self, stream: ResponseStream[int], size: int) -> AsyncGenerator[list[int], None]:
        group: list[int] = []
        async for item in stream:
            group.append(item)
            if len(group) == size:
                yield group
                group = []
        if group:
            yield group


@pytest.mark.parametrize("rule", ["E7", "E10"])
async def test_answers_are_compared_by_what_stays_the_same(rule: str) -> None:
    def joined(groups: list[list[int]]) -> list[int]:
        return [item for group in groups for item in group]

    await check_engine(GroupsItems, request=COUNT, rules=[rule], compared=joined)
    with pytest.raises(ExceptionGroup, match="breaks 1 rules"):
        await check_engine(GroupsItems, request=COUNT, rules=[rule])
    with pytest.raises(ExceptionGroup, match="breaks 1 rules"):
        await check_engine(SwapsItems, request=COUNT, rules=["E7"], compared=list)


async def test_all_violations_are_reported_together() -> None:
    assert {"E1", "E5"} <= await _broken_rules(type("Both", (AnotherContext, ReleasesOnlyWhenRead), {}))


async def test_a_function_engine_that_waits_without_looking_holds_the_contract_but_for_stop() -> None:
    @function_engine
    async def stubborn(count: int) -> AsyncIterator[int]:
        for i in range(count):
            await anyio.sleep(10)
            yield i

    await check_engine(lambda: stubborn, request=3, within_s=50, rules=[r for r in ENGINE_RULES if r != "E3"])


async def test_a_function_engine_that_looks_at_its_context_holds_the_whole_contract() -> None:
    @function_engine
    async def count(to: int, context: Context[int]) -> AsyncIterator[int]:
        for i in range(to):
            if context.is_stopped:
                return
            await checkpoint()
            yield i

    await check_engine(lambda: count, request=COUNT, expected=list(range(COUNT)))


async def test_a_function_engine_translates_foreign_errors_and_keeps_our_own() -> None:
    @function_engine
    async def failing(kind: str) -> AsyncIterator[int]:
        yield 1
        raise {"foreign": ValueError("boom"), "own": Disconnected("gone")}[kind]

    with pytest.raises(Unknown, match="boom") as caught:
        await (await failing.generate(Context("foreign"))).collect()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(Disconnected):
        await (await failing.generate(Context("own"))).collect()
    with pytest.raises(Unknown):
        await (await failing.generate(Context("neither"))).collect()


def test_a_function_that_returns_its_answer_is_no_engine() -> None:
    async def answer(payload: str) -> str:
        return payload

    with pytest.raises(GraphError, match="answer"):
        FunctionEngine(answer)  # type: ignore[arg-type]


async def test_a_scripted_engine_holds_the_contract() -> None:
    script = [*range(5), Wait(1), *range(5, COUNT)]
    await check_engine(
        lambda: ScriptedEngine(lambda to: script[:to] if to > 0 else [Fail(InvalidArgument("bad"))]),
        request=COUNT,
        bad_request=BAD,
        open_count=lambda e: e.open,
    )


async def test_a_stalled_engine_still_ends_on_stop_kill_and_cancellation() -> None:
    endings = ["E1", "E3", "E4", "E6", "E11", "E12"]
    await check_engine(lambda: ScriptedEngine([0, 1, 2, Stall()]), request=1, rules=endings)


async def test_an_engine_that_never_ends_is_reported_instead_of_waited_for() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await check_engine(lambda: ScriptedEngine([0, Stall()]), request=1, rules=["E5", "E7", "E8", "E9", "E10"])
    assert len(caught.value.exceptions) == 5


async def test_until_killed_ends_a_stream_that_ignores_stop() -> None:
    async def deaf() -> AsyncGenerator[int, None]:
        yield 1
        await anyio.sleep_forever()

    request = Context(None)
    stream = ResponseStream(until_killed(deaf(), request), request)
    async with stream, anyio.create_task_group() as tasks:
        assert await anext(stream) == 1
        request.stop()
        with anyio.move_on_after(50) as waited:
            await request.killed()
        assert waited.cancelled_caught
        tasks.start_soon(_kill_after, request, 1.0)
        assert [item async for item in stream] == []


async def _kill_after(request: Context[Any], seconds: float) -> None:
    await anyio.sleep(seconds)
    request.kill()


async def test_a_kill_from_another_thread_ends_a_stream_that_waits() -> None:
    async def deaf() -> AsyncGenerator[int, None]:
        await anyio.sleep_forever()
        yield 1

    request = Context(None)
    async with ResponseStream(until_killed(deaf(), request), request) as stream, anyio.create_task_group() as tasks:
        tasks.start_soon(_kill_in_a_thread, request)
        assert [item async for item in stream] == []


async def _kill_in_a_thread(request: Context[Any]) -> None:
    await anyio.wait_all_tasks_blocked()
    await anyio.to_thread.run_sync(request.kill)
