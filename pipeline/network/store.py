"""Store: keys and values every process of a deployment sees, with revisions, leases and watches.

The one thing a discovery backend has to bring. Sized for what a key-value bucket of NATS can do: create, replace by
revision, delete, watch a prefix, and a time to live for each key that its owner renews.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from attrs import frozen

from pipeline.rx import Observable


@frozen
class Put:
    """A key has this value now."""

    key: str
    value: bytes
    revision: int


@frozen
class Gone:
    """A key is gone: deleted, or its lease ran out."""

    key: str


Change = Put | Gone


@frozen
class Written:
    """What a write came to, with the revision that holds now.

    `created`: it was done. `exists`: the key was there, and its value stays. `missing`: there is nothing to replace.
    `retry`: somebody else wrote in between.
    """

    outcome: Literal["created", "exists", "missing", "retry"]
    revision: int = 0


class Store(ABC):
    """See the module. Keys are parts between slashes, the first ones the bucket; they may hold any text.

    A key lives as long as the process that wrote it last keeps renewing it, which the store does by itself. What was
    abandoned, as by a crash, is gone at most the store's time to live later. No call waits for ever.
    """

    @abstractmethod
    async def create(self, key: str, value: bytes) -> Written:
        """Writes a new key; one that exists stays as it is."""

    @abstractmethod
    async def replace(self, key: str, value: bytes, revision: int) -> Written:
        """Writes a known key if it still has that revision; a concurrent delete wins."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Removes the key; a missing one is fine. If that fails the key is not renewed any more."""

    @abstractmethod
    async def get(self, key: str) -> Put | None:
        """The key's value and revision, None if there is none."""

    @abstractmethod
    async def entries(self, prefix: str = "") -> dict[str, bytes]:
        """All values under the prefix, by full key, in the order of keys."""

    @abstractmethod
    def watch(self, prefix: str = "") -> Observable[Change]:
        """What is under the prefix now, then every change: no gap, nothing twice, the last state always comes.

        Never ends while the store is open, then completes. Disposing releases.
        """

    @abstractmethod
    def abandon(self, key: str) -> None:
        """Stops renewing the key."""

    @abstractmethod
    async def close(self) -> None:
        """Removes what this process created and completes all watches."""
