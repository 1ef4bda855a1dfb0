"""RankLoads: the load of many ranks as columns of plain numbers, and the slots they are kept in.

Source: dynamo lib/kv-router/src/sequences/prompt_registry.rs. Other than there one column per number: a selection
reads them for hundreds of ranks, and a column is taken in one step.

PromptLoad: the prompt tokens one rank has still to compute.

Source: dynamo lib/kv-router/src/sequences/prefill_tracker.rs, PrefillLoadTracker. Other than there, removing a request
that is not the oldest moves the anchor on by its duration, so that no reported value jumps; and the sum of durations
is kept instead of computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from attrs import define, field, frozen

from pipeline import PenstockError

from ..types import WorkerRank
from .blocks import ActiveBlocks

_NS = 1_000_000_000


class MissingDuration(PenstockError):
    """Some active prompt has no expected duration, so the time left is not known."""


@frozen
class _Prompt:
    tokens: int
    duration_ns: int | None


@define
class PromptLoad:
    """Active prompts in the order they came, and how far the work on them must be by now.

    A prompt counts in full until it is removed, unless it came with an expected duration: then the time since the
    oldest one (the anchor) began is taken off. While all have durations it is taken off their sum, otherwise off the
    anchor alone. Times are seconds of one clock that does not go back.
    """

    _prompts: dict[str, _Prompt] = field(factory=dict)
    _tokens: int = 0
    _duration_ns: int = 0
    _unmodelled: int = 0
    _anchored_ns: int = 0

    def add(self, request_id: str, tokens: int, duration_s: float | None, now_s: float) -> None:
        """Counts a prompt; an id that is counted already is the caller's mistake."""
        if not self._prompts:
            self._anchored_ns = _ns(now_s)
        prompt = self._prompts[request_id] = _Prompt(tokens, None if duration_s is None else _ns(duration_s))
        self._tokens += tokens
        self._duration_ns += prompt.duration_ns or 0
        self._unmodelled += prompt.duration_ns is None

    def remove(self, request_id: str, now_s: float) -> bool:
        """Stops counting a prompt; False if it is not counted."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return False
        is_anchor = next(iter(self._prompts)) == request_id
        del self._prompts[request_id]
        self._tokens -= prompt.tokens
        self._duration_ns -= prompt.duration_ns or 0
        self._unmodelled -= prompt.duration_ns is None
        if is_anchor:
            self._anchored_ns = _ns(now_s)
        elif prompt.duration_ns is not None:
            # What was taken off for it goes with it: the others are as far as they were.
            self._anchored_ns = min(self._anchored_ns + prompt.duration_ns, max(_ns(now_s), self._anchored_ns))
        return True

    @property
    def is_timed(self) -> bool:
        """Whether `tokens_at` changes by itself."""
        return self._unmodelled < len(self._prompts)

    def tokens_at(self, now_s: float) -> int:
        """The tokens still to compute."""
        anchor = next(iter(self._prompts.values()), None)
        if anchor is None:
            return 0
        if (duration_ns := anchor.duration_ns) is None:
            return self._tokens
        elapsed_ns = max(0, _ns(now_s) - self._anchored_ns)
        if duration_ns == 0:
            return self._tokens - anchor.tokens
        if self._unmodelled:
            left = -(-anchor.tokens * max(0, duration_ns - elapsed_ns) // duration_ns)
            return self._tokens - anchor.tokens + left
        return max(0, self._tokens - anchor.tokens * elapsed_ns // duration_ns)

    def remaining_ms_at(self, now_s: float) -> int:
        """The modelled time until all of it is computed, in whole milliseconds; 0 without prompts.

        Raises MissingDuration if some prompt came without one.
        """
        if self._unmodelled:
            raise MissingDuration("an active prompt has no expected duration")
        if not self._prompts:
            return 0
        return max(0, self._duration_ns - max(0, _ns(now_s) - self._anchored_ns)) // 1_000_000


def _ns(seconds: float) -> int:
    """Whole nanoseconds: fractions of tokens are then exact, and 0.3 s is three times 0.1 s."""
    return round(seconds * _NS)


Column = Sequence[int]


@frozen(eq=False)
class RankLoads:
    """The load of some ranks, a column each, in the order in which the ranks were given.

    `additional_blocks` is what the prompt in question would add on top of `decode_blocks`.
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
    _prepared: Sequence[WorkerRank] | None = None
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
        self._prepared = None
        slot = self.by_rank[rank] = Slot(rank, number, lazy)
        return slot

    def close(self, slot: Slot) -> None:
        """Gives an account up with all that is in it."""
        number = slot.number
        self._prefill_tokens[number] = self._decode_blocks[number] = self._requests[number] = 0
        self._timed.pop(number, None)
        self._free.append(number)
        self._prepared = None
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
        self._prepare(ranks)
        for number, slot in self._timed.items():
            self._prefill_tokens[number] = slot.prompts.tokens_at(now_s)
        return self._take(self._prefill_tokens)

    def all_loads(self, now_s: float) -> list[RankLoad]:
        """What is in flight on each rank but lazy ones. Changes nothing and may be called in any thread."""
        return [
            RankLoad(
                slot.rank,
                slot.prompts.tokens_at(now_s) if slot.number in self._timed else self._prefill_tokens[slot.number],
                self._decode_blocks[slot.number],
            )
            for slot in list(self.by_rank.values())
            if not slot.lazy
        ]

    def _prepare(self, ranks: Sequence[WorkerRank]) -> None:
        """Prepare taking these ranks out of a column. A pool gives the same tuple again and again."""
        if ranks is self._prepared and isinstance(ranks, tuple):
            return
        slots = [self.by_rank.get(rank) for rank in ranks]
        numbers = [0 if slot is None else slot.number for slot in slots]
        self._prepared = ranks
        self._positions = {number: position for position, number in enumerate(numbers) if number}
        self._take = itemgetter(*numbers) if len(numbers) > 1 else _taker(numbers)


def _taker(numbers: Sequence[int]) -> Callable[[Sequence[int]], Sequence[int]]:
    return lambda column: [column[number] for number in numbers]
