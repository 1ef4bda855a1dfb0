"""ActivePrefixes: how much of a prompt is active on which ranks, asked for all ranks at once.

Source: dynamo lib/kv-router/src/sequences/prompt_membership_trie.rs. Other than there a plain dict: a sequence hash
stands for its whole prefix, so a bit mask of the ranks that hold it says all.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress, count, repeat

from attrs import define, field

_EVERY_SLOT = -1
_AS_BITS = bytes.maketrans(b"01", b"\x00\x01")


@define
class ActivePrefixes:
    """Sequence hash -> bit mask of the slots on which it is active."""

    _masks: dict[int, int] = field(factory=dict)

    def add(self, slot: int, hashes: Iterable[int]) -> None:
        masks, bit = self._masks, 1 << slot
        before, after = 0, bit
        for block in hashes:
            if (mask := masks.get(block, 0)) != before:
                before, after = mask, mask | bit
            masks[block] = after  # neighbours share one number: hundreds of slots make it a large one

    def drop(self, slot: int, hashes: Iterable[int]) -> None:
        """Forgets hashes of a slot, which must hold them."""
        masks, bit = self._masks, 1 << slot
        before, after = bit, 0
        for block in hashes:
            if (mask := masks[block]) != before:
                before, after = mask, mask ^ bit
            if after:
                masks[block] = after
            else:
                del masks[block]

    def shared_blocks(self, hashes: Iterable[int]) -> list[tuple[int, list[int]]]:
        """Groups of slots by how many blocks of the prompt's start are active on them; slots with none are left out.

        Reads the hashes once and no further than some slot shares them.
        """
        groups: list[tuple[int, list[int]]] = []
        alive, depth = _EVERY_SLOT, 0
        for mask in map(self._masks.get, hashes, repeat(0)):
            if mask != alive:  # in a chain of prefixes the next block mostly has the same holders
                still = alive & mask
                if depth and still != alive:
                    groups.append((depth, _slots(alive ^ still)))
                alive = still
                if not alive:
                    return groups
            depth += 1
        if depth:
            groups.append((depth, _slots(alive)))
        return groups


def _slots(mask: int) -> list[int]:
    """The positions of the bits that are set."""
    return list(compress(count(), f"{mask:b}"[::-1].encode().translate(_AS_BITS)))
