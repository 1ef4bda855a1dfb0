"""Letting go of the request that an error belongs to, once the error is answered."""

from __future__ import annotations


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that needs no more of them, and of the errors that led to it.

    A traceback has frames, they have the request and mostly the error again: without this such a circle, with a prompt
    of maybe millions of tokens in it, would last until a garbage collection, and each one before would go through it.
    """
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions
