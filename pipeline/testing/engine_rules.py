"""The rules E1 to E13 of `AsyncEngine`, each as a check that raises ContractViolation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from ..annotated import Annotated
from ..context import Context
from ..engine import AsyncEngine
from ..errors import Cancelled, ContractViolation, PenstockError
from ..stream import ResponseStream
from .cancelled_reads import read_until_cancelled
from .subject import Subject, watched, within

Rule = Callable[[Subject], Awaitable[None]]

_CONCURRENT = 8
_POINTS = (0, 1, 3)
"""Items before a stream is disturbed."""
_READY_ITEMS = 4096
"""Items read before another task must have run: four times the limit of a stream of the core."""
_READY_ANSWERS = 256
"""The same in answers, for answers of few items."""


async def e1_context_is_kept(subject: Subject) -> None:
    async with watched(subject) as (engine, _):
        request = subject.new_request()
        async with await engine.generate(request) as stream:
            if stream.context.id != request.id:
                raise ContractViolation(f"the stream's id is {stream.context.id!r}, the request's {request.id!r}")
            if stream.context.control is not request.control:
                raise ContractViolation("the stream's control is not the request's")


async def e2_bad_request_fails_typed(subject: Subject) -> None:
    if subject.bad_request is None:
        return
    async with watched(subject) as (engine, watch):
        error = await _first_error(engine, subject)
        if error is None:
            raise ContractViolation("the bad request did not fail before its first item")
        if not isinstance(error, PenstockError):
            raise ContractViolation(f"the bad request failed with {type(error).__name__}, which is not a PenstockError")
        await watch.expect_nothing_open("after a refused request")


async def _first_error(engine: AsyncEngine[Any, Any], subject: Subject) -> BaseException | None:
    with within(subject.within_s, "refusing the bad request"):
        try:
            async with await engine.generate(Context(subject.bad_request)) as stream:
                first = await stream.__anext__()
        except StopAsyncIteration:
            return None
        except Exception as error:
            return error
        return first.extract_error() if isinstance(first, Annotated) else None
    raise AssertionError  # `within` raised


async def e3_stop_ends_soon(subject: Subject) -> None:
    await _between_reads(subject, Context.stop, subject.slack_items)
    await _during_a_read(subject, Context.stop, subject.slack_items)


async def e4_kill_ends_at_once(subject: Subject) -> None:
    await _between_reads(subject, Context.kill, 0)
    await _during_a_read(subject, Context.kill, 0)


async def _between_reads(subject: Subject, verb: Callable[[Context[Any]], None], slack: int) -> None:
    """Stop or kill between two reads, after some items."""
    for point in _POINTS:
        when = f"after a {verb.__name__} behind {point} items"
        async with watched(subject) as (engine, watch):
            request = subject.new_request()
            async with await engine.generate(request) as stream:
                await subject.read(stream, point)
                verb(request)
                await _expect_end(stream, subject, when, slack)
            await watch.expect_nothing_open(when)


async def _expect_end(stream: ResponseStream[Any], subject: Subject, when: str, slack: int) -> None:
    with within(subject.within_s, f"ending {when}"):
        try:
            more = await subject.read(stream, slack + 1)
        except Exception as error:
            raise ContractViolation(f"{when} the stream raised {error!r} instead of ending") from error
        if len(more) > slack:
            raise ContractViolation(f"{when} more than {slack} items still came")


async def _during_a_read(subject: Subject, verb: Callable[[Context[Any]], None], slack: int) -> None:
    """Stop or kill during a read, at a few points of the stream."""
    for turns in (1, 2, 5):
        async with watched(subject) as (engine, watch):
            request = subject.new_request()
            read_after: list[Any] = []
            async with await engine.generate(request) as stream, anyio.create_task_group() as tasks:
                with within(subject.within_s, f"ending after a {verb.__name__} during a read"):
                    tasks.start_soon(_read_on, stream, request, read_after)
                    for _ in range(turns):
                        await checkpoint()
                    verb(request)
                    while not read_after or read_after[-1] is not _END:
                        await checkpoint()
                        await anyio.sleep(0.001)
            *after, end = read_after
            if len(after) > slack:
                raise ContractViolation(f"more than {slack} items came after a {verb.__name__} during a read")
            assert end is _END
            await watch.expect_nothing_open(f"after a {verb.__name__} during a read")


_END = object()


async def _read_on(stream: ResponseStream[Any], request: Context[Any], after: list[Any]) -> None:
    """Read to the end and record the items of reads that began after the disturbance."""
    while True:
        disturbed = request.is_stopped
        try:
            item = await stream.__anext__()
        except StopAsyncIteration:
            break
        except Exception as error:
            raise ContractViolation(f"the stream raised {error!r} instead of ending") from error
        if disturbed or request.is_killed:
            after.append(item)
        await checkpoint()
    after.append(_END)


async def e5_close_releases_everything(subject: Subject) -> None:
    for point in (*_POINTS, None):
        when = "after a close at the end" if point is None else f"after a close behind {point} items"
        async with watched(subject) as (engine, watch):
            stream = await engine.generate(subject.new_request())
            await (subject.read(stream, point) if point is not None else subject.drain(stream))
            with within(subject.within_s, f"closing {when[6:]}"):
                await stream.aclose()
                await stream.aclose()
            await watch.expect_nothing_open(when)


async def e6_drop_releases_everything(subject: Subject) -> None:
    for point in _POINTS:
        async with watched(subject) as (engine, watch):
            stream = await engine.generate(subject.new_request())
            await subject.read(stream, point)
            del stream
            await watch.expect_nothing_open(f"after a drop behind {point} items", is_dropped=True)


async def e7_items_come_in_order(subject: Subject) -> None:
    async with watched(subject) as (engine, _):
        expected = await _expected(subject, engine)
        got = await _answer(subject, engine)
        if subject.compared(got) != subject.compared(expected):
            raise ContractViolation(f"expected the items {expected!r}, got {got!r}")


async def _expected(subject: Subject, engine: AsyncEngine[Any, Any]) -> list[Any]:
    if subject.expected is not None:
        return subject.expected
    return await _answer(subject, engine)


async def _answer(subject: Subject, engine: AsyncEngine[Any, Any]) -> list[Any]:
    async with await engine.generate(subject.new_request()) as stream:
        return await subject.drain(stream)


async def e8_nothing_follows_the_end(subject: Subject) -> None:
    payloads = [subject.request] if subject.bad_request is None else [subject.request, subject.bad_request]
    for payload in payloads:
        async with watched(subject) as (engine, _):
            try:
                stream = await engine.generate(Context(payload))
            except PenstockError:
                continue
            async with stream:
                with within(subject.answer_within_s, "an undisturbed answer"):
                    await _expect_silence_after_the_end(stream)


async def _expect_silence_after_the_end(stream: ResponseStream[Any]) -> None:
    failed: Any = None
    while True:
        try:
            item = await stream.__anext__()
        except (StopAsyncIteration, PenstockError):
            break
        if failed is not None:
            raise ContractViolation(f"an item followed the error item {failed!r}")
        failed = item if isinstance(item, Annotated) and item.is_error else None
    for _ in range(2):
        try:
            item = await stream.__anext__()
        except StopAsyncIteration:
            continue
        except PenstockError as error:
            raise ContractViolation(f"a second error followed the end: {error!r}") from error
        raise ContractViolation(f"{item!r} followed the end")


async def e9_nothing_stays_open(subject: Subject) -> None:
    async with watched(subject) as (engine, watch):
        stream = await engine.generate(subject.new_request())
        await subject.drain(stream)
        del stream
        await watch.expect_nothing_open("after the end, without a close")


async def e10_requests_do_not_affect_each_other(subject: Subject) -> None:
    async with watched(subject) as (engine, watch):
        expected = await _expected(subject, engine)
        answers: list[list[Any]] = []

        async def undisturbed() -> None:
            async with await engine.generate(subject.new_request()) as stream:
                got: list[Any] = []
                async for item in stream:
                    got.append(item)
                    await checkpoint()
                answers.append(got)

        async def disturbed(verb: Callable[[Context[Any]], None] | None) -> None:
            request = subject.new_request()
            async with await engine.generate(request) as stream:
                await subject.read(stream, 1)
                if verb is not None:
                    verb(request)
                    await subject.drain(stream)

        with within(subject.answer_within_s, "answering concurrent requests"):
            async with anyio.create_task_group() as tasks:
                for i in range(_CONCURRENT):
                    tasks.start_soon(undisturbed)
                    tasks.start_soon(disturbed, (Context.stop, Context.kill, None)[i % 3])
        same = subject.compared(expected)
        if wrong := [got for got in answers if subject.compared(got) != same]:
            raise ContractViolation(f"among other requests the answer was {wrong[0]!r} instead of {expected!r}")
        await watch.expect_nothing_open("after concurrent requests")


async def e11_stopped_beforehand(subject: Subject) -> None:
    for verb, slack in ((Context.stop, subject.slack_items), (Context.kill, 0)):
        async with watched(subject) as (engine, watch):
            request = subject.new_request()
            verb(request)
            try:
                stream = await engine.generate(request)
            except Cancelled:
                pass
            else:
                async with stream:
                    await _expect_end(stream, subject, f"after a {verb.__name__} before the request", slack)
                del stream
            await watch.expect_nothing_open(f"after a request that had its {verb.__name__} before")


async def e12_cancelling_the_reader_releases_everything(subject: Subject) -> None:
    for turns in (0, 1, 2, 5):
        async with watched(subject) as (engine, watch):
            with within(subject.within_s, "ending after its reader was cancelled"):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(read_until_cancelled, engine, subject.new_request(), tasks.cancel_scope)
                    for _ in range(turns):
                        await checkpoint()
                    tasks.cancel_scope.cancel()
            await watch.expect_nothing_open(f"after its reader was cancelled at turn {turns}")


async def e13_ready_items_let_other_tasks_run(subject: Subject) -> None:
    async with watched(subject) as (engine, _), anyio.create_task_group() as tasks:
        has_run = anyio.Event()

        async def other() -> None:
            has_run.set()

        tasks.start_soon(other)
        read = answers = 0
        with within(subject.answer_within_s, "an undisturbed answer"):
            while not has_run.is_set() and read < _READY_ITEMS and answers < _READY_ANSWERS:
                async with await engine.generate(subject.new_request()) as stream:
                    async for _ in stream:
                        read += 1
                        if has_run.is_set() or read >= _READY_ITEMS:
                            break
                answers += 1
        if not has_run.is_set():
            raise ContractViolation(f"no other task ran while {read} items of {answers} answers were read")


ENGINE_RULES: dict[str, Rule] = {
    "E1": e1_context_is_kept,
    "E2": e2_bad_request_fails_typed,
    "E3": e3_stop_ends_soon,
    "E4": e4_kill_ends_at_once,
    "E5": e5_close_releases_everything,
    "E6": e6_drop_releases_everything,
    "E7": e7_items_come_in_order,
    "E8": e8_nothing_follows_the_end,
    "E9": e9_nothing_stays_open,
    "E10": e10_requests_do_not_affect_each_other,
    "E11": e11_stopped_beforehand,
    "E12": e12_cancelling_the_reader_releases_everything,
    "E13": e13_ready_items_let_other_tasks_run,
}
