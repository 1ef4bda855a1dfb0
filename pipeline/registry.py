"""Registry: typed values that ride along with a request inside one process.

*Shared* entries are read by anyone (`get`); *unique* entries are handed over once (`take`) or copied (`clone`).
Nothing in it crosses the network.

Source: dynamo lib/runtime/src/pipeline/registry.rs. Other than there, a take with the wrong type leaves the entry.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

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
