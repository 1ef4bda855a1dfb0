"""Stage: what operators and engines have in common: a name, their text, their types, their side branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Self

_PLAIN = (int, float, str, bytes, bool, type(None), list, tuple, dict, set)
_LONGEST_ARGUMENT = 40


class Stage:
    """One place in a graph. Subclasses are operators and engines."""

    _written: tuple[tuple[Any, ...], dict[str, Any]]
    _name: str | None = None
    declares: tuple[Any, ...] | None = None
    """Types known only of this instance, in the order of its base's parameters; None: those of its class."""

    adds_time: bool = True
    """Whether the stage can take time of its own, so that a trace shows it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        # How it was called, so that a graph prints as it was written. attrs classes are frozen at times.
        object.__setattr__(self, "_written", (args, kwargs))
        return self

    @property
    def name(self) -> str:
        """What `replace` and drawings call it: the class name unless `named`."""
        return self._name or type(self).__name__

    def named(self, name: str) -> Self:
        """The same stage under another name."""
        other = copy(self)
        object.__setattr__(other, "_name", name)
        return other

    def branches(self) -> Mapping[str, Stage]:
        """Side graphs that hang off this stage, by label; drawn, and else only used by the stage itself."""
        return {}

    def members(self) -> Sequence[str]:
        """Names of the instances behind this stage, if it is a pool; drawn as they are at that moment."""
        return ()

    def __str__(self) -> str:
        args, kwargs = self._written
        parts = [_argument(value) for value in args]
        parts += [f"{key}={_argument(value)}" for key, value in kwargs.items()]
        return f"{self.name}({', '.join(parts)})"

    __repr__ = __str__


def _argument(value: object) -> str:
    """The value as short text: as written if plain, else its own name, else its type's."""
    if isinstance(value, Stage):
        return str(value)
    if isinstance(value, _PLAIN):
        text = repr(value)
        return text if len(text) <= _LONGEST_ARGUMENT else text[: _LONGEST_ARGUMENT - 3] + "..."
    own = getattr(value, "__name__", None) or getattr(value, "name", None)
    return own if isinstance(own, str) else type(value).__name__
