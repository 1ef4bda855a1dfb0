"""RequestLimits: how much one request may hold, whatever carries it."""

from __future__ import annotations

from attrs import frozen

from .settings import setting


@frozen
class RequestLimits:
    """Bounds on the parts of one chat or completion request; 0 turns a bound off.

    A request beyond one of them is refused before its prompt is rendered or tokenized.
    """

    max_tools: int = setting(1536, "Tools that a chat may declare.")
