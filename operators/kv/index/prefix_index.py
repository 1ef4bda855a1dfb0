"""KvIndex: which worker-rank holds which beginning of a prompt, as the engines' events say.

    RouterEvent ──apply──►  chains of blocks (index_chain)  ◄──find_matches── local hashes of a prompt

Blocks are found by their local hashes from the start, whatever the engines call them; an engine's own names serve for
its later events only. A rank holds a block only together with everything before it, so its score is exact.

Source: dynamo lib/kv-router/src/indexer/radix_tree.rs. Where releases differ or leave it open: a clear is one rank's; a
block removed from the middle takes what the rank holds below it along (a child stored there later is refused, and so is
a later removal of what went along); a store of a block the rank holds elsewhere moves it; one below itself is refused.
Other than there, names of two ranks may differ and each rank's keep working.

What an index holds, as the events that would make an empty one hold it.

One store for each run of a rank's blocks in which nothing branches off, however the blocks came, so equal contents have
equal dumps. Ranks are in order; of one rank a parent stands before its children; ids count from 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import compress

from attrs import define, field

from pipeline import InvalidArgument
from pipeline.protocols.kv import WORKER_DOMAIN, KvEvent, KvRemoved, KvStored, RouterEvent, StoredBlock

from ..types import WorkerRank
from .chain import BlockNotFound, Chain, UnsupportedResidencyDomain
from .holder import Blocks, Holder, Place, Rules, store


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


LIMIT_BLOCKS = 2**23
"""Blocks kept of one rank: more than any cache has, so an engine that never removes cannot fill the memory."""

_ZERO_OR_ONE = bytes.maketrans(b"01", b"\0\1")


class Outcome(StrEnum):
    """How an event was taken; the label under which it is counted."""

    OK = "ok"
    DUPLICATE_STORE = "duplicate_store"
    """A store of what the rank holds already: nothing changed."""
    OTHER_TIER = "other_tier"
    """An event of another tier than the device's, which this index is not about: nothing changed."""


class KvIndex:
    """See the module. Plain calls on one thread, none of them waits; an error leaves the index whole.

    A rank holds at most `limit_blocks`. Without `moves` a block the rank holds elsewhere is refused, not moved.
    """

    def __init__(self, limit_blocks: int = LIMIT_BLOCKS, *, moves: bool = True) -> None:
        self._rules = Rules(limit_blocks, moves)
        self._root = Chain()
        self._holders: dict[WorkerRank, Holder] = {}
        self._ranks: list[WorkerRank] = []  # by the number of their bit
        self._free: list[int] = []

    # -- questions

    def find_matches(self, local_hashes: Sequence[int]) -> dict[WorkerRank, int]:
        """How many blocks of the prompt, from its first, each rank holds; ranks that hold none are left out.

        The longer a match, the more is looked at; InvalidArgument is raised for a hash there that is no u64.
        """
        try:
            return self._find(local_hashes)
        except (OverflowError, TypeError) as error:
            raise InvalidArgument("a block hash is an integer from 0 to 2^64 - 1", cause=error) from error

    def workers(self) -> list[int]:
        """The workers known, in order: those that stored a block since they came, whatever they hold now."""
        return sorted({rank.worker_id for rank in self._holders})

    def ranks(self) -> list[WorkerRank]:
        """The worker-ranks known, in order."""
        return sorted(self._holders)

    def held_blocks(self, rank: WorkerRank) -> int:
        """How many blocks the rank holds."""
        holder = self._holders.get(rank)
        return len(holder.number_of) if holder is not None else 0

    def block_count(self) -> int:
        """How many different blocks the ranks hold; walks the chains."""
        return sum(len(chain.local) for chain in {chain for h in self._holders.values() for chain in h.counts})

    def dump(self, rank: WorkerRank | None = None) -> list[RouterEvent]:
        """What all ranks hold, or the one, as stores that make an empty index hold it; see `index_dump`."""
        ranks = self.ranks() if rank is None else [rank]
        return dump(self._root, [self._holders[known] for known in ranks if known in self._holders])

    # -- changes

    def apply(self, event: RouterEvent) -> Outcome:
        """Take one event. Raises one of `index_errors`, whose docstrings give what has changed then."""
        if event.residency_domain != WORKER_DOMAIN:
            raise UnsupportedResidencyDomain(f"not an event of the worker's own cache: {event.residency_domain[:40]!r}")
        if event.storage_tier != "device":
            return Outcome.OTHER_TIER
        change, rank = event.event.data, WorkerRank(event.worker_id, event.event.dp_rank)
        if isinstance(change, KvStored):
            names = [block.block_hash for block in change.blocks]
            return self.store(rank, change.parent_hash, names, [block.tokens_hash for block in change.blocks])
        if isinstance(change, KvRemoved):
            self.remove(rank, change.block_hashes)
        else:
            self.clear_rank(rank)
        return Outcome.OK

    def store(self, rank: WorkerRank, parent: int | None, names: Sequence[int], local_hashes: Sequence[int]) -> Outcome:
        """The rank holds these blocks, one below the other, the first below its block `parent`; none is no change."""
        if not names and not local_hashes:
            return Outcome.OK
        known = self._holders.get(rank)
        number = self._free[-1] if self._free else len(self._ranks)
        holder = known or Holder(rank, 1 << number)
        changed = store(self._root, holder, parent, Blocks.of(names, local_hashes), self._rules)
        if known is None:
            self._holders[rank] = holder
            if self._free:
                self._ranks[self._free.pop()] = rank
            else:
                self._ranks.append(rank)
        return Outcome.OK if changed else Outcome.DUPLICATE_STORE

    def remove(self, rank: WorkerRank, names: Sequence[int]) -> None:
        """The rank holds none of these blocks any more, nor what is below them.

        A name listed twice is unknown the second time; one that goes with a block above it in the list is not.
        """
        holder = self._holders.get(rank)
        wanted = dict.fromkeys(names)
        found = [name for name in wanted if name in holder.number_of] if holder is not None else []
        if holder is not None:
            holder.remove(found)
        if len(found) < len(names):
            there = set(found)
            missing = next((name for name in wanted if name not in there), names[-1])
            raise BlockNotFound(f"Failed to find block {missing} of {rank}")

    def remove_end(self, rank: WorkerRank, name: int, is_end: Callable[[int], bool]) -> None:
        """The rank holds this block no more unless something is below it; see `Holder.remove_end`. Unknown: nothing."""
        if (holder := self._holders.get(rank)) is not None:
            holder.remove_end(name, is_end)

    def restore(self, events: Iterable[RouterEvent]) -> None:
        """Applies a dump."""
        for event in events:
            self.apply(event)

    def clear_rank(self, rank: WorkerRank) -> None:
        """The rank holds nothing any more and stays known."""
        if (holder := self._holders.get(rank)) is not None:
            holder.let_go_all()

    def clear_worker(self, worker_id: int) -> None:
        """The same for all ranks of the worker."""
        for rank in [rank for rank in self._holders if rank.worker_id == worker_id]:
            self.clear_rank(rank)

    def remove_rank(self, rank: WorkerRank) -> None:
        """The rank is not known any more; no error if it was not."""
        if (holder := self._holders.pop(rank, None)) is not None:
            holder.let_go_all()
            self._free.append(holder.bit.bit_length() - 1)

    def remove_worker(self, worker_id: int) -> None:
        """The same for all ranks of the worker."""
        for rank in [rank for rank in self._holders if rank.worker_id == worker_id]:
            self.remove_rank(rank)

    # -- inside

    def _find(self, query: Sequence[int]) -> dict[WorkerRank, int]:
        scores: dict[WorkerRank, int] = {}
        chain, at, depth, active = self._root, 0, 0, 0
        while depth < len(query) and (below := chain.branch(at, query[depth])) is not None:
            matched = below.shared(query, depth)
            staying = leaving = 0  # both were active: who holds blocks of the chain below holds all that lead there
            for count, holders in below.ends.items():
                if count >= matched:
                    staying |= holders
                else:
                    leaving |= holders
                    self._score(scores, holders, depth + count)
            if elsewhere := active & ~(staying | leaving):
                self._score(scores, elsewhere, depth)
            chain, at, depth, active = below, matched, depth + matched, staying
        if active:
            self._score(scores, active, depth)
        return scores

    def _score(self, scores: dict[WorkerRank, int], holders: int, depth: int) -> None:
        """Notes the depth for each rank of the mask."""
        if holders & (holders - 1) == 0:
            scores[self._ranks[holders.bit_length() - 1]] = depth
        else:
            digits = f"{holders:b}"[::-1].encode().translate(_ZERO_OR_ONE)
            scores.update(dict.fromkeys(compress(self._ranks, digits), depth))
