"""The shape of a stage, looked at before its rules: all of them need a `generate` that returns a stream."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import anyio

from ..errors import ContractViolation
from ..stream import ResponseStream
from .subject import Subject

_INSTEAD = (
    "write `async def generate(...)` that returns `ResponseStream(self.items(...), request, ...)`, "
    "and yield in `items`, a method of its own"
)


async def expect_shape(subject: Subject) -> None:
    """Raise ContractViolation, with what to write instead, if `generate` is no coroutine that returns a stream.

    It is called once, and its stream is closed unread. What it raises is left to the rules. What making the stage
    raises is raised.
    """
    async with subject.engine() as engine:
        for stage in getattr(engine, "stages", (engine,)):
            if inspect.isasyncgenfunction(stage.generate) or inspect.isgeneratorfunction(stage.generate):
                raise ContractViolation(f"{type(stage).__name__}.generate is a generator, since it yields: {_INSTEAD}")
        problem = None
        with anyio.move_on_after(subject.answer_within_s), suppress(Exception):
            problem = await _problem(engine, subject)
        if problem is not None:
            raise ContractViolation(f"{type(engine).__name__}.generate {problem}: {_INSTEAD}")


async def _problem(engine: Any, subject: Subject) -> str | None:
    """Return what is wrong with the answer to one request, None if nothing is."""
    answer = engine.generate(subject.new_request())
    if isinstance(answer, ResponseStream):
        await answer.aclose()
        return "returns its stream without being awaited"
    if inspect.isawaitable(answer):
        answer = await answer
    if isinstance(answer, ResponseStream):
        await answer.aclose()
        return None
    if inspect.iscoroutine(answer):
        answer.close()
    return f"returns `{type(answer).__name__}` and not `ResponseStream`"
