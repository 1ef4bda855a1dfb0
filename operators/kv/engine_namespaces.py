"""Namespaces: which tenant a rank's blocks are of, for stores that do not say it because they continue one that did."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT_BLOCKS = 2**20


class AmbiguousNamespace(Exception):
    """The parent is known under two tenants, so whose the child is cannot be said."""


class Namespaces:
    """The tenant of each salted block of one rank, by the engine's name of it; over `limit_blocks` the oldest go.

    Blocks without a tenant are not kept: a parent that is not known has none. A block heard of under two tenants, or
    under one and none, stays ambiguous until the rank is cleared.
    """

    def __init__(self, limit_blocks: int = LIMIT_BLOCKS) -> None:
        self._limit_blocks = limit_blocks
        self._of: dict[int, str | None] = {}  # None: ambiguous

    def __len__(self) -> int:
        return len(self._of)

    def stored(self, names: Iterable[int], parent: int | None, namespace: str | None) -> str | None:
        """The tenant of a store: what it says, else its parent's. Raises AmbiguousNamespace; then nothing is noted."""
        of = self._of
        if namespace is None and parent is not None and parent in of:
            namespace = of[parent]
            if namespace is None:
                raise AmbiguousNamespace
        for name in names:
            if name in of:
                of[name] = namespace if of[name] == namespace else None
            elif namespace is not None:
                of[name] = namespace
        while len(of) > self._limit_blocks:
            del of[next(iter(of))]
        return namespace

    def removed(self, names: Iterable[int]) -> None:
        """The blocks are gone; an ambiguous one is remembered as such."""
        for name in names:
            if self._of.get(name) is not None:
                del self._of[name]

    def cleared(self) -> None:
        """All blocks are gone."""
        self._of.clear()
