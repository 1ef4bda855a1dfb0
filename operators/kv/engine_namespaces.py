"""Namespaces: which tenant a rank's blocks are of, for stores that do not say it because they continue one that did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.protocols.kv_events import StorageTier

LIMIT_BLOCKS = 2**20
_BITS: Mapping[StorageTier, int] = {"device": 1, "host_pinned": 2, "disk": 4, "external": 8}


class AmbiguousNamespace(Exception):
    """The parent is known under two tenants, so whose the child is cannot be said."""


class Namespaces:
    """The tenant of each salted block of one rank, by the engine's name of it; over `limit_blocks` the oldest go.

    Blocks without a tenant are not kept: a parent that is not known has none. A block heard of under two tenants, or
    under one and none, stays ambiguous until the rank is cleared. One that several tiers hold is gone with the last.
    """

    def __init__(self, limit_blocks: int = LIMIT_BLOCKS) -> None:
        self._limit_blocks = limit_blocks
        self._of: dict[int, str | None] = {}  # None: ambiguous
        self._tiers: dict[int, int] = {}  # as bits

    def __len__(self) -> int:
        return len(self._of)

    def of_store(self, parent: int | None, said: str | None) -> str | None:
        """The tenant of a store: what it says, else its parent's. Raises AmbiguousNamespace."""
        if said is not None or parent is None or parent not in self._of:
            return said
        inherited = self._of[parent]
        if inherited is None:
            raise AmbiguousNamespace
        return inherited

    def stored(self, names: Iterable[int], namespace: str | None, tier: StorageTier = "device") -> None:
        """The blocks are there, for that tenant."""
        of, tiers = self._of, self._tiers
        for name in names:
            if name in of:
                of[name] = namespace if of[name] == namespace else None
            elif namespace is not None:
                of[name] = namespace
                tiers[name] = 0
            else:
                continue
            tiers[name] |= _BITS[tier]
        while len(of) > self._limit_blocks:
            oldest = next(iter(of))
            del of[oldest], tiers[oldest]

    def removed(self, names: Iterable[int], tier: StorageTier = "device") -> None:
        """The blocks are gone from that tier; an ambiguous one is remembered as such even if it is in no other."""
        for name in names:
            if name in self._of:
                self._tiers[name] &= ~_BITS[tier]
                if not self._tiers[name] and self._of[name] is not None:
                    del self._of[name], self._tiers[name]
