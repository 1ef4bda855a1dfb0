"""KvIndex: which worker-rank holds which beginning of a prompt, by the engines' KV events.

    RouterEvent ──apply──►  runs of blocks (BlockRun)  ◄──find_matches── local hashes of a prompt

Blocks are found by their local hashes from the start, whatever the engines' names; an engine's own names are used
for its later events only. A rank holds a block only together with everything before it, so its score is exact.

Source: dynamo lib/kv-router/src/indexer/radix_tree.rs. Where releases differ or leave it open: a clear is one rank's; a
block removed from the middle takes what the rank holds below it along (a child stored there later is refused, and so is
a later removal of what went along); a store of a block the rank holds elsewhere moves it; one below itself is refused.
Other than there, names of two ranks may differ and each rank's keep working.

dump: the content of an index as the events that restore it in an empty one.

One store for each stretch of a rank's blocks in which nothing branches off, however the blocks came, so equal contents
have equal dumps. Ranks are in order; of one rank a parent stands before its children; ids count from 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from attrs import define, field

from pipeline import InvalidArgument
from pipeline.protocols.kv import WORKER_DOMAIN, KvEvent, KvRemoved, KvStored, RouterEvent, StoredBlock, StoredBlocks

from ..numbers import Matches, RankNumbers
from ..types import WorkerRank
from .block_run import BlockNotFound, BlockRun, UnsupportedResidencyDomain
from .rank_blocks import Blocks, Place, RankBlocks, store


def dump(root: BlockRun, blocks: Iterable[RankBlocks]) -> list[RouterEvent]:
    """See the module."""
    stores = [(held.rank, change) for held in blocks for change in _Branching.of(held).stores(root)]
    return [RouterEvent(r.worker_id, KvEvent(i, change, r.dp_rank)) for i, (r, change) in enumerate(stores)]


@define
class _Branching:
    """Where one rank's runs leave each other: run -> places in order, and place -> the runs that leave there."""

    held: RankBlocks
    places: dict[BlockRun, list[int]] = field(factory=dict)
    leaving: dict[Place, list[BlockRun]] = field(factory=dict)

    @classmethod
    def of(cls, held: RankBlocks) -> _Branching:
        found = cls(held)
        for run in held.counts:
            if run.parent is not None:
                found.leaving.setdefault((run.parent, run.at), []).append(run)
        for run, at in found.leaving:
            found.places.setdefault(run, []).append(at)
        for places in found.places.values():
            places.sort()
        return found

    def stores(self, root: BlockRun) -> Iterator[KvStored]:
        todo: list[tuple[int | None, Place]] = [(None, way) for way in self._ways(root, 0)]
        while todo:
            parent, (run, at) = todo.pop()
            blocks = self._blocks(run, at)
            while len(ways := self._ways(run, at := self._end(run, at))) == 1:
                run, at = ways[0]
                blocks += self._blocks(run, at)
            yield KvStored(parent, blocks)
            todo += [(blocks[-1].block_hash, way) for way in ways]

    def _blocks(self, run: BlockRun, at: int) -> list[StoredBlock]:
        """The blocks from there to the next branch."""
        end = self._end(run, at)
        return [StoredBlock(*pair) for pair in zip(self.held.names(run)[at:end], run.local[at:end], strict=True)]

    def _end(self, run: BlockRun, at: int) -> int:
        """The first place behind this one where a run leaves, else the end of what the rank holds."""
        places = self.places.get(run, [])
        following = bisect_right(places, at)
        return places[following] if following < len(places) else self.held.counts[run]

    def _ways(self, run: BlockRun, at: int) -> list[Place]:
        """How the rank's blocks go on from there, the last first."""
        ways: list[Place] = [(below, 0) for below in self.leaving.get((run, at), [])]
        if at < self.held.counts.get(run, 0):
            ways.append((run, at))
        return sorted(ways, key=lambda way: way[0].local[way[1]], reverse=True)


LIMIT_BLOCKS = 2**23
"""Blocks kept of one rank: more than any cache has, so an engine that never removes cannot fill the memory."""


class Outcome(StrEnum):
    """How an event was applied; the label under which it is counted."""

    OK = "ok"
    DUPLICATE_STORE = "duplicate_store"
    """A store of what the rank holds already: nothing changed."""
    OTHER_TIER = "other_tier"
    """An event of another tier than the device's, which this index does not cover: nothing changed."""


class KvIndex:
    """See the module. Plain calls on one thread that never wait; an error leaves the index intact.

    A rank holds at most `limit_blocks`. With the `numbers` of others, what they find of the same ranks can be joined.
    """

    def __init__(self, limit_blocks: int = LIMIT_BLOCKS, *, numbers: RankNumbers | None = None) -> None:
        self._limit_blocks = limit_blocks
        self._root = BlockRun()
        self._held_by: dict[WorkerRank, RankBlocks] = {}
        self._numbers = RankNumbers() if numbers is None else numbers

    # -- queries

    def find_matches(self, local_hashes: Sequence[int]) -> Matches:
        """Return how many blocks of the prompt, from its first, each rank holds; ranks that hold none are left out.

        Hashes are read as far as some rank matches; raises InvalidArgument for one there that is not a u64.
        """
        try:
            return self._find(local_hashes)
        except (OverflowError, TypeError) as error:
            raise InvalidArgument("a block hash is an integer from 0 to 2^64 - 1", cause=error) from error

    def workers(self) -> list[int]:
        """The known workers, in order: those that stored a block since they were added, whatever they hold now."""
        return sorted({rank.worker_id for rank in self._held_by})

    def ranks(self) -> list[WorkerRank]:
        """The known worker-ranks, in order."""
        return sorted(self._held_by)

    def held_blocks(self, rank: WorkerRank) -> int:
        """The number of blocks the rank holds."""
        held = self._held_by.get(rank)
        return len(held.number_of) if held is not None else 0

    def block_count(self) -> int:
        """The number of different blocks that ranks hold; walks all runs."""
        return sum(len(run.local) for run in {run for h in self._held_by.values() for run in h.counts})

    def dump(self, rank: WorkerRank | None = None) -> list[RouterEvent]:
        """The blocks of all ranks, or of one, as stores that restore them in an empty index; see `dump`."""
        ranks = self.ranks() if rank is None else [rank]
        return dump(self._root, [self._held_by[known] for known in ranks if known in self._held_by])

    # -- changes

    def apply(self, event: RouterEvent) -> Outcome:
        """Apply one event. Raises a KvIndexError, whose docstring names what has changed then."""
        if event.residency_domain != WORKER_DOMAIN:
            raise UnsupportedResidencyDomain(f"not an event of the worker's own cache: {event.residency_domain[:40]!r}")
        if event.storage_tier != "device":
            return Outcome.OTHER_TIER
        change, rank = event.event.data, WorkerRank(event.worker_id, event.event.dp_rank)
        if isinstance(change, KvStored):
            blocks = StoredBlocks.of(change.blocks)
            return self.store(rank, change.parent_hash, blocks.block_hashes, blocks.tokens_hashes)
        if isinstance(change, KvRemoved):
            self.remove(rank, change.block_hashes)
        else:
            self.clear_rank(rank)
        return Outcome.OK

    def store(self, rank: WorkerRank, parent: int | None, names: Sequence[int], local_hashes: Sequence[int]) -> Outcome:
        """Give the rank these blocks, one below the other, the first below its block `parent`."""
        if not names and not local_hashes:
            return Outcome.OK
        blocks, held = Blocks.of(names, local_hashes), self._held_by.get(rank)
        if held is not None:
            is_new = store(self._root, held, parent, blocks, self._limit_blocks)
            return Outcome.OK if is_new else Outcome.DUPLICATE_STORE
        number = self._numbers.hold(rank)
        try:
            store(self._root, held := RankBlocks(rank, 1 << number), parent, blocks, self._limit_blocks)
        except BaseException:
            self._numbers.let_go(number)
            raise
        self._held_by[rank] = held
        return Outcome.OK

    def remove(self, rank: WorkerRank, names: Sequence[int]) -> None:
        """Remove these blocks from the rank, and everything below them.

        Raises BlockNotFound, with the others removed, for a name that the rank does not hold or that is listed twice,
        but not for one that was removed with a block above it in the list.
        """
        held = self._held_by.get(rank)
        missing = list(dict.fromkeys(names)) if held is None else held.remove(names)
        if missing:
            raise BlockNotFound(f"Failed to find block {missing[0]} of {rank}")

    def clear_rank(self, rank: WorkerRank) -> None:
        """Remove all blocks of the rank, which stays known."""
        if (held := self._held_by.get(rank)) is not None:
            held.let_go_all()

    def clear_worker(self, worker_id: int) -> None:
        """Clear all ranks of the worker."""
        for rank in [rank for rank in self._held_by if rank.worker_id == worker_id]:
            self.clear_rank(rank)

    def remove_rank(self, rank: WorkerRank) -> None:
        """Remove the rank and all its blocks, if it is known."""
        if (held := self._held_by.pop(rank, None)) is not None:
            held.let_go_all()
            self._numbers.let_go(held.bit.bit_length() - 1)

    def remove_worker(self, worker_id: int) -> None:
        """Remove all ranks of the worker."""
        for rank in [rank for rank in self._held_by if rank.worker_id == worker_id]:
            self.remove_rank(rank)

    # -- inside

    def _find(self, query: Sequence[int]) -> Matches:
        groups: list[tuple[int, int]] = []
        run, at, depth, active = self._root, 0, 0, 0
        while depth < len(query) and (below := run.branch(at, query[depth])) is not None:
            matched = below.shared(query, depth)
            staying = leaving = 0  # both were active: a rank with blocks of the run below has all before it
            for count, ranks in below.ends.items():
                if count >= matched:
                    staying |= ranks
                else:
                    leaving |= ranks
                    groups.append((depth + count, ranks))
            if elsewhere := active & ~(staying | leaving):
                groups.append((depth, elsewhere))
            run, at, depth, active = below, matched, depth + matched, staying
        if active:
            groups.append((depth, active))
        return Matches(groups, self._numbers.ranks)
