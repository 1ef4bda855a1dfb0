"""What a paused generator holds: the locks, cancel scopes and task groups that are entered around its `yield`.

The next item may be read by another task, or much later, or never. A lock or a scope that was entered by one task
cannot be left by another, and what is locked meanwhile is locked for every other request.

CPython keeps the `__exit__` of each entered block on the stack of the paused frame, where its collector finds it. Under
an interpreter that does not, nothing is found here, and the kit relies on what happens when another task reads on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodDescriptorType,
    MethodType,
    WrapperDescriptorType,
)
from typing import Any

LOCK, CANCEL_SCOPE, TASK_GROUP = "LockHeldOverYield", "CancelScopeHeldOverYield", "TaskGroupHeldOverYield"

_LOOPS = ("anyio", "asyncio", "trio")
_KINDS = {
    "Lock": LOCK,
    "StrictFIFOLock": LOCK,
    "Condition": LOCK,
    "CapacityLimiter": LOCK,
    "CancelScope": CANCEL_SCOPE,
    "Timeout": CANCEL_SCOPE,
    "TaskGroup": TASK_GROUP,
    "NurseryManager": TASK_GROUP,
}
"""Class of a loop's library -> the failure. A semaphore is no lock: any task may release it."""
_TEXTS = {
    "cancel scope": CANCEL_SCOPE,
    "nursery stack": TASK_GROUP,
    "not holding this lock": LOCK,
    "lock you don't own": LOCK,
    "isn't holding any of this capacitylimiter": LOCK,
}
"""What a loop's library raises when another task leaves such a block -> the failure."""

_EXITS = ("__exit__", "__aexit__")
_PAUSED = (AsyncGeneratorType, GeneratorType, CoroutineType)
_BOUND = (MethodType, BuiltinFunctionType)
_UNBOUND = (FunctionType, MethodDescriptorType, WrapperDescriptorType)
_CONTAINERS = (dict, list, tuple)
_DEPTH = 8


def held_by(paused: Any) -> Iterator[tuple[str, str]]:
    """The failures, each with the class of what is held, of a paused generator and those it reads from."""
    for manager in _entered(paused, 0):
        kind = type(manager)
        top = kind.__module__.partition(".")[0]
        if top in ("_thread", "threading"):
            if kind.__name__ in ("lock", "RLock", "_RLock", "Condition"):
                yield LOCK, f"threading.{kind.__name__}"
        elif top in _LOOPS and (failure := _KINDS.get(kind.__name__)) is not None:
            yield failure, f"{top}.{kind.__name__}"


def failure_of(error: BaseException | None) -> str | None:
    """The failure that shows in what a loop's library raises when another task reads on; None for any other error."""
    while isinstance(error, BaseExceptionGroup):
        error = next((inner for inner in error.exceptions if failure_of(inner)), None)
    if not isinstance(error, RuntimeError):
        return None
    said = str(error).lower()
    return next((failure for text, failure in _TEXTS.items() if text in said), None)


def _entered(paused: Any, depth: int) -> Iterator[Any]:
    """The context managers that are entered in a paused frame."""
    if depth > _DEPTH:
        return
    held = gc.get_referents(paused)
    unbound = [part for part in held if isinstance(part, _UNBOUND) and part.__name__ in _EXITS]
    for part in held:
        if isinstance(part, _BOUND) and part.__name__ in _EXITS:
            yield from _within(part.__self__, depth)
        elif isinstance(part, _PAUSED):
            yield from _entered(part, depth + 1)
        elif any(getattr(type(part), leave.__name__, None) is leave for leave in unbound):  # as later Pythons keep it
            yield from _within(part, depth)


def _within(manager: Any, depth: int) -> Iterator[Any]:
    """The manager, and what one that was made by `contextlib` has entered in its turn."""
    yield manager
    if type(manager).__module__ == "contextlib":
        yield from _in_parts(gc.get_referents(manager), depth + 1)


def _in_parts(parts: Iterable[Any], depth: int) -> Iterator[Any]:
    if depth > _DEPTH:
        return
    for part in parts:
        if isinstance(part, _PAUSED):
            yield from _entered(part, depth + 1)
        elif isinstance(part, _BOUND) and part.__name__ in _EXITS:
            yield from _within(part.__self__, depth + 1)
        elif isinstance(part, _CONTAINERS) or type(part).__name__ == "deque":
            yield from _in_parts(gc.get_referents(part), depth + 1)
