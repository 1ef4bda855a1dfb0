"""The rules O1 to O6 of `Operator`, each as a check that raises ContractViolation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, evolve

from ..annotated import Annotated
from ..context import Context
from ..errors import BackendUnknown, ContractViolation, Disconnected, PenstockError
from ..segment import Segment
from .engine_rules import ENGINE_RULES
from .scripted import Fail, ScriptedEngine
from .subject import Subject, no_warnings, watched


@define
class OperatorSubject:
    """An operator under check: `common.make` gives it, the rest is what runs through it."""

    common: Subject
    items: list[Any]
    """What the stage below answers with."""
    handles_errors: bool = False
    """Whether it is this operator's purpose to handle what the stage below raises."""

    def ask(self) -> Context[Any]:
        return self.common.ask()

    def on(self, below: ScriptedEngine) -> Segment[Any, Any]:
        return Segment(self.common.make(), below)

    def subject(self) -> Subject:
        """The operator on a scripted engine, as an engine."""
        return evolve(
            self.common,
            make=lambda: self.on(ScriptedEngine(self.items)),
            open_count=lambda segment: segment.stages[-1].open,
        )


OperatorRule = Callable[[OperatorSubject], Awaitable[None]]


async def o1_context_reaches_the_next_stage(subject: OperatorSubject) -> None:
    below = ScriptedEngine(subject.items)
    request = subject.ask()
    await (await subject.on(below).generate(request)).collect()
    for asked in below.requests:
        if asked.id != request.id:
            raise ContractViolation(f"the next stage was asked with id {asked.id!r} instead of {request.id!r}")
        asked.control.stop()  # a child may be stopped alone, the request's own control is the same object
        request.kill()
        if not asked.is_killed:
            raise ContractViolation("a kill of the request does not reach the request handed to the next stage")


async def o2_errors_go_to_the_caller(subject: OperatorSubject) -> None:
    if subject.handles_errors:
        return
    error = Disconnected("from below")
    failing = ScriptedEngine(subject.items, fails=error)
    mid = ScriptedEngine([*subject.items[:1], Fail(error)])
    for below in (failing, mid):
        async with watched(evolve(subject.common, make=partial(subject.on, below))) as (engine, watch):
            try:
                await (await engine.generate(subject.ask())).collect()
            except PenstockError as raised:
                if raised is not error:
                    raise ContractViolation(f"{error!r} from below reached the caller as {raised!r}") from raised
            except Exception as raised:
                raise ContractViolation(f"{error!r} from below reached the caller as {raised!r}") from raised
            else:
                raise ContractViolation(f"{error!r} from below did not reach the caller")
            await watch.expect_nothing_open("after an error from below")
            _expect_closed(below, "after an error from below")


async def o3_an_error_item_is_the_last(subject: OperatorSubject) -> None:
    if subject.handles_errors:
        return
    error = BackendUnknown("reported from below")
    below = ScriptedEngine([*subject.items[:1], Annotated[Any].from_error(error)])
    got = await (await subject.on(below).generate(subject.ask())).collect()
    errors = [item for item in got if isinstance(item, Annotated) and item.is_error]
    if not errors:
        raise ContractViolation("an error item from below did not reach the caller")
    if errors[0].error is not error:
        raise ContractViolation(f"{error!r} from below reached the caller as {errors[0].error!r}")
    if got[-1] is not errors[0]:
        raise ContractViolation("items followed the error item")
    _expect_closed(below, "after an error item")


async def o4_every_stream_taken_is_closed(subject: OperatorSubject) -> None:
    for point in (0, 1):
        for how in ("closed", "dropped"):
            below = ScriptedEngine(subject.items)
            segment = subject.on(below)  # kept, so that what it forgets is not collected with it
            stream = await segment.generate(subject.ask())
            await subject.common.read(stream, point)
            with no_warnings():
                if how == "closed":
                    await stream.aclose()
                del stream
                for _ in range(10):
                    await checkpoint()
            _expect_closed(below, f"after its stream was {how} behind {point} items")


def _expect_closed(below: ScriptedEngine, when: str) -> None:
    if below.open:
        raise ContractViolation(f"{below.open} of {below.started} streams of the next stage stayed open {when}")


async def o5_demand_reaches_the_engine(subject: OperatorSubject) -> None:
    below = ScriptedEngine(subject.items)
    async with await subject.on(below).generate(subject.ask()) as stream:
        for _ in range(2):
            await subject.common.read(stream, 1)
            delivered = below.delivered
            for _ in range(5):
                await anyio.sleep(0.001)
            if below.delivered != delivered:
                raise ContractViolation(f"{below.delivered - delivered} items were read ahead of the reader")


async def o6_concurrent_requests_through_one_instance(subject: OperatorSubject) -> None:
    await ENGINE_RULES["E10"](subject.subject())


OPERATOR_RULES: dict[str, OperatorRule] = {
    "O1": o1_context_reaches_the_next_stage,
    "O2": o2_errors_go_to_the_caller,
    "O3": o3_an_error_item_is_the_last,
    "O4": o4_every_stream_taken_is_closed,
    "O5": o5_demand_reaches_the_engine,
    "O6": o6_concurrent_requests_through_one_instance,
}
