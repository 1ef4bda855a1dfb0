"""AdmissionQueue: which requests wait for a worker, and which one goes next.

    push ──► class ──► partition ──► in order of strict priority, score, arrival
    pop  ◄── classes in turns, by deficit round robin ◄── each class's first request that may go

Requests with the same choice of workers share a partition, so one that waits for a certain busy worker does not hold
up those that can go elsewhere; inside a partition the first blocks the others. Nothing here waits: the owner pushes,
pops after every change of load, workers or queue, and books each request before it pops the next.

Source: dynamo lib/kv-router/src/scheduling/policy_queue.rs, PolicyQueue. Other than there not only pinned requests have
partitions of their own: any restriction of the choice of workers can name one. And a class keeps its turn while none
of its requests may go: otherwise classes served one request at a time would share alike, whatever their quanta.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from attrs import define, field, frozen

from pipeline import Unavailable

from .policy import (
    DepthTier,
    PolicyClass,
    PolicyProfile,
    PromptSize,
    QueueUsage,
    check_class_limits,
    check_depth,
    check_tiers,
)

T = TypeVar("T")

Order = tuple[int, float, int]
"""Sorts the waiting: less is earlier, no two are equal."""


@frozen(eq=False)
class Waiting(Generic[T]):
    """A request in the queue."""

    item: T
    policy_class: PolicyClass
    size: PromptSize
    arrival_s: float
    """When it was queued."""
    partition: Hashable
    """Stands for the workers it may go to; None for any."""
    class_index: int
    """Position of its class in the profile."""
    order: Order

    def is_due_for_refresh(self, now_s: float, refresh_after_s: float | None) -> bool:
        """Whether it waited so long that its cached prefixes must be looked up again; None for never."""
        return refresh_after_s is not None and now_s - self.arrival_s > refresh_after_s


@define(eq=False)
class _ClassQueue(Generic[T]):
    """The partitions of one class and what it may still have served this round."""

    policy_class: PolicyClass
    usage: QueueUsage = field(factory=QueueUsage)
    partitions: dict[Hashable, list[tuple[Order, Waiting[T]]]] = field(factory=dict)
    deficit: int = 0

    def add(self, waiting: Waiting[T]) -> None:
        insort(self.partitions.setdefault(waiting.partition, []), (waiting.order, waiting))
        self.usage.add(waiting.size)

    def remove(self, waiting: Waiting[T]) -> bool:
        """Remove one, from the middle too; return False if it is not here. An empty class loses its deficit."""
        partition = self.partitions.get(waiting.partition, [])
        place = bisect_left(partition, waiting.order, key=lambda entry: entry[0])
        if place == len(partition) or partition[place][1] is not waiting:
            return False
        del partition[place]
        self.usage.add(waiting.size, -1)
        if not partition:
            del self.partitions[waiting.partition]
        if not self.partitions:
            self.deficit = 0
        return True

    def head(self, may_go: Callable[[Waiting[T]], bool]) -> Waiting[T] | None:
        """Return the first of the partitions' first ones that may go."""
        heads = [partition[0] for partition in self.partitions.values() if may_go(partition[0][1])]
        return min(heads)[1] if heads else None


class AdmissionQueue(Generic[T]):
    """The waiting requests of one pool of workers, by class. Not for several threads."""

    def __init__(self, profile: PolicyProfile, tiers: Sequence[DepthTier] = ()) -> None:
        check_tiers(tiers)
        self.profile = profile
        self._tiers = tiers
        self._classes: list[_ClassQueue[T]] = [_ClassQueue(one) for one in profile.classes]
        self.version = 0
        """Changes with each request that is queued or taken out."""
        self.size = 0
        """The number of requests that wait."""
        self._pushed = 0
        self._cursor = 0
        self._carried: int | None = None
        self._closed = False

    def __len__(self) -> int:
        return self.size

    def usage(self, class_index: int) -> QueueUsage:
        """What waits in a class."""
        usage = self._classes[class_index].usage
        return QueueUsage(usage.requests, usage.isl_tokens, usage.cached_tokens)

    def must_queue(self, class_index: int, all_busy: Callable[[], bool]) -> bool:
        """Whether a request of this class must wait: behind others of its class, or because all its workers are busy.

        The workers are only looked at where that decides. A request that must wait may still go at once: pop after
        pushing it.
        """
        one = self._classes[class_index]
        return one.policy_class.may_queue and (one.usage.requests > 0 or all_busy())

    def push(
        self,
        item: T,
        size: PromptSize,
        *,
        class_index: int,
        workers: int,
        arrival_s: float,
        priority_jump_s: float = 0.0,
        strict_priority: int = 0,
        partition: Hashable = None,
    ) -> Waiting[T]:
        """Queue a request. Raises QueueRejected if its class is full, Unavailable once the queue is closed."""
        if self._closed:
            raise Unavailable("the router is shutting down")
        one = self._classes[class_index]
        check_class_limits(one.policy_class, one.usage, workers)
        check_depth(self._tiers, size, sum(other.usage.isl_tokens for other in self._classes), workers)
        self._pushed += 1
        self.size += 1
        self.version += 1
        score = one.policy_class.score(size, arrival_s, priority_jump_s)
        order = (-strict_priority, -score, self._pushed)
        waiting = Waiting(item, one.policy_class, size, arrival_s, partition, class_index, order)
        one.add(waiting)
        return waiting

    def withdraw(self, waiting: Waiting[T]) -> bool:
        """Take out a request whose caller has gone; return False if it was popped before."""
        self.version += 1
        if removed := self._classes[waiting.class_index].remove(waiting):
            self.size -= 1
        return removed

    def waiting_classes(self) -> list[int]:
        """The classes in which something waits."""
        return [index for index, one in enumerate(self._classes) if one.usage.requests]

    def pop(self, may_go: Callable[[Waiting[T]], bool]) -> Waiting[T] | None:
        """Take out the next request that may go now; return None if there is none.

        Classes take turns. In each round a class whose first request may go gets its quantum, in uncached tokens, and
        is served while that lasts; what is left carries on to its next request. If all are too dear, all get the
        fewest further rounds that let one go.
        """
        heads = {index: head for index, one in enumerate(self._classes) if (head := one.head(may_go)) is not None}
        if not heads:
            return None  # a class in the middle of its turn continues it later
        carried, self._carried = self._carried, None
        if carried in heads and self._affords(carried, heads[carried]):
            return self._take(heads[carried])
        turns = [index for index in self._turns() if index in heads]
        for index in turns:
            if not self._affords(index, heads[index]):
                self._classes[index].deficit += self._classes[index].policy_class.quantum
            if self._affords(index, heads[index]):
                return self._take(heads[index])
        rounds = min(self._rounds_missing(index, heads[index]) for index in turns)
        for index in turns:
            self._classes[index].deficit += rounds * self._classes[index].policy_class.quantum
        return self._take(next(heads[index] for index in turns if self._affords(index, heads[index])))

    def close(self) -> list[Waiting[T]]:
        """End the queue; return the requests that waited, whose callers must be notified."""
        self._closed = True
        left = [waiting for one in self._classes for partition in one.partitions.values() for _, waiting in partition]
        for waiting in left:
            self.withdraw(waiting)
        return sorted(left, key=lambda waiting: waiting.order[2])

    def _turns(self) -> list[int]:
        """The classes in order of their turn: those behind the one served last come first."""
        return [*range(self._cursor, len(self._classes)), *range(self._cursor)]

    def _affords(self, class_index: int, head: Waiting[T]) -> bool:
        return head.size.work_tokens <= self._classes[class_index].deficit

    def _rounds_missing(self, class_index: int, head: Waiting[T]) -> int:
        one = self._classes[class_index]
        return -((one.deficit - head.size.work_tokens) // one.policy_class.quantum)

    def _take(self, head: Waiting[T]) -> Waiting[T]:
        index = head.class_index
        one = self._classes[index]
        one.deficit -= head.size.work_tokens
        one.remove(head)
        self.size -= 1
        self.version += 1
        self._cursor = (index + 1) % len(self._classes)
        self._carried = index if one.deficit > 0 else None
        return head
