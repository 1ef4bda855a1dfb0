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
from ..engine import AsyncEngine
from ..errors import BackendUnknown, ContractViolation, Disconnected, PenstockError
from ..graph import Segment
from .engine_rules import ENGINE_RULES
from .open_streams import OpenStreams, watch_streams
from .stages import Fail, ScriptedEngine
from .subject import Subject, watched, within


@define
class OperatorSubject:
    """An operator under test: `common.make` returns it; the other fields describe what passes through it."""

    common: Subject
    items: list[Any]
    """The items of the stage below."""
    handles_errors: bool = False
    """Whether the operator handles errors of the stage below itself."""

    def new_request(self) -> Context[Any]:
        return self.common.new_request()

    def on(self, below: ScriptedEngine) -> Segment[Any, Any]:
        return Segment(self.common.make(), below)

    def subject(self) -> Subject:
        """Return the operator on a scripted engine, as an engine."""
        return evolve(
            self.common,
            make=lambda: self.on(ScriptedEngine(self.items)),
            open_count=lambda segment: segment.stages[-1].open,
        )


OperatorRule = Callable[[OperatorSubject], Awaitable[None]]


async def o1_context_reaches_the_next_stage(subject: OperatorSubject) -> None:
    below = ScriptedEngine(subject.items)
    request = subject.new_request()
    await (await subject.on(below).generate(request)).collect()
    for received in below.requests:
        if received.id != request.id:
            raise ContractViolation(f"the next stage received id {received.id!r} instead of {request.id!r}")
        received.control.stop()  # a child may be stopped alone, the request's own control is the same object
        request.kill()
        if not received.is_killed:
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
                await (await engine.generate(subject.new_request())).collect()
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
    with watch_streams() as streams:
        got = await (await subject.on(below).generate(subject.new_request())).collect()
    errors = [item for item in got if isinstance(item, Annotated) and item.is_error]
    if not errors:
        raise ContractViolation("an error item from below did not reach the caller")
    if errors[0].error is not error:
        raise ContractViolation(f"{error!r} from below reached the caller as {errors[0].error!r}")
    if got[-1] is not errors[0]:
        raise ContractViolation("items followed the error item")
    _expect_closed(below, "after an error item", streams)


async def o4_every_stream_taken_is_closed(subject: OperatorSubject) -> None:
    for way, leave in _WAYS_OUT.items():
        below = ScriptedEngine(subject.items)
        segment = subject.on(below)  # kept, so that what it forgets is not collected with it
        with watch_streams() as streams, within(subject.common.answer_within_s, f"ending {way}"):
            await leave(segment, subject)
            _expect_closed(below, way, streams)
    for point in (0, 1):
        below = ScriptedEngine(subject.items)
        segment = subject.on(below)
        stream = await segment.generate(subject.new_request())
        await subject.common.read(stream, point)
        del stream
        for _ in range(10):
            await checkpoint()
        _expect_closed(below, f"after its stream was dropped behind {point} items")


Leave = Callable[[AsyncEngine[Any, Any], OperatorSubject], Awaitable[None]]
"""Sends the segment a request and leaves its stream closed."""


def _closed_behind(count: int) -> Leave:
    async def leave(segment: AsyncEngine[Any, Any], subject: OperatorSubject) -> None:
        async with await segment.generate(subject.new_request()) as stream:
            await subject.common.read(stream, count)

    return leave


def _ended_by(verb: Callable[[Context[Any]], None], count: int) -> Leave:
    async def leave(segment: AsyncEngine[Any, Any], subject: OperatorSubject) -> None:
        request = subject.new_request()
        async with await segment.generate(request) as stream:
            await subject.common.read(stream, count)
            verb(request)
            await subject.common.drain(stream)

    return leave


async def _read_to_the_end(segment: AsyncEngine[Any, Any], subject: OperatorSubject) -> None:
    await subject.common.drain(await segment.generate(subject.new_request()))


_WAYS_OUT: dict[str, Leave] = {
    "after its stream was closed unread": _closed_behind(0),
    "after its stream was closed behind 1 items": _closed_behind(1),
    "after its stream was closed behind 3 items": _closed_behind(3),
    "after its stream was read to the end": _read_to_the_end,
    "after a stop behind 1 items": _ended_by(Context.stop, 1),
    "after a kill behind 1 items": _ended_by(Context.kill, 1),
}


def _expect_closed(below: ScriptedEngine, when: str, streams: OpenStreams | None = None) -> None:
    """Raise ContractViolation if a stream of the next stage is open, or one in the ledger was never closed.

    Reference counting ends a stream that is merely forgotten, so that only the ledger shows it.
    """
    if streams is not None and streams.unclosed:
        raise ContractViolation(f"{when}: {', '.join(f'{line} was never closed' for line in streams.unclosed)}")
    if below.open:
        raise ContractViolation(f"{below.open} of {below.started} streams of the next stage stayed open {when}")


async def o5_demand_reaches_the_engine(subject: OperatorSubject) -> None:
    below = ScriptedEngine(subject.items)
    async with await subject.on(below).generate(subject.new_request()) as stream:
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
