"""`check_operator` finds each way not to close the next stage's stream, whatever collects it afterwards."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline import AsyncEngine, Context, ContractViolation, Operator, ResponseStream, function_engine
from pipeline.testing import ScriptedEngine, check_engine, check_operator

ITEMS = list(range(40))
Next = AsyncEngine[Any, Any]
Items = AsyncGenerator[Any, None]


class Forgetful(Operator[Any, Any, Any, Any]):
    """Reads the next stage's stream, and neither closes nor owns it."""

    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        return ResponseStream(self.items(await next.generate(request), request), request)

    async def items(self, stream: ResponseStream[Any], request: Context[Any]) -> Items:
        async for item in stream:
            yield item


class ClosesOnAnError(Forgetful):
    async def items(self, stream: ResponseStream[Any], request: Context[Any]) -> Items:
        try:
            async for item in stream:
                yield item
        except Exception:
            await stream.aclose()
            raise


class ClosesAtTheEnd(Forgetful):
    async def items(self, stream: ResponseStream[Any], request: Context[Any]) -> Items:
        async for item in stream:
            yield item
        await stream.aclose()


class ForgetsOnAKill(Forgetful):
    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        stream = await next.generate(request)
        unread = ResponseStream(self.items(stream, request), request)
        return unread.map(lambda item: item)

    async def items(self, stream: ResponseStream[Any], request: Context[Any]) -> Items:
        try:
            async for item in stream:
                yield item
                if request.is_killed:
                    return
        finally:
            if not request.is_killed:
                await stream.aclose()


class ForgetsOnAStop(Forgetful):
    async def items(self, stream: ResponseStream[Any], request: Context[Any]) -> Items:
        closes = True
        try:
            async for item in stream:
                yield item
                if request.is_stopped:
                    closes = False
                    return
        finally:
            if closes:
                await stream.aclose()


class ForgetsWhenUnread(Forgetful):
    async def items(self, stream: ResponseStream[Any], request: Context[Any]) -> Items:
        async with stream:
            async for item in stream:
                yield item


class ForgetsWhenItsReaderIsCancelled(Forgetful):
    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        stream = await next.generate(request)
        await checkpoint()  # where a cancellation loses it
        return ResponseStream(self.items(stream, request), request, stream)


class KeepsItOnItself(Forgetful):
    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        self.stream = await next.generate(request)
        return ResponseStream(self.items(self.stream, request), request)


class AsksTwoAndForgetsOne(ForgetsWhenUnread):
    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        await next.generate(request)
        stream = await next.generate(request)
        return ResponseStream(self.items(stream, request), request, stream)


class ForgetsAfterTheFirstTwenty(Forgetful):
    """Owns the stream, so a close finds it; but a stream that has ended needs no close."""

    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        stream = await next.generate(request)
        return ResponseStream(self.items(stream, request), request, stream)

    async def items(self, stream: ResponseStream[Any], request: Context[Any]) -> Items:
        for _ in range(20):
            try:
                yield await anext(stream)
            except StopAsyncIteration:
                break


class ClosesOnlyTheGenerator(Forgetful):
    """Ends what the stream reads from, and leaves what it owns."""

    async def items(self, stream: ResponseStream[Any], request: Context[Any]) -> Items:
        try:
            async for item in stream:
                yield item
        finally:
            await stream._items.aclose()


FORGETFUL = [
    Forgetful,
    ClosesOnAnError,
    ClosesAtTheEnd,
    ForgetsOnAKill,
    ForgetsOnAStop,
    ForgetsWhenUnread,
    ForgetsWhenItsReaderIsCancelled,
    KeepsItOnItself,
    AsksTwoAndForgetsOne,
    ForgetsAfterTheFirstTwenty,
    ClosesOnlyTheGenerator,
]


async def violations(check: Any) -> list[Any]:
    """The violations that the check raises, once what its subjects left is gone."""
    found: list[Any] = []
    try:
        await check
    except ExceptionGroup as group:
        found = list(group.exceptions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(3):
            gc.collect()
            await checkpoint()
    return found


@pytest.mark.parametrize("operator", FORGETFUL)
async def test_an_operator_that_forgets_a_stream_is_caught(operator: type[Forgetful]) -> None:
    found = await violations(check_operator(operator, request="request", items=ITEMS))
    assert found
    assert any("never closed" in str(one) or "open" in str(one) for one in found)


@pytest.mark.parametrize("operator", [o for o in FORGETFUL if o is not ForgetsWhenItsReaderIsCancelled])
async def test_the_rule_of_closing_alone_finds_it_too(operator: type[Forgetful]) -> None:
    (found,) = await violations(check_operator(operator, request="request", items=ITEMS, rules=["O4"]))
    assert found.rule == "O4"


async def test_a_violation_names_the_request_and_how_far_its_stream_was_read() -> None:
    (found,) = await violations(check_operator(Forgetful, request="request", items=ITEMS, rules=["O4"]))
    assert str(found).startswith("O4 (every stream taken is closed): after its stream was closed unread: stream of")
    assert str(found).endswith("(dropped behind 0 items) was never closed")


class Owner(Forgetful):
    """Lets its own stream close the next one."""

    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        stream = await next.generate(request)
        return ResponseStream(self.items(stream, request), request, stream)


class ClosesInATask(ForgetsWhenUnread):
    """Closes by a task group of its own, inside its `generate`."""

    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        first = await next.generate(request)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.aclose)
        stream = await next.generate(request)
        return ResponseStream(self.items(stream, request), request, stream)


@pytest.mark.parametrize("operator", [Owner, ClosesInATask])
async def test_an_operator_that_closes_in_another_way_passes(operator: type[Forgetful]) -> None:
    await check_operator(operator, request="request", items=ITEMS, expected=ITEMS)


# -- the shape of generate


class YieldsItself(Operator[Any, Any, Any, Any]):
    async def generate(self, request: Context[Any], next: Next) -> Items:  # type: ignore[override]
        async with await next.generate(request) as stream:
            async for item in stream:
                yield item


class ReturnsItsGenerator(ForgetsWhenUnread):
    async def generate(self, request: Context[Any], next: Next) -> Any:
        return self.items(await next.generate(request), request)


class ReturnsAList(Forgetful):
    async def generate(self, request: Context[Any], next: Next) -> Any:
        return await (await next.generate(request)).collect()


class ForgetsToAwait(Forgetful):
    async def generate(self, request: Context[Any], next: Next) -> Any:
        return next.generate(request)


class IsNoCoroutine(Forgetful):
    def generate(self, request: Context[Any], next: Next) -> Any:
        return ResponseStream.of(ITEMS, request)


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        (YieldsItself, "YieldsItself.generate is a generator, since it yields: write `async def generate(...)`"),
        (lambda: ForgetsWhenUnread() >> YieldsItself(), "YieldsItself.generate is a generator, since it yields"),
        (ReturnsItsGenerator, "returns `async_generator` and not `ResponseStream`: write"),
        (ReturnsAList, "returns `list` and not `ResponseStream`: write"),
        (ForgetsToAwait, "returns `coroutine` and not `ResponseStream`: write"),
        (IsNoCoroutine, "returns its stream without being awaited: write"),
        (lambda: "no operator", "is neither an operator nor an engine"),
    ],
)
@pytest.mark.parametrize("rules", [None, ["O1"]])
async def test_an_operator_of_the_wrong_shape_is_one_violation(operator: Any, text: str, rules: Any) -> None:
    (found,) = await violations(check_operator(operator, request="request", items=ITEMS, rules=rules))
    assert isinstance(found, ContractViolation)
    assert text in str(found)


class EngineThatYields(AsyncEngine[Any, Any]):
    async def generate(self, request: Context[Any]) -> Items:  # type: ignore[override]
        for item in ITEMS:
            yield item


class EngineThatReturnsItsGenerator(AsyncEngine[Any, Any]):
    async def generate(self, request: Context[Any]) -> Any:
        return (item async for item in ResponseStream.of(ITEMS, request))


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (EngineThatYields, "EngineThatYields.generate is a generator, since it yields: write `async def generate"),
        (EngineThatReturnsItsGenerator, "returns `async_generator` and not `ResponseStream`"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
async def test_an_engine_of_the_wrong_shape_is_one_violation(engine: Any, text: str) -> None:
    (found,) = await violations(check_engine(engine, request=40))
    assert isinstance(found, ContractViolation)
    assert text in str(found)


async def test_a_stage_whose_generate_raises_is_left_to_the_rules() -> None:
    failing = ScriptedEngine(ITEMS, fails=ValueError("always"))
    found = await violations(check_engine(lambda: failing, request=None, rules=["E1", "E5"]))
    assert [one.rule for one in found] == ["E1", "E5"]


async def test_an_engine_that_forgets_the_stream_of_another_engine_is_caught() -> None:
    inner = ScriptedEngine(ITEMS)

    @function_engine
    async def around(payload: Any, context: Context[Any]) -> AsyncGenerator[Any, None]:
        async for item in await inner.generate(context):
            yield item

    found = await violations(check_engine(lambda: around, request=None))
    assert "E5" in {one.rule for one in found}
