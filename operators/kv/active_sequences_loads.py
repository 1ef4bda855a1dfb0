"""RankLoads: the load of many ranks as columns of plain numbers, and the slots they are kept in.

Source: dynamo lib/kv-router/src/sequences/prompt_registry.rs. Other than there one column per number: a selection
reads them for hundreds of ranks, and a column is taken in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from attrs import define, field, frozen

from .active_sequences_blocks import ActiveBlocks
from .prompt_load import PromptLoad
from .worker_rank import WorkerRank

Column = Sequence[int]


@frozen(eq=False)
class RankLoads:
    """The load of some ranks, a column each, in the order the ranks were asked for.

    `additional_blocks` is what the prompt asked about would add on top of `decode_blocks`.
    """

    prefill_tokens: Column
    decode_blocks: Column
    requests: Column
    additional_blocks: Column

    @classmethod
    def idle(cls, ranks: int, additional_blocks: int = 0) -> RankLoads:
        """The load of so many ranks that do nothing."""
        zeros = [0] * ranks
        return cls(zeros, zeros, zeros, [additional_blocks] * ranks)


@frozen
class PotentialLoad:
    """What one rank would have to do with a prompt added; `additional` parts are included."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int = 0


@frozen
class RankLoad:
    """What is in flight on one rank."""

    rank: WorkerRank
    prefill_tokens: int
    decode_blocks: int


@define(eq=False)
class Slot:
    """The account of one rank. A `lazy` one came with a booking and goes with the last."""

    rank: WorkerRank
    number: int
    lazy: bool
    blocks: ActiveBlocks = field(factory=ActiveBlocks)
    prompts: PromptLoad = field(factory=PromptLoad)
    request_ids: dict[str, None] = field(factory=dict)


@define(eq=False)
class Slots:
    """Accounts by rank, their figures in columns by number. Number 0 stays idle and stands for ranks without one."""

    by_rank: dict[WorkerRank, Slot] = field(factory=dict)
    _prefill_tokens: list[int] = field(factory=lambda: [0])
    _decode_blocks: list[int] = field(factory=lambda: [0])
    _requests: list[int] = field(factory=lambda: [0])
    _timed: dict[int, Slot] = field(factory=dict)
    _free: list[int] = field(factory=list)
    _asked: Sequence[WorkerRank] | None = None
    _positions: dict[int, int] = field(factory=dict)
    _take: Callable[[Sequence[int]], Sequence[int]] = field(default=list)

    def open(self, rank: WorkerRank, *, lazy: bool) -> Slot:
        """A new, empty account for a rank that has none."""
        if self._free:
            number = self._free.pop()
        else:
            number = len(self._requests)
            for column in (self._prefill_tokens, self._decode_blocks, self._requests):
                column.append(0)
        self._asked = None
        slot = self.by_rank[rank] = Slot(rank, number, lazy)
        return slot

    def close(self, slot: Slot) -> None:
        """Gives an account up with all that is in it."""
        number = slot.number
        self._prefill_tokens[number] = self._decode_blocks[number] = self._requests[number] = 0
        self._timed.pop(number, None)
        self._free.append(number)
        self._asked = None
        del self.by_rank[slot.rank]

    def refresh(self, slot: Slot, now_s: float) -> None:
        """Writes the figures of a changed account into the columns."""
        number = slot.number
        self._prefill_tokens[number] = slot.prompts.tokens_at(now_s)
        self._decode_blocks[number] = slot.blocks.active_blocks
        self._requests[number] = len(slot.request_ids)
        if slot.prompts.is_timed:
            self._timed[number] = slot
        else:
            self._timed.pop(number, None)

    def loads(
        self, ranks: Sequence[WorkerRank], now_s: float, blocks: int, shared: Sequence[tuple[int, Sequence[int]]]
    ) -> RankLoads:
        """The columns of these ranks for a prompt of so many blocks, of which some slots share some."""
        prefill_tokens = self.prefill_tokens(ranks, now_s)
        additional = [blocks] * len(ranks)
        for depth, numbers in shared:
            for number in numbers:
                if (position := self._positions.get(number)) is not None:
                    additional[position] = blocks - depth
        take = self._take
        return RankLoads(prefill_tokens, take(self._decode_blocks), take(self._requests), additional)

    def prefill_tokens(self, ranks: Sequence[WorkerRank], now_s: float) -> Column:
        """The prompt tokens in flight on these ranks."""
        self._ask(ranks)
        for number, slot in self._timed.items():
            self._prefill_tokens[number] = slot.prompts.tokens_at(now_s)
        return self._take(self._prefill_tokens)

    def all_loads(self, now_s: float) -> list[RankLoad]:
        """What is in flight on each rank but lazy ones. Changes nothing and may be asked in any thread."""
        return [
            RankLoad(
                slot.rank,
                slot.prompts.tokens_at(now_s) if slot.number in self._timed else self._prefill_tokens[slot.number],
                self._decode_blocks[slot.number],
            )
            for slot in list(self.by_rank.values())
            if not slot.lazy
        ]

    def _ask(self, ranks: Sequence[WorkerRank]) -> None:
        """Prepares taking these ranks out of a column. A pool asks with the same tuple again and again."""
        if ranks is self._asked and isinstance(ranks, tuple):
            return
        slots = [self.by_rank.get(rank) for rank in ranks]
        numbers = [0 if slot is None else slot.number for slot in slots]
        self._asked = ranks
        self._positions = {number: position for position, number in enumerate(numbers) if number}
        self._take = itemgetter(*numbers) if len(numbers) > 1 else _taker(numbers)


def _taker(numbers: Sequence[int]) -> Callable[[Sequence[int]], Sequence[int]]:
    return lambda column: [column[number] for number in numbers]
