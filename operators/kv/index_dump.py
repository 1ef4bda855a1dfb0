"""What an index holds, as the events that would make an empty one hold it.

One store for each run of a rank's blocks in which nothing branches off, however the blocks came, so equal contents have
equal dumps. Ranks are in order; of one rank a parent stands before its children; ids count from 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from attrs import define, field

from pipeline.protocols.kv_events import KvEvent, KvStored, RouterEvent, StoredBlock

from .index_chain import Chain
from .index_holder import Holder
from .index_store import Place


def dump(root: Chain, holders: Iterable[Holder]) -> list[RouterEvent]:
    """See the module."""
    stores = [(holder.rank, change) for holder in holders for change in _Branching.of(holder).runs(root)]
    return [RouterEvent(r.worker_id, KvEvent(i, change, r.dp_rank)) for i, (r, change) in enumerate(stores)]


@define
class _Branching:
    """Where one rank's chains leave each other: chain -> places in order, and place -> the chains that leave there."""

    holder: Holder
    places: dict[Chain, list[int]] = field(factory=dict)
    leaving: dict[Place, list[Chain]] = field(factory=dict)

    @classmethod
    def of(cls, holder: Holder) -> _Branching:
        found = cls(holder)
        for chain in holder.counts:
            if chain.parent is not None:
                found.leaving.setdefault((chain.parent, chain.at), []).append(chain)
        for chain, at in found.leaving:
            found.places.setdefault(chain, []).append(at)
        for places in found.places.values():
            places.sort()
        return found

    def runs(self, root: Chain) -> Iterator[KvStored]:
        todo: list[tuple[int | None, Place]] = [(None, way) for way in self._ways(root, 0)]
        while todo:
            parent, (chain, at) = todo.pop()
            blocks = self._blocks(chain, at)
            while len(ways := self._ways(chain, at := self._end(chain, at))) == 1:
                chain, at = ways[0]
                blocks += self._blocks(chain, at)
            yield KvStored(parent, blocks)
            todo += [(blocks[-1].block_hash, way) for way in ways]

    def _blocks(self, chain: Chain, at: int) -> list[StoredBlock]:
        """The blocks from there to the next branch."""
        end = self._end(chain, at)
        return [StoredBlock(*pair) for pair in zip(self.holder.names(chain)[at:end], chain.local[at:end], strict=True)]

    def _end(self, chain: Chain, at: int) -> int:
        """The first place behind this one where a chain leaves, else the end of what the rank holds."""
        places = self.places.get(chain, [])
        following = bisect_right(places, at)
        return places[following] if following < len(places) else self.holder.counts[chain]

    def _ways(self, chain: Chain, at: int) -> list[Place]:
        """How the rank's blocks go on from there, the last first."""
        ways: list[Place] = [(below, 0) for below in self.leaving.get((chain, at), [])]
        if at < self.holder.counts.get(chain, 0):
            ways.append((chain, at))
        return sorted(ways, key=lambda way: way[0].local[way[1]], reverse=True)
