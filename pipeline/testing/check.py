"""check_engine and check_operator: check a stage against its numbered contract with one call."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import anyio

from ..engine import AsyncEngine
from ..errors import ContractViolation, ungrouped
from ..operator import Operator
from ..stream import ResponseStream
from .engine_rules import ENGINE_RULES
from .operator_rules import OPERATOR_RULES, OperatorSubject
from .subject import Subject, no_warnings

EngineFactory = Callable[[], AsyncEngine[Any, Any] | AbstractAsyncContextManager[AsyncEngine[Any, Any]]]


async def check_engine(
    factory: EngineFactory,
    *,
    request: Any,
    expected: list[Any] | None = None,
    bad_request: Any = None,
    within_s: float = 2.0,
    answer_within_s: float = 60.0,
    slack_items: int = 16,
    open_count: Callable[[Any], int] | None = None,
    settle_s: float = 0.0,
    compared: Callable[[list[Any]], Any] = list,
    rules: Iterable[str] | None = None,
) -> None:
    """Check E1 to E13 of `AsyncEngine` on fresh engines; raise an ExceptionGroup of all violations.

    `factory` returns the engine, or an async context manager of it. `request` is a payload whose answer has well more
    than `slack_items` items, so that an ignored stop shows. `expected` are its items (None: as in a first run).
    `bad_request` is a payload the engine refuses (None: E2 is not checked). `within_s` bounds every ending,
    `answer_within_s` every undisturbed answer, and `slack_items` how many may still come after a stop. `open_count`
    returns how much the engine holds open, and `settle_s` bounds how long it may do so after an ending. `compared`
    returns what of an answer's items is the same at each run, by default all: for an engine whose tokens come in other
    chunks each time. `rules` limits the check. Works in real and in virtual time.

    If `generate` is not a coroutine that returns a stream, this is the only violation, and no rule is checked.
    """
    subject = Subject(
        factory,
        request,
        expected=expected,
        bad_request=bad_request,
        within_s=within_s,
        answer_within_s=answer_within_s,
        slack_items=slack_items,
        open_count=open_count,
        settle_s=settle_s,
        compared=compared,
    )
    await _check("engine", subject, {name: (rule, subject) for name, rule in ENGINE_RULES.items()}, rules)


async def check_operator(
    factory: Callable[[], Operator[Any, Any, Any, Any]],
    *,
    request: Any,
    items: list[Any],
    expected: list[Any] | None = None,
    bad_request: Any = None,
    within_s: float = 2.0,
    answer_within_s: float = 60.0,
    slack_items: int = 16,
    handles_errors: bool = False,
    rules: Iterable[str] | None = None,
) -> None:
    """Check O1 to O6 of `Operator`, and E1 to E13 of the operator on an engine; raise all violations as a group.

    `items` are those of the stage below: more than `slack_items`. With `handles_errors` the operator handles errors
    from below itself, and O2 and O3 are not checked. The other parameters are those of `check_engine`.
    """
    common = Subject(
        factory,
        request,
        expected=expected,
        bad_request=bad_request,
        within_s=within_s,
        answer_within_s=answer_within_s,
        slack_items=slack_items,
    )
    operator = OperatorSubject(common, items, handles_errors)
    checks: dict[str, Any] = {name: (rule, operator) for name, rule in OPERATOR_RULES.items()}
    checks |= {name: (rule, operator.subject()) for name, rule in ENGINE_RULES.items()}
    await _check("operator", operator.subject(), checks, rules)


async def _check(
    what: str,
    subject: Subject,
    checks: dict[str, tuple[Callable[[Any], Awaitable[None]], Any]],
    rules: Iterable[str] | None,
) -> None:
    violations: list[Exception] = []
    with no_warnings():
        try:
            await _expect_shape(subject)
        except Exception as failure:  # every rule would meet the same
            raise ExceptionGroup(f"the {what} cannot be checked", [_violation("", _expect_shape, failure)]) from None
        for name in checks if rules is None else rules:
            check, checked = checks[name]
            try:
                await check(checked)
            except Exception as failure:
                violations.append(_violation(name, check, failure))
    if violations:
        raise ExceptionGroup(f"the {what} breaks {len(violations)} rules of its contract", violations)


def _violation(rule: str, check: Any, failure: BaseException) -> ContractViolation:
    """Return the error of a rule's check as a violation of the rule; `rule` is empty before the first rule."""
    title = check.__name__.strip("_").partition("_")[2].replace("_", " ")
    failure = ungrouped(failure)
    text = str(failure) if isinstance(failure, ContractViolation) else f"the check met {failure!r}"
    violation = ContractViolation(f"{rule} ({title}): {text}" if rule else text, rule=rule)
    violation.__cause__ = failure
    return violation


_INSTEAD = (
    "write `async def generate(...)` that returns `ResponseStream(self.items(...), request, ...)`, "
    "and yield in `items`, a method of its own"
)


async def _expect_shape(subject: Subject) -> None:
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
