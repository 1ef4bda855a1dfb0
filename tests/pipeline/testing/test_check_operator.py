"""The operator contract's checks: they pass good operators, and each is proved by one that breaks its rule."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline import (
    Annotated,
    AsyncEngine,
    Context,
    ContractViolation,
    Operator,
    ResponseStream,
    Unknown,
    identity,
    map_request,
    map_response,
)
from pipeline.testing import OPERATOR_RULES, Faults, Probe, check_operator

ITEMS = [Annotated.from_data(i) for i in range(40)]
Next = AsyncEngine[Any, Any]


class Good(Operator[Any, Any, Any, Any]):
    """Hands items on; the subject that every broken one below changes in one place."""

    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        stream = await next.generate(request)
        return ResponseStream(self.items(stream), request, stream)

    async def items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        async with stream:
            async for item in stream:
                yield item


class AsksUnderAnotherContext(Good):
    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        return ResponseStream(self.items(await next.generate(Context(request.payload))), request)


class LosesTheControl(Good):
    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        stream = await next.generate(request.child(request.payload, linked=False))
        return ResponseStream(self.items(stream), request, stream)


class WrapsErrors(Good):
    async def items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        try:
            async with stream:
                async for item in stream:
                    yield item
        except Exception as error:
            raise Unknown("something went wrong") from error


class SwallowsErrors(Good):
    async def items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        try:
            async with stream:
                async for item in stream:
                    yield item
        except Exception:
            return


class TalksAfterAnErrorItem(Good):
    async def items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        async with stream:
            async for item in stream:
                yield item
                if item.is_error:
                    yield Annotated.from_data("and another thing")


class RemakesErrorItems(Good):
    async def items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        async with stream:
            async for item in stream:
                yield Annotated.from_error("sanitised") if item.is_error else item


class ForgetsAnUnreadStream(Good):
    kept: list[Any]

    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        stream = await next.generate(request)
        self.kept = [stream]
        return ResponseStream(self.items(stream), request)


class ReadsAhead(Good):
    """Its tasks live here, since a stage has nowhere to keep one."""

    tasks: Any = None

    async def items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        send, receive = anyio.create_memory_object_stream[Any](100)

        async def pump() -> None:
            async with send, stream:
                async for item in stream:
                    await send.send(item)

        ReadsAhead.tasks.start_soon(pump)
        with receive:
            async for item in receive:
                yield item


class KeepsTheRequestOnItself(Good):
    async def generate(self, request: Context[Any], next: Next) -> ResponseStream[Any]:
        self.stream = await next.generate(request)
        return ResponseStream(self.shared(), request, self.stream)

    async def shared(self) -> AsyncGenerator[Any, None]:
        while True:
            await checkpoint()
            try:
                yield await self.stream.__anext__()
            except (StopAsyncIteration, RuntimeError):
                return


BROKEN: list[tuple[str, type[Good]]] = [
    ("O1", AsksUnderAnotherContext),
    ("O1", LosesTheControl),
    ("O2", WrapsErrors),
    ("O2", SwallowsErrors),
    ("O3", TalksAfterAnErrorItem),
    ("O3", RemakesErrorItems),
    ("O4", ForgetsAnUnreadStream),
    ("O5", ReadsAhead),
    ("O6", KeepsTheRequestOnItself),
]


async def _broken_rules(factory: Any, rules: list[str] | None = None) -> set[str]:
    broken: set[str] = set()
    async with anyio.create_task_group() as ReadsAhead.tasks:
        try:
            await check_operator(factory, request="request", items=ITEMS, rules=rules)
        except ExceptionGroup as group:
            broken = {violation.rule for violation in group.exceptions if isinstance(violation, ContractViolation)}
        ReadsAhead.tasks.cancel_scope.cancel()
    with warnings.catch_warnings():  # what broken subjects left must not warn in another test
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(3):
            gc.collect()
            await checkpoint()
    return broken


@pytest.mark.parametrize(
    "factory",
    [
        Good,
        identity,
        Probe,
        Faults,
        lambda: map_request(str.upper),
        lambda: map_response(lambda item: item),
        lambda: Good() >> Probe() >> identity(),
        lambda: Faults(delay_s=0.01),
    ],
)
async def test_a_good_operator_passes_every_rule(factory: Any) -> None:
    await check_operator(factory, request="request", items=ITEMS, expected=ITEMS)


def test_every_operator_rule_has_a_broken_subject() -> None:
    assert {rule for rule, _ in BROKEN} == set(OPERATOR_RULES)


@pytest.mark.parametrize(("rule", "broken"), BROKEN)
async def test_each_rule_catches_the_operator_that_breaks_it(rule: str, broken: type[Good]) -> None:
    assert rule in await _broken_rules(broken, [rule])


async def test_an_operator_that_handles_errors_need_not_pass_them_on() -> None:
    await check_operator(SwallowsErrors, request="request", items=ITEMS, handles_errors=True)
