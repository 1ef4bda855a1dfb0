"""KeptHashes: the block hashes of a trace's prompts, made once for all runs that replay it in one process."""

from __future__ import annotations

from typing import TypeAlias

from attrs import define, field

from pipeline.llm import LocalHashes

_LIMIT_BLOCKS = 4_000_000
"""Their hashes take 64 MB."""

_Key: TypeAlias = tuple[int, int, int]
"""Identity of a prompt, size of its blocks in tokens, seed."""


@define(eq=False)
class KeptHashes:
    """Hashes of the first prompts that ask, up to a limit: each run asks in about the same order.

    Prompts are known by their identity: they live as long as this.
    """

    _blocks: int = field(default=0, init=False)
    _known: dict[_Key, LocalHashes] = field(factory=dict, init=False)

    def find(self, key: _Key) -> LocalHashes | None:
        """Return what is kept there."""
        return self._known.get(key)

    def keep(self, key: _Key, hashes: LocalHashes) -> LocalHashes:
        """Keep these hashes, as long as there is room; return them."""
        if self._blocks + len(hashes) <= _LIMIT_BLOCKS:
            self._blocks += len(hashes)
            self._known[key] = hashes
        return hashes
