"""Stage: the common base of operators and engines: name, text, declared types, side branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Self

from .written import argument_texts


class Stage:
    """One place in a graph. Subclasses are operators and engines.

    A stage prints as it was written, `Name(arguments)`, except for arguments of no use and possible secrets:

    - an argument that is its parameter's default is left out, and so are functions given by keyword and observables;
    - numbers, booleans, None and members of enums are printed as they are, stages as their own text;
    - a text is printed if the parameter's type has it as a literal, if the class names the parameter in `shown_texts`,
      or if it has at most three characters; any other is `...`, and so are bytes;
    - a short list or tuple is printed item by item, any other collection as the number of its items;
    - any other object is printed as its `__name__` or `name`, else as the name of its class.
    """

    _written: tuple[tuple[Any, ...], dict[str, Any]]
    _name: str | None = None
    declares: tuple[Any, ...] | None = None
    """Types of this instance, in the order of its base's parameters; None: those of its class."""

    adds_time: bool = True
    """Whether the stage may take time itself; a trace then shows a span for it."""

    shown_texts: ClassVar[Sequence[str]] = ()
    """Names of parameters whose texts are never secret and may be printed."""

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
        """Return the same stage under another name."""
        other = copy(self)
        object.__setattr__(other, "_name", name)
        return other

    def branches(self) -> Mapping[str, Stage]:
        """Side graphs that hang off this stage, by label; drawn, and else only used by the stage itself."""
        return {}

    def members(self) -> Sequence[str]:
        """Names of the instances behind this stage, if it is a pool; drawn as they are at that moment."""
        return ()

    def parts(self) -> Sequence[Stage]:
        """Return the stages that this one consists of, without spans around them; a single stage is its only part."""
        return (self,)

    def __str__(self) -> str:
        args, kwargs = self._written
        return f"{self.name}({', '.join(argument_texts(type(self), args, kwargs, self.shown_texts, Stage))})"

    __repr__ = __str__
