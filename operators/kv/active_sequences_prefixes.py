"""ActivePrefixes: how much of a prompt is active on which ranks, asked for all ranks at once.

Source: dynamo lib/kv-router/src/sequences/prompt_membership_trie.rs. Other than there a plain dict: a sequence hash
stands for its whole prefix, so a bit mask of the ranks that hold it says all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, count

from attrs import define, field

_AS_BITS = bytes.maketrans(b"01", b"\x00\x01")


@define
class ActivePrefixes:
    """Sequence hash -> bit mask of the slots on which it is active."""

    _masks: dict[int, int] = field(factory=dict)

    def add(self, slot: int, hashes: Iterable[int]) -> None:
        masks, bit = self._masks, 1 << slot
        for block in hashes:
            masks[block] = masks.get(block, 0) | bit

    def drop(self, slot: int, hashes: Iterable[int]) -> None:
        """Forgets hashes of a slot, which must hold them."""
        masks, bit = self._masks, 1 << slot
        for block in hashes:
            if mask := masks[block] ^ bit:
                masks[block] = mask
            else:
                del masks[block]

    def shared_blocks(self, hashes: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Groups of slots by how many blocks of the prompt's start are active on them; slots with none are left out."""
        masks = self._masks
        groups: list[tuple[int, list[int]]] = []
        alive = masks.get(hashes[0], 0) if hashes else 0
        for depth, block in enumerate(hashes):
            if not alive:
                return groups
            still = alive & masks.get(block, 0)
            if still != alive:
                groups.append((depth, _slots(alive ^ still)))
                alive = still
        if alive:
            groups.append((len(hashes), _slots(alive)))
        return groups


def _slots(mask: int) -> list[int]:
    """The positions of the bits that are set."""
    return list(compress(count(), f"{mask:b}"[::-1].encode().translate(_AS_BITS)))
