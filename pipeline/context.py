"""Context: a request on its way down, and what all its stages share.

    Context(payload)  ──map / with_payload──►  Context(other payload)     same id, control, metadata, registry

Source: dynamo lib/runtime/src/pipeline/context.rs.

Registry: typed values that ride along with a request inside one process.

*Shared* entries are read by anyone (`get`); *unique* entries are handed over once (`take`) or copied (`clone`).
Nothing in it crosses the network.

Source: dynamo lib/runtime/src/pipeline/registry.rs. Other than there, a take with the wrong type leaves the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from copy import deepcopy
from typing import Any, Generic, TypeVar
from uuid import uuid4

from .control import Control
from .errors import RegistryError

V = TypeVar("V")


class Registry:
    """A bag of shared and unique entries, each key in one of the two."""

    __slots__ = ("_shared", "_unique")

    def __init__(self) -> None:
        self._shared: dict[str, Any] | None = None  # made when there is something to put in
        self._unique: dict[str, Any] | None = None

    def insert_shared(self, key: str, value: object) -> None:
        """Puts a value that every stage may read; replaces what the key held."""
        if self._unique:
            self._unique.pop(key, None)
        if self._shared is None:
            self._shared = {}
        self._shared[key] = value

    def insert_unique(self, key: str, value: object) -> None:
        """Puts a value that one stage may take; replaces what the key held."""
        if self._shared:
            self._shared.pop(key, None)
        if self._unique is None:
            self._unique = {}
        self._unique[key] = value

    def get(self, key: str, kind: type[V]) -> V:
        """The shared value itself. Raises RegistryError if it is missing or of another type."""
        return _checked(self._shared, key, kind)

    def get_optional(self, key: str, kind: type[V]) -> V | None:
        """The shared value, or None if there is none. Raises RegistryError if it is of another type."""
        return self.get(key, kind) if self._shared and key in self._shared else None

    def take_unique(self, key: str, kind: type[V]) -> V:
        """The unique value, which then is gone. Raises RegistryError, and leaves it, as `get` does."""
        value = _checked(self._unique, key, kind)
        assert self._unique is not None, "it holds the value"
        del self._unique[key]
        return value

    def clone_unique(self, key: str, kind: type[V]) -> V:
        """A deep copy of the unique value, which stays. Raises RegistryError as `get` does."""
        return deepcopy(_checked(self._unique, key, kind))


def _checked(entries: dict[str, Any] | None, key: str, kind: type[V]) -> V:
    if entries is None or key not in entries:
        raise RegistryError(f"no entry {key!r}")
    value = entries[key]
    if not isinstance(value, kind):
        raise RegistryError(f"entry {key!r} is a {type(value).__name__}, not a {kind.__name__}")
    return value


T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Context(Generic[T_co]):
    """One request: its payload, its id, its metadata, and the control every stage shares.

    `id` is a random UUID unless given and stays the same for every stage, retry and sub-request. `metadata` is text
    to text, keys sorted, and crosses the wire. `control` is the identity of the request's life: a context made from
    this one is stopped and killed with it. Contexts are cheap: a stage that changes the payload makes a new one.
    """

    __slots__ = ("__weakref__", "_registry", "_stages", "control", "id", "metadata", "payload", "trace")

    payload: T_co
    control: Control
    id: str
    metadata: dict[str, str]
    trace: object
    """Where spans of this request hang; owned by `pipeline.telemetry.tracing`."""

    def __init__(
        self,
        payload: T_co,
        *,
        id: str | None = None,
        metadata: Mapping[str, str] | None = None,
        control: Control | None = None,
    ) -> None:
        self.payload = payload
        self.id = str(uuid4()) if id is None else id
        self.metadata = dict(sorted(metadata.items())) if metadata else {}
        self.control = Control() if control is None else control
        self.trace = None
        self._registry: Registry | None = None
        self._stages: list[str] = []

    def __repr__(self) -> str:
        return f"Context(id={self.id!r}, state={self.control.state.name.lower()}, payload={self.payload!r})"

    # -- the payload changes, the request stays

    def map(self, change: Callable[[T_co], U]) -> Context[U]:
        """The same request with `change(payload)`; an error of `change` goes to the caller and nothing is made."""
        return self.with_payload(change(self.payload))

    def with_payload(self, payload: U) -> Context[U]:
        """The same request with another payload: id, control, metadata, registry, stages and trace are shared."""
        other: Context[U] = Context.__new__(Context)
        other.payload = payload
        other.id = self.id
        other.metadata = self.metadata
        other.control = self.control
        other.trace = self.trace
        other._registry = self.registry
        other._stages = self._stages
        return other

    def transfer(self, payload: U) -> tuple[T_co, Context[U]]:
        """The payload, and the same request with another one."""
        return self.payload, self.with_payload(payload)

    def into_parts(self) -> tuple[T_co, Context[None]]:
        """The payload, and the request without it; `with_payload` on the second joins them again."""
        return self.transfer(None)

    def child(self, payload: U, *, linked: bool = True) -> Context[U]:
        """A sub-request: same id, metadata, registry and trace, a control of its own.

        Stop and kill reach it from this one, never the other way. Unlinked, they do not reach it at all: for work
        that must outlive the request. The caller keeps the child alive as long as it matters.
        """
        other = self.with_payload(payload)
        other.control = Control()
        if linked:
            self.control.link_child(other.control)
        return other

    # -- what rides along

    @property
    def registry(self) -> Registry:
        """Typed values shared by every stage in this process."""
        if self._registry is None:
            self._registry = Registry()
        return self._registry

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages passed so far, in order."""
        return tuple(self._stages)

    def add_stage(self, name: str) -> None:
        """Notes that the request passed a stage."""
        self._stages.append(name)

    # -- control, at hand

    @property
    def is_stopped(self) -> bool:
        """True once stopped, and also once killed."""
        return self.control.is_stopped

    @property
    def is_killed(self) -> bool:
        return self.control.is_killed

    def stop(self) -> None:
        """Asks the producer for an early, orderly end."""
        self.control.stop()

    stop_generating = stop

    def kill(self) -> None:
        """Ends the request at once."""
        self.control.kill()

    def stopped(self) -> Coroutine[Any, Any, None]:
        """Await stop or kill; returns at once if that has happened already."""
        return self.control.stopped()

    def killed(self) -> Coroutine[Any, Any, None]:
        """Await kill."""
        return self.control.killed()


AnyContext = Context[Any]
