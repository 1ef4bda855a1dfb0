"""BlockPool: the physical blocks of a KV cache, shared by prefix and evicted by age; bookkeeping only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

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
        "_inactive",
        "_names",
        "_shown",
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
        self._names: list[int | None] = [None] * capacity_blocks
        self._free = list(range(capacity_blocks - 1, -1, -1))
        self._inactive: OrderedDict[int, None] = OrderedDict()
        """Named blocks that are not held; the one released longest ago first."""
        self._shown: dict[int, int] = {}
        """Name -> the block that a lookup returns."""
        self._copies: dict[int, list[int]] = {}
        """Name -> the other blocks of that name, oldest first."""

    @property
    def inactive(self) -> int:
        """Blocks with reusable content that are not held."""
        return len(self._inactive)

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
        return sum([1 for block in blocks if held_by[block]])

    def reuse(self, blocks: Iterable[int]) -> None:
        """Hold these named blocks once more."""
        self.changes += 1
        held_by, inactive = self._held_by, self._inactive
        woken = 0
        for block in blocks:
            if not held_by[block]:
                del inactive[block]
                woken += 1
            held_by[block] += 1
        self.active += woken

    def take(self, count: int) -> list[int] | None:
        """Return that many nameless blocks, held once; None if there are too few. Evicts the longest inactive ones."""
        if count > self.capacity - self.active:
            return None
        self.changes += 1
        free = self._free
        if len(free) < count:
            self._evict(count - len(free))
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
        held_by, names, inactive, free = self._held_by, self._names, self._inactive, self._free
        let_go = 0
        for block in reversed(blocks):
            holders = held_by[block] - 1
            held_by[block] = holders
            if holders:
                continue
            let_go += 1
            if names[block] is None:
                free.append(block)
            else:
                inactive[block] = None
        self.active -= let_go

    def destroy(self, blocks: Sequence[int]) -> None:
        """As `release`, but blocks without another holder become free instead of inactive."""
        self.release(blocks)
        self._forget([block for block in reversed(blocks) if block in self._inactive])

    def evict(self) -> int | None:
        """Evict the block that is inactive for longest and return its name; None if there is none."""
        if not self._inactive:
            return None
        self.changes += 1
        name = self._names[next(iter(self._inactive))]
        self._evict(1)
        return name

    def clear(self) -> int:
        """Free all inactive blocks and drop the names of the held ones; return the number of names."""
        self.changes += 1
        count = len(self._shown)
        self._free.extend(self._inactive)
        self._inactive.clear()
        self._names = [None] * self.capacity
        self._shown.clear()
        self._copies.clear()
        if count:
            self._publish(KvCleared())
        return count

    def check(self) -> None:
        """Assert every invariant, block by block; for tests."""
        held = {block for block, count in enumerate(self._held_by) if count}
        free, inactive = set(self._free), set(self._inactive)
        assert all(count >= 0 for count in self._held_by)
        assert len(free) == len(self._free)
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

    def _evict(self, count: int) -> None:
        self._forget(list(islice(self._inactive, count)))

    def _forget(self, blocks: Sequence[int]) -> None:
        """Make inactive blocks free; publish the names that are gone with them."""
        gone = []
        inactive, names, shown, copies = self._inactive, self._names, self._shown, self._copies
        for block in blocks:
            del inactive[block]
            name = names[block]
            names[block] = None
            if name is None:
                continue
            if name in copies:
                self._drop_copy(name, block)
            else:
                del shown[name]
                gone.append(name)
        self._free.extend(blocks)
        if gone:
            self._publish(KvRemoved(gone))

    def _drop_copy(self, name: int, block: int) -> None:
        """Take the name from the block, one of several that have it."""
        others = self._copies[name]
        if self._shown[name] == block:
            self._shown[name] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._copies[name]

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
