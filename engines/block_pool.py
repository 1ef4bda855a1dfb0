"""BlockPool: the physical blocks of a KV cache, shared by prefix and evicted by age; bookkeeping only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from pipeline.protocols.kv import KvCleared, KvEventData, KvRemoved, KvStored, StoredBlocks

OnEvent = Callable[[KvEventData], object]
OnEventWithTokens = Callable[[KvEventData, Sequence[int]], object]
"""Also receives the tokens of all stored blocks, one after the other; none for any other change."""


class BlockPool:
    """A fixed number of blocks, each free, inactive (named, not held) or active (held by at least one sequence).

    ::

        free ──take──► active, nameless ──store──► active, named ◄──reuse── inactive
          ▲                  │ release                 │ release               ▲  │
          └──────────────────┘                         └───────────────────────┘  └─evicted by take──► active

    A name is a sequence hash. Several blocks may have the same one: two sequences computed the same tokens at once.
    `on_event` is called when a name appears (KvStored, one for each run of consecutive new names) and when its last
    block loses it (KvRemoved); reuse and further copies are no events. `on_event_with_tokens` is called with the tokens
    as well; while it is None they are not made. Both may be set at any time. Blocks are released from the tail of a
    sequence to its head, so the tail of a sequence is evicted first. One sequence may not hold the same block twice.

    Source: dynamo lib/mocker/src/kv_manager/vllm_backend.rs and cache/vllm_block_pool.rs. Other than there, a failed
    `take` changes nothing, and freed blocks that have no name are not kept in the order of eviction.
    """

    __slots__ = (
        "_copies",
        "_free",
        "_held_by",
        "_names",
        "_queued",
        "_released",
        "_shown",
        "_turn",
        "active",
        "capacity",
        "changes",
        "on_event",
        "on_event_with_tokens",
    )

    def __init__(self, capacity_blocks: int, on_event: OnEvent | None = None) -> None:
        self.capacity = capacity_blocks
        self.active = 0
        self.changes = 0
        """Incremented whenever the result of a lookup may change."""
        self.on_event = on_event
        self.on_event_with_tokens: OnEventWithTokens | None = None
        self._held_by = [0] * capacity_blocks
        """How many sequences hold each block; of an inactive one the turn of its release, which is below 0."""
        self._names: list[int | None] = [None] * capacity_blocks
        self._free = list(range(capacity_blocks - 1, -1, -1))
        self._released: deque[tuple[int, list[int]]] = deque()
        """The turn and its blocks, the first to evict last; those reused since have another turn."""
        self._queued = 0
        """How many blocks these are."""
        self._turn = 0
        self._shown: dict[int, int] = {}
        """Name -> the block that a lookup returns."""
        self._copies: dict[int, list[int]] = {}
        """Name -> the other blocks of that name, oldest first."""

    @property
    def inactive(self) -> int:
        """Blocks with reusable content that are not held."""
        return self.capacity - self.active - len(self._free)

    @property
    def available(self) -> int:
        """Blocks that can be taken now: the free and the inactive ones."""
        return self.capacity - self.active

    def names(self) -> set[int]:
        """Return the sequence hashes of all reusable blocks."""
        return set(self._shown)

    def match(self, names: Iterable[int]) -> list[int]:
        """Return the blocks that hold the longest cached prefix of the names. Nothing changes."""
        shown = self._shown
        found = []
        for name in names:
            block = shown.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def count_active(self, blocks: Iterable[int]) -> int:
        """Return how many of the blocks are held."""
        held_by = self._held_by
        return sum([1 for block in blocks if held_by[block] > 0])

    def reuse(self, blocks: Iterable[int]) -> None:
        """Hold these named blocks once more."""
        self.changes += 1
        held_by = self._held_by
        woken = 0
        for block in blocks:
            holders = held_by[block]
            if holders <= 0:
                woken += 1
                holders = 0
            held_by[block] = holders + 1
        self.active += woken

    def take(self, count: int) -> list[int] | None:
        """Return that many nameless blocks, held once; None if there are too few. Evicts the longest inactive ones."""
        if count > self.capacity - self.active:
            return None
        self.changes += 1
        free = self._free
        if len(free) < count:
            self._forget(self._oldest(count - len(free)))
        at = len(free) - count
        taken = free[at:]
        del free[at:]
        taken.reverse()
        held_by = self._held_by
        for block in taken:
            held_by[block] = 1
        self.active += count
        return taken

    def store(
        self,
        blocks: Sequence[int],
        names: Sequence[int],
        token_hashes: Sequence[int],
        parent: int | None = None,
        tokens: Sequence[int] = (),
    ) -> None:
        """Name consecutive blocks of a sequence, the first one below `parent`; `tokens` are theirs, for the events.

        Below a parent that was cleared they stay nameless: no lookup could reach them.
        """
        if parent is not None and parent not in self._shown:
            return
        self.changes += 1
        shown, own_names = self._shown, self._names
        for block, name in zip(blocks, names, strict=True):
            own_names[block] = name
        found = list(map(shown.setdefault, names, blocks))
        start = 0
        if found != blocks:
            for index, (block, first) in enumerate(zip(blocks, found, strict=True)):
                if first != block:  # a copy
                    self._copies.setdefault(names[index], []).append(block)
                    self._publish_stored(start, index, names, token_hashes, parent, tokens)
                    start = index + 1
        self._publish_stored(start, len(names), names, token_hashes, parent, tokens)

    def release(self, blocks: Sequence[int]) -> None:
        """Release the blocks of a sequence, the last one first: named ones become inactive, nameless ones free."""
        self.changes += 1
        held_by, names = self._held_by, self._names
        let_go = [block for block in blocks if held_by[block] == 1]
        if len(let_go) < len(blocks):
            for block in blocks:
                held_by[block] -= 1
        self.active -= len(let_go)
        named = [block for block in let_go if names[block] is not None]
        if len(named) < len(let_go):
            nameless = [block for block in reversed(let_go) if names[block] is None]
            for block in nameless:
                held_by[block] = 0
            self._free += nameless
        if named:
            self._queue(named)

    def destroy(self, blocks: Sequence[int]) -> None:
        """As `release`, but blocks without another holder become free instead of inactive."""
        self.release(blocks)
        self._forget([block for block in reversed(blocks) if self._held_by[block] < 0])

    def evict(self) -> int | None:
        """Evict the block that is inactive for longest and return its name; None if there is none."""
        if not self.inactive:
            return None
        self.changes += 1
        (block,) = self._oldest(1)
        name = self._names[block]
        self._forget([block])
        return name

    def clear(self) -> int:
        """Free all inactive blocks and drop the names of the held ones; return the number of names."""
        self.changes += 1
        count = len(self._shown)
        freed = self._oldest(self.inactive)
        for block in freed:
            self._held_by[block] = 0
        self._free += freed
        self._names = [None] * self.capacity
        self._shown.clear()
        self._copies.clear()
        if count:
            self._publish(KvCleared())
        return count

    def check(self) -> None:
        """Assert every invariant, block by block; for tests."""
        held = {block for block, count in enumerate(self._held_by) if count > 0}
        inactive = {block for block, count in enumerate(self._held_by) if count < 0}
        free = set(self._free)
        assert len(free) == len(self._free)
        queued = [block for turn, blocks in self._released for block in blocks if self._held_by[block] == turn]
        assert len(queued) == len(inactive) == self.inactive
        assert set(queued) == inactive
        assert self._queued == sum(len(blocks) for _, blocks in self._released)
        assert self.active == len(held)
        assert not held & free
        assert not held & inactive
        assert not free & inactive
        assert len(held) + len(free) + len(inactive) == self.capacity
        named: dict[int, set[int]] = {}
        for block, name in enumerate(self._names):
            if name is not None:
                named.setdefault(name, set()).add(block)
        copies = [block for others in self._copies.values() for block in others]
        assert all(self._copies.values()), "a list of copies is dropped with its last one"
        assert self._copies.keys() <= self._shown.keys()
        assert len(copies) + len(self._shown) == sum(len(blocks) for blocks in named.values())
        assert named == {name: {block, *self._copies.get(name, ())} for name, block in self._shown.items()}
        assert all(self._names[block] is None for block in free)
        assert all(self._names[block] is not None for block in inactive)

    def _queue(self, blocks: list[int]) -> None:
        """Make blocks that are no longer held inactive, to be evicted from the last one on, after all before them."""
        self._turn = turn = self._turn - 1
        held_by = self._held_by
        for block in blocks:
            held_by[block] = turn
        self._released.append((turn, blocks))
        self._queued += len(blocks)
        if self._queued > 2 * self.capacity:  # most of them were reused since
            present = [(turn, [block for block in queued if held_by[block] == turn]) for turn, queued in self._released]
            self._released = deque((turn, queued) for turn, queued in present if queued)
            self._queued = sum(len(queued) for _, queued in self._released)

    def _oldest(self, count: int) -> list[int]:
        """Take that many inactive blocks out of the queue, those that are inactive for longest, in this order."""
        held_by, released = self._held_by, self._released
        found: list[int] = []
        while (missing := count - len(found)) > 0:
            turn, queued = released[0]
            part = queued[-missing:]
            del queued[-missing:]
            self._queued -= len(part)
            if not queued:
                released.popleft()
            found += [block for block in reversed(part) if held_by[block] == turn]
        return found

    def _forget(self, blocks: Sequence[int]) -> None:
        """Make inactive blocks free, which are out of the queue; publish the names that are gone with them."""
        held_by, names, shown, copies = self._held_by, self._names, self._shown, self._copies
        gone = cast("list[int]", [names[block] for block in blocks])  # without a name none is inactive
        for block in blocks:
            names[block], held_by[block] = None, 0
        if copies:
            gone = [name for name, block in zip(gone, blocks, strict=True) if not self._is_dropped_copy(name, block)]
        for name in gone:
            del shown[name]
        self._free += blocks
        if gone:
            self._publish(KvRemoved(gone))

    def _is_dropped_copy(self, name: int, block: int) -> bool:
        """Take the name from the block if others have it too; return whether they do."""
        others = self._copies.get(name)
        if others is None:
            return False
        if self._shown[name] == block:
            self._shown[name] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._copies[name]
        return True

    def _publish_stored(
        self,
        first: int,
        last: int,
        names: Sequence[int],
        token_hashes: Sequence[int],
        parent: int | None,
        tokens: Sequence[int],
    ) -> None:
        """Publish the new names from `first` to below `last`, if there are any."""
        if first == last or (self.on_event is None and self.on_event_with_tokens is None):
            return
        stored = StoredBlocks(names[first:last], token_hashes[first:last])
        size = len(tokens) // len(names)
        self._publish(KvStored(names[first - 1] if first else parent, stored), tokens[first * size : last * size])

    def _publish(self, change: KvEventData, tokens: Sequence[int] = ()) -> None:
        if self.on_event is not None:
            self.on_event(change)
        if self.on_event_with_tokens is not None:
            self.on_event_with_tokens(change, tokens)
