"""ActiveSequences: the blocks and prompt tokens in flight on every rank, by the requests that hold them.

Source: dynamo lib/kv-router/src/sequences/multi_worker.rs, ActiveSequencesMultiWorker. Other than there a request
is released by its object, which never releases a later one of the same id; freeing by id is for callers with only that.

tracking_hashes: the names by which the blocks of a prompt are counted as active.

Source: dynamo lib/kv-router/src/scheduling/config.rs, compute_seq_hashes_for_tracking. Other than there the random
numbers come from outside, and keyed hashes are not offered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from random import Random

from attrs import define, field

from pipeline.llm import sequence_hashes
from pipeline.settings import Variable, whole

from ..errors import BookingError, DuplicateRequest, RequestNotFound, WorkerNotFound
from ..hash_arrays import as_hashes
from ..numbers import RankNumbers
from ..prefix_tree import PrefixTree
from ..types import RequestSettings, WorkerRank
from .blocks import ActiveBlocks, HeldBlocks
from .columns import LoadColumns
from .field import Chosen, Holders, LoadField
from .ranks import Column, PotentialLoad, RankLoad, RankLoads, Slot

EXPIRY_S = 300.0
ACTIVE_REQUEST_EXPIRY = Variable(
    "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
    EXPIRY_S,
    "Seconds without a sign of a request after which its worker counts it no longer.",
    whole(1, unit=1.0),
)
"""Seconds after which a booked request counts as lost."""
CHECK_EVERY_S = 30.0
"""How often booking looks for expired requests, at most."""
SWEEP_EVERY_S = 60.0
"""How often the owner of the account should call `expire` even without bookings."""


@define
class SequenceLoad:
    """What a request puts on its worker.

    `hashes` are those of its complete prompt blocks, none where blocks are not tracked: in one account all local ones
    or all sequence hashes. `prefill_tokens` is what the worker must compute of the prompt, 0 where that is not tracked;
    `prefill_duration_s` how long that should take if there is a model for it.
    """

    hashes: Sequence[int] = ()
    prefill_tokens: int = 0
    prefill_duration_s: float | None = None


@define(eq=False)
class ActiveRequest(HeldBlocks):
    """One request in the load of its rank. A later request of the same id is another object, untouched by this one."""

    request_id: str
    booked_s: float = field(default=0.0, init=False)
    slot: Slot | None = field(default=None, init=False, repr=False)
    """Account of the rank it is booked on; None before it is booked."""

    @property
    def rank(self) -> WorkerRank:
        """The rank it is booked on."""
        assert self.slot is not None, "not booked"
        return self.slot.rank


@define(eq=False)
class ActiveSequences:
    """The account of one router. Not for several threads; `now_s` is always the same clock and does not go back.

    Requests older than `expiry_s` are given up as lost, when the next one is booked or `expire` is called.
    """

    expiry_s: float = EXPIRY_S
    numbers: RankNumbers = field(factory=RankNumbers)
    """Those of the accounts: the places of their figures in the columns."""
    _slots: dict[WorkerRank, Slot] = field(factory=dict, init=False)
    _columns: LoadColumns = field(factory=LoadColumns, init=False)
    _timed: dict[int, Slot] = field(factory=dict, init=False)
    """Those whose prompt tokens change by time alone."""
    _chosen: Chosen | None = field(default=None, init=False)
    _tree: PrefixTree = field(factory=PrefixTree, init=False)
    """The prompts of all live requests."""
    _bookings: dict[str, ActiveRequest] = field(factory=dict, init=False)
    _checked_s: float | None = field(default=None, init=False)

    def set_workers(self, workers: Mapping[int, range]) -> list[str]:
        """Keep an account for exactly these ranks, and for those that a booking opened and that are not registered yet.

        Ranks that were here and are no more lose their requests, whose ids are returned.
        """
        wanted = {WorkerRank(worker_id, rank) for worker_id, ranks in workers.items() for rank in ranks}
        lost = []
        for slot in list(self._slots.values()):
            if slot.rank in wanted:
                slot.lazy = False
            elif not slot.lazy:
                lost += self._close(slot)
        for rank in sorted(wanted - self._slots.keys()):
            self._open(rank, lazy=False)
        return lost

    def remove_worker(self, worker_id: int) -> list[str]:
        """Forgets all ranks of a worker, lazy ones included; returns the ids of the requests that were on it."""
        slots = [slot for rank, slot in self._slots.items() if rank.worker_id == worker_id]
        return [request_id for slot in slots for request_id in self._close(slot)]

    def book(
        self, request_id: str, rank: WorkerRank, load: SequenceLoad, now_s: float, *, registered_only: bool = False
    ) -> ActiveRequest:
        """Count a request of this id on a rank; raise what `add` raises."""
        request = ActiveRequest(request_id)
        self.add(request, rank, load, now_s, registered_only=registered_only)
        return request

    def add(
        self, request: ActiveRequest, rank: WorkerRank, load: SequenceLoad, now_s: float, *, registered_only: bool
    ) -> None:
        """Count the request on a rank until it is released, expires, or the worker is removed.

        Raises DuplicateRequest for an id that is booked on any rank, BookingError for a duration that is negative or
        not finite and for a hash that is not a u64. A rank without an account gets one; with `registered_only` this
        raises WorkerNotFound.
        """
        if self._checked_s is None or now_s - self._checked_s >= CHECK_EVERY_S:
            self.expire(now_s)
        request_id, duration_s = request.request_id, load.prefill_duration_s
        if (other := self._bookings.get(request_id)) is not None:
            raise DuplicateRequest(f"request {request_id} is booked already, on worker {other.rank.worker_id}")
        if duration_s is not None and not 0 <= duration_s < math.inf:
            raise BookingError(f"prefill_duration_s must be finite and not below 0, got {duration_s}")
        try:
            hashes = as_hashes(load.hashes)
        except (OverflowError, TypeError) as error:
            raise BookingError("a block hash is an integer from 0 to 2^64 - 1", cause=error) from error
        slot = self._slots.get(rank)
        if slot is None:
            if registered_only:
                raise WorkerNotFound(f"worker {rank.worker_id} has no rank {rank.dp_rank} here")
            slot = self._open(rank, lazy=True)
        slot.blocks.acquire(request, hashes)
        if load.prefill_tokens > 0:
            slot.prompts.add(request_id, load.prefill_tokens, duration_s, now_s)
        slot.request_ids[request_id] = None
        self._refresh(slot, now_s)
        request.slot, request.booked_s = slot, now_s
        self._bookings[request_id] = request

    def get(self, request_id: str) -> ActiveRequest | None:
        """Return the request that is booked under this id."""
        return self._bookings.get(request_id)

    def booked(self) -> list[ActiveRequest]:
        """Return the live requests, in the order of their booking."""
        return list(self._bookings.values())

    def load_of(self, request: ActiveRequest, now_s: float) -> SequenceLoad:
        """Return what the request puts on its worker from now on, apart from output blocks; nothing if not live."""
        if (slot := self._slot_of(request)) is None:
            return SequenceLoad()
        return SequenceLoad(request.hashes, *slot.prompts.left(request.request_id, now_s))

    def is_live(self, request: ActiveRequest) -> bool:
        """False once it was released, has expired, or its worker was removed."""
        return self._bookings.get(request.request_id) is request

    def finish_prefill(self, request: ActiveRequest, now_s: float) -> bool:
        """Stop counting the prompt; return False if that was done before, or the request is not live."""
        if (slot := self._slot_of(request)) is None:
            return False
        if removed := slot.prompts.remove(request.request_id, now_s):
            self._refresh(slot, now_s)
        return removed

    def grow(self, request: ActiveRequest, weight: float | None, now_s: float) -> bool:
        """Count another output block; `weight` decays what only this request holds. False if it is not live."""
        if (slot := self._slot_of(request)) is None:
            return False
        slot.blocks.add_output_block(request, weight)
        self._refresh(slot, now_s)
        return True

    def release(self, request: ActiveRequest, now_s: float) -> bool:
        """Take the request off its rank; return False if it is not live, which makes a second release harmless."""
        if (slot := self._slot_of(request)) is None:
            return False
        del self._bookings[request.request_id]
        del slot.request_ids[request.request_id]
        slot.prompts.remove(request.request_id, now_s)
        slot.blocks.release(request)
        if slot.lazy and not slot.request_ids:
            self._give_up(slot)
        else:
            self._refresh(slot, now_s)
        return True

    def mark_prefill_completed(self, request_id: str, now_s: float) -> None:
        """`finish_prefill` by id. Raises RequestNotFound for an id that is not booked."""
        self.finish_prefill(self._found(request_id), now_s)

    def add_output_block(self, request_id: str, weight: float | None, now_s: float) -> None:
        """`grow` by id. Raises RequestNotFound for an id that is not booked."""
        self.grow(self._found(request_id), weight, now_s)

    def free(self, request_id: str, now_s: float) -> bool:
        """Release what is booked under this id; return False if nothing is."""
        request = self._bookings.get(request_id)
        return request is not None and self.release(request, now_s)

    def free_if_worker(self, request_id: str, rank: WorkerRank, now_s: float) -> bool:
        """`free`, but only if the request is booked on exactly this rank."""
        request = self._bookings.get(request_id)
        return request is not None and request.rank == rank and self.release(request, now_s)

    def expire(self, now_s: float) -> list[str]:
        """Releases requests older than `expiry_s`; returns their ids."""
        self._checked_s = now_s
        expired = []
        for booking in list(self._bookings.values()):
            if now_s - booking.booked_s <= self.expiry_s:
                break  # booked in order of time
            self.release(booking, now_s)
            expired.append(booking.request_id)
        return expired

    def project(self, hashes: Sequence[int], ranks: Sequence[WorkerRank], now_s: float) -> RankLoads:
        """The load of these ranks now, and what the prompt with these hashes would add to each, whatever comes later.

        An unknown rank counts as idle. Fastest for the same tuple of ranks as last time.
        """
        chosen = self._choose(ranks)
        self._keep_time(now_s)
        return self._columns.loads(chosen, len(hashes), self._tree.find(as_hashes(hashes)))

    def field(self, hashes: Sequence[int], ranks: Sequence[WorkerRank], now_s: float) -> LoadField:
        """What `project` returns, before it is written out rank by rank: for a search among many."""
        chosen = self._choose(ranks)
        self._keep_time(now_s)
        return self._columns.field(chosen, len(hashes), self._tree.find(as_hashes(hashes)))

    def note_blocks_lately(self, now_s: float, *, shown: bool) -> None:
        """Let the blocks that each rank holds now go into the mean of those it held lately.

        The means show in the loads, in whole blocks, where `shown`, from now to the next call.
        """
        self._columns.note_blocks_lately((slot.number for slot in self._slots.values()), now_s, shown=shown)

    def holders(self) -> Holders:
        """Which ranks have which load now."""
        return self._columns.holders(slot.number for slot in self._slots.values())

    def prefill_tokens(self, ranks: Sequence[WorkerRank], now_s: float) -> Column:
        """That column of `project` alone."""
        chosen = self._choose(ranks)
        self._keep_time(now_s)
        return chosen.take(self._columns.prefill_tokens)

    def each_prefill_tokens(self, ranks: Sequence[WorkerRank], now_s: float) -> Iterator[int]:
        """The same one by one, for a reader that mostly stops at the first. Read it before anything changes."""
        chosen = self._choose(ranks)
        self._keep_time(now_s)
        return map(self._columns.prefill_tokens.__getitem__, chosen.numbers)

    def loads(self, now_s: float) -> list[RankLoad]:
        """What is in flight on every rank of `set_workers`. Changes nothing and may be called in any thread."""
        columns = self._columns
        return [
            RankLoad(
                slot.rank,
                slot.prompts.tokens_at(now_s) if slot.number in self._timed else columns.prefill_tokens[slot.number],
                columns.decode_blocks[slot.number],
            )
            for slot in list(self._slots.values())
            if not slot.lazy
        ]

    def potential_loads(
        self, hashes: Sequence[int], new_tokens: Sequence[int], ranks: Sequence[WorkerRank], now_s: float
    ) -> list[PotentialLoad]:
        """The load of each rank with the prompt added, of which it would have to compute so many tokens."""
        loads = self.project(hashes, ranks, now_s)
        columns = zip(
            ranks,
            (active + new for active, new in zip(loads.prefill_tokens, new_tokens, strict=True)),
            (active + new for active, new in zip(loads.decode_blocks, loads.additional_blocks, strict=True)),
            loads.requests,
            strict=True,
        )
        return [PotentialLoad(*rank, prefill, decode, requests) for rank, prefill, decode, requests in columns]

    def remaining_prefill_ms(self, rank: WorkerRank, now_s: float) -> int:
        """The modelled time until the rank has computed all its prompts. Raises MissingDuration."""
        slot = self._slots.get(rank)
        return 0 if slot is None else slot.prompts.remaining_ms_at(now_s)

    def ranks(self) -> list[WorkerRank]:
        """Every rank with an account, sorted."""
        return sorted(self._slots)

    def __len__(self) -> int:
        return len(self._bookings)

    def _found(self, request_id: str) -> ActiveRequest:
        if (request := self._bookings.get(request_id)) is None:
            raise RequestNotFound(f"request {request_id} is not booked")
        return request

    def _slot_of(self, request: ActiveRequest) -> Slot | None:
        """The account that counts the request; None if it is not live."""
        return request.slot if self._bookings.get(request.request_id) is request else None

    def _open(self, rank: WorkerRank, *, lazy: bool) -> Slot:
        """Open an empty account for a rank that has none."""
        number = self.numbers.hold(rank)
        self._columns.open(number)
        self._chosen = None
        self._slots[rank] = slot = Slot(rank, number, lazy, ActiveBlocks(self._tree, number))
        return slot

    def _close(self, slot: Slot) -> list[str]:
        """Give up an account and its requests, whose ids are returned."""
        lost = list(slot.request_ids)
        for request_id in lost:
            slot.blocks.release(self._bookings.pop(request_id))
        self._give_up(slot)
        return lost

    def _give_up(self, slot: Slot) -> None:
        number = slot.number
        self._columns.close(number)
        self._timed.pop(number, None)
        self.numbers.let_go(number)
        self._chosen = None
        del self._slots[slot.rank]

    def _refresh(self, slot: Slot, now_s: float) -> None:
        """Write the figures of a changed account into the columns."""
        number, prompts = slot.number, slot.prompts
        if prompts.timed:
            tokens, self._timed[number] = prompts.tokens_at(now_s), slot
        else:
            tokens = prompts.tokens
            self._timed.pop(number, None)
        self._columns.write(number, tokens, slot.blocks.active_blocks, len(slot.request_ids))

    def _keep_time(self, now_s: float) -> None:
        """Bring the prompt tokens that decrease by time up to it."""
        for number, slot in self._timed.items():
            self._columns.write(number, slot.prompts.tokens_at(now_s), slot.blocks.active_blocks, len(slot.request_ids))

    def _choose(self, ranks: Sequence[WorkerRank]) -> Chosen:
        """Find where the figures of these ranks stand. A pool gives the same tuple again and again."""
        if (known := self._chosen) is not None and known.ranks is ranks and isinstance(ranks, tuple):
            return known
        slots = [self._slots.get(rank) for rank in ranks]
        chosen = self._chosen = Chosen.of(ranks, [0 if slot is None else slot.number for slot in slots])
        return chosen


def tracking_hashes(local_hashes: Sequence[int], settings: RequestSettings, rng: Random) -> list[int]:
    """The sequence hashes of the prompt's complete blocks, from their local ones.

    None at all where active blocks are not tracked. Where a prompt's blocks cannot be those of another request (reuse
    is not assumed) each gets a name of its own.
    """
    if not settings.track_active_blocks:
        return []
    if not settings.assume_kv_reuse:
        return [rng.getrandbits(64) for _ in local_hashes]
    return sequence_hashes(local_hashes)
