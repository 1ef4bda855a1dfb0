"""Declared types of stages, read at run time, and whether neighbours fit.

Static checkers see every edge; this repeats the check where graphs are put together from lists, configuration or
untyped code. What is not declared (`Any`, no annotation) fits everything; a type variable takes the type that arrives.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, Union, get_args, get_origin

from attrs import frozen

from .errors import LinkError
from .stage import Stage

_NUMBERS = (int, float, complex)  # as type checkers see them: each is accepted where a later one is expected


@frozen
class Signature:
    """What a stage takes and gives; for an operator also what it sends on and expects back."""

    takes: Any
    gives: Any
    sends: Any = None
    expects: Any = None

    @property
    def is_engine(self) -> bool:
        return self.sends is None

    @classmethod
    def of(cls, stage: Stage, base: type) -> Self:
        """From the arguments of the generic `base` that the stage, or its class, declares."""
        if stage.declares is not None:
            return cls(*stage.declares)
        given = getattr(stage, "__orig_class__", None) or type(stage)
        return cls(*_arguments(given, base))


def check_line(line: Sequence[tuple[Stage, Signature]]) -> tuple[Any, Any]:
    """Follow the request's type down the line and the item's type back up. Return the types of the whole line.

    Raise LinkError at the first misfit.
    """
    for stage, signature in line[:-1]:
        if signature.is_engine:
            raise LinkError(f"{stage} is an engine: nothing can follow it")
    _check_down(line)
    return _taken(line), _check_up(line)


def _taken(line: Sequence[tuple[Stage, Signature]]) -> Any:
    """Return the type taken by the first stage that does not merely pass it through."""
    for _, signature in line:
        if not isinstance(signature.takes, TypeVar):
            return signature.takes
        if signature.sends is not signature.takes:
            break
    return Any


def _check_down(line: Sequence[tuple[Stage, Signature]]) -> None:
    arriving: Any = Any
    for position, (stage, signature) in enumerate(line):
        if not assignable(arriving, signature.takes):
            above = line[position - 1][0]
            raise LinkError(
                f"{above} cannot be followed by {stage}: {above.name} sends {type_text(arriving)}, "
                f"{stage.name} takes {type_text(signature.takes)}"
            )
        arriving = _fill(signature.sends, {signature.takes: arriving})


def _check_up(line: Sequence[tuple[Stage, Signature]]) -> Any:
    """Return the type of the items that leave the line at its top."""
    *operators, (below, last) = line
    arriving = last.gives if last.is_engine else _fill(last.gives, {last.expects: Any})
    for stage, signature in reversed(operators):
        if not assignable(arriving, signature.expects):
            raise LinkError(
                f"{stage} cannot be followed by {below}: {below.name} gives {type_text(arriving)}, "
                f"{stage.name} expects {type_text(signature.expects)}"
            )
        arriving = _fill(signature.gives, {signature.expects: arriving})
        below = stage
    return Any if isinstance(arriving, TypeVar) else arriving


def _arguments(given: Any, base: Any) -> tuple[Any, ...]:
    """Return the arguments of `base` in the class or alias `given`, type variables filled in on the way up."""
    cls, args = get_origin(given) or given, get_args(given)
    filled = dict(zip(getattr(cls, "__parameters__", ()), args, strict=False))
    if cls is base:
        return tuple(_fill(p, filled) for p in base.__parameters__)
    for generic in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin = get_origin(generic) or generic
        if isinstance(origin, type) and issubclass(origin, base):
            return _arguments(_fill(generic, filled), base)
    return (Any,) * len(base.__parameters__)


def _fill(declared: Any, filled: dict[Any, Any]) -> Any:
    """Return the type with its variables replaced; those not in `filled` stay."""
    if isinstance(declared, TypeVar):
        return filled.get(declared, declared)
    if not getattr(declared, "__parameters__", ()) or isinstance(declared, type):
        return declared
    args = tuple(_fill(a, filled) for a in get_args(declared))
    if _is_union(declared):
        return Union[args]  # noqa: UP007  # a tuple of members
    origin: Any = get_origin(declared)
    return origin[args]


def handler_types(handler: Callable[..., Any]) -> tuple[Any, Any]:
    """(first parameter, item) of an async generator function, as annotated; `Any` where not."""
    try:
        hints = typing.get_type_hints(handler)
    except Exception:  # annotations may name what does not exist at run time
        return Any, Any
    args = get_args(hints.pop("return", Any))
    return next(iter(hints.values()), Any), args[0] if args else Any


def assignable(given: Any, wanted: Any) -> bool:
    """Return whether a value of type `given` may stand where `wanted` is declared, as far as run time knows."""
    if given is wanted or _unknown(given) or _unknown(wanted) or wanted is object:
        return True
    if _is_union(given):
        return all(assignable(member, wanted) for member in get_args(given))
    if _is_union(wanted):
        return any(assignable(given, member) for member in get_args(wanted))
    given_class, wanted_class = get_origin(given) or given, get_origin(wanted) or wanted
    if given is None or wanted is None:
        return given is wanted or type(None) in (given, wanted)
    if not (isinstance(given_class, type) and isinstance(wanted_class, type)):
        return True  # Literal, Callable and the like: left to the static checkers
    if given_class in _NUMBERS and wanted_class in _NUMBERS:
        return _NUMBERS.index(given_class) <= _NUMBERS.index(wanted_class)
    return issubclass(given_class, wanted_class) and _arguments_fit(given, wanted, wanted_class)


def _arguments_fit(given: Any, wanted: Any, origin: Any) -> bool:
    """Argument by argument, by the variance of the parameter; a builtin's parameters count as invariant."""
    parameters = getattr(origin, "__parameters__", ())
    ours, theirs = (_arguments(given, origin) if parameters else get_args(given)), get_args(wanted)
    if len(ours) != len(theirs):
        return True
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        parameter = parameters[position] if position < len(parameters) else None
        if not getattr(parameter, "__contravariant__", False) and not assignable(mine, other):
            return False
        if not getattr(parameter, "__covariant__", False) and not assignable(other, mine):
            return False
    return True


def type_text(declared: Any) -> str:
    """Return the type as it is written in code."""
    if declared in (None, type(None)):
        return "None"
    if _is_union(declared):
        return " | ".join(type_text(member) for member in get_args(declared))
    origin, args = get_origin(declared), get_args(declared)
    if isinstance(origin, type) and args:
        return f"{origin.__qualname__}[{', '.join(type_text(a) for a in args)}]"
    return declared.__qualname__ if isinstance(declared, type) else str(declared).replace("typing.", "")


def _unknown(declared: Any) -> bool:
    return declared is Any or declared is ... or isinstance(declared, (TypeVar, str, typing.ForwardRef))


def _is_union(declared: Any) -> bool:
    return get_origin(declared) in (Union, types.UnionType)
