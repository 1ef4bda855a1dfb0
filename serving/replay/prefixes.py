"""SharedPrefixes: hash ids for made up prompts, of which groups share the first blocks."""

from __future__ import annotations

from array import array
from itertools import count
from math import floor

from attrs import define, field

from pipeline import InvalidArgument


@define
class SharedPrefixes:
    """Gives out hash ids, each new but those of the first blocks of a group. Nothing is shared without groups."""

    ratio: float = 0.0
    groups: int = 0
    _next_id: count[int] = field(factory=lambda: count(1), init=False)
    _shared: dict[int, array[int]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise InvalidArgument(f"must be between 0 and 1, got {self.ratio}", field="shared_prefix_ratio")
        if self.groups < 0:
            raise InvalidArgument(f"cannot be negative, got {self.groups}", field="num_prefix_groups")

    @property
    def are_shared(self) -> bool:
        return self.ratio > 0 and self.groups > 0

    def shared_blocks(self, blocks: int) -> int:
        """How many of so many blocks are shared: the ratio of them, halves rounded up."""
        return floor(blocks * self.ratio + 0.5) if self.are_shared else 0

    def blocks(self, blocks: int, shared: int, group: int | None) -> array[int]:
        """The ids of a prompt's blocks; the first `shared` are those of the group."""
        ids = array("I")
        if group is not None:
            known = self._shared.setdefault(group, array("I"))
            while len(known) < shared:
                known.append(next(self._next_id))
            ids.extend(known[:shared])
        while len(ids) < blocks:
            ids.append(next(self._next_id))
        return ids
