"""GenerateContext: what an engine sees of one request's life, and the signal that its first token is there.

Source: dynamo lib/backend-common/src/engine.rs, GenerateContext.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from pipeline import AnyContext, Control


class FirstToken:
    """Fires once: the first token was seen, or what a decode worker waited for has arrived."""

    __slots__ = ("_due", "is_fired")

    def __init__(self) -> None:
        self.is_fired = False
        self._due: list[Callable[[], object]] = []

    def fire(self) -> None:
        """Calls back whoever waits; does nothing the second time."""
        if not self.is_fired:
            self.is_fired = True
            due, self._due = self._due, []
            for callback in due:
                callback()

    def on_fire(self, callback: Callable[[], object]) -> None:
        """Calls back when it fires; at once if it has."""
        if self.is_fired:
            callback()
        else:
            self._due.append(callback)


class GenerateContext:
    """The request's id, its stop and kill, and its metadata.

    `first_token` is there on decode workers only: an abort before the KV transfer is over may corrupt what the prefill
    worker still sends, so it waits for the first token.
    """

    __slots__ = ("_first_token", "control", "id", "inner", "metadata")

    def __init__(
        self,
        inner: AnyContext,
        first_token: FirstToken | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.inner = inner
        """The context itself, for tasks that outlive `generate`."""
        self.id: str = inner.id
        self.control: Control = inner.control
        self.metadata: Mapping[str, str] = {} if metadata is None else metadata
        self._first_token = first_token

    def __repr__(self) -> str:
        return f"GenerateContext(id={self.id!r}, state={self.control.state.name.lower()})"

    @property
    def is_stopped(self) -> bool:
        """True once stopped, and also once killed: look between two items, and end with a cancelled one."""
        return self.control.is_stopped

    @property
    def is_killed(self) -> bool:
        return self.control.is_killed

    def stopped(self) -> Coroutine[Any, Any, None]:
        """Await stop or kill; returns at once if that has happened already."""
        return self.control.stopped()

    def killed(self) -> Coroutine[Any, Any, None]:
        """Await kill; a plain stop does not wake it."""
        return self.control.killed()

    def stop_generating(self) -> None:
        """Asks for an early, orderly end of this request."""
        self.control.stop()

    def kill(self) -> None:
        """Ends this request at once."""
        self.control.kill()

    def notify_first_token(self) -> None:
        """Says that the first token is due although no item with one was yielded, as when the transfer is over.

        The first item with a token does it too. Idempotent; does nothing where nobody waits for it.
        """
        if self._first_token is not None:
            self._first_token.fire()
