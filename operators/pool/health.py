"""InstanceHealth: which instances of a pool may take a request now, and why none may.

    there ──► admitted ──► not cooling down after a fault: routable ──► not busy: free

Cooldowns: instances that get no requests for a while after a fault, each until its own time. A request that migrates
does not go back to an instance it has failed on, however long that is ago: see `without_failed`.

Source: dynamo lib/runtime/src/component/client.rs, report_instance_down. Other than there, each instance has its own
deadline, which no change of another one shortens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import isfinite
from typing import TYPE_CHECKING, Any

import anyio
from attrs import frozen

from pipeline import InvalidArgument, Unavailable, WorkerOverloaded
from pipeline.errors import Refused, blames_worker, may_migrate
from pipeline.network import Ids
from pipeline.protocols import MigrationState, TraceLink
from pipeline.rx import (
    AnyIOScheduler,
    CompositeDisposable,
    Disposable,
    DisposableBase,
    Observable,
    ObserverBase,
    Subject,
)
from pipeline.settings import Variable, whole

from .errors import AllBusy, all_busy, all_cooling_down, no_instance
from .load import RankLoad, WorkerLoads, is_idle, log_errors

if TYPE_CHECKING:
    from pipeline.network import Ids, Workers
    from pipeline.rx import AnyIOScheduler, Observable


COOLDOWN_S = 5.0
COOLDOWN = Variable(
    "DYN_RUNTIME_INHIBITED_DURATION_SECS",
    COOLDOWN_S,
    "Seconds that a worker gets no requests after a fault; 0: none at all.",
    whole(unit=1.0),
)


@frozen
class Cooldown:
    """The cooldown of one instance."""

    incarnation: int
    """The incarnation that was at fault."""
    until_s: float
    """When it ends, by the loop's clock."""


class Cooldowns:
    """The instances that are cooling down. Falsy if there are none, so that a healthy pool needs no clock.

    Only the incarnation that was at fault cools down: an instance that has left and come back starts clean. With a
    `duration_s` of 0 none ever does.
    """

    def __init__(self, duration_s: float = COOLDOWN_S) -> None:
        if not isfinite(duration_s) or duration_s < 0:
            raise InvalidArgument(f"must be finite and not negative, got {duration_s}", field="cooldown_s")
        self.duration_s = duration_s
        self.added: Subject[int] = Subject()
        """The id of each instance as its cooldown begins."""
        self._entries: Mapping[int, Cooldown] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, instance_id: int, incarnation: int, now_s: float) -> None:
        """Begin the cooldown of that incarnation, anew if it is cooling down already.

        Nothing happens for an incarnation that was followed by another, or for an instance that is not there (-1).
        """
        known = self._entries.get(instance_id)
        if not self.duration_s or incarnation < 0 or (known is not None and known.incarnation > incarnation):
            return
        self._entries = {**self._entries, instance_id: Cooldown(incarnation, now_s + self.duration_s)}
        self.added.on_next(instance_id)

    def discard(self, instance_id: int) -> None:
        """End the cooldown of an instance before its time, if there is one."""
        self._entries = {one: entry for one, entry in self._entries.items() if one != instance_id}

    def without(self, ids: Sequence[int], incarnation: Callable[[int], int], now_s: float) -> Sequence[int]:
        """Return the instances that are not cooling down now; `incarnation` gives the incarnation of each."""
        self._entries = lasting(self._entries, now_s)
        entries = self._entries
        return [i for i in ids if i not in entries or entries[i].incarnation != incarnation(i)] if entries else ids

    def first_end_s(self) -> float | None:
        """When the first cooldown ends, as of the last call of `without`; None if there is none."""
        return min((entry.until_s for entry in self._entries.values()), default=None)

    def first_back_s(self, ids: Sequence[int], incarnation: Callable[[int], int]) -> float | None:
        """When the cooldown of the first of these instances ends, as of then too; None if none of them cools down.

        Other cooldowns do not count: an instance that is gone, or has come back since, takes no request then.
        """
        entries = self._entries
        ends_s = (entries[i].until_s for i in ids if i in entries and entries[i].incarnation == incarnation(i))
        return min(ends_s, default=None)


def lasting(entries: Mapping[int, Cooldown], now_s: float) -> Mapping[int, Cooldown]:
    """Return the cooldowns that have not ended; the very same mapping if none has."""
    if all(entry.until_s > now_s for entry in entries.values()):
        return entries
    return {instance_id: entry for instance_id, entry in entries.items() if entry.until_s > now_s}


def cooldown_s(environment: Mapping[str, str]) -> float:
    """Return the duration that the environment sets, or the default."""
    return COOLDOWN.of(environment)


def routable_changes(
    pool: Observable[Ids],
    cooldowns: Cooldowns,
    routable: Callable[[float], Sequence[int]],
    scheduler: AnyIOScheduler,
) -> Observable[Ids]:
    """Return the instances that are not cooling down, now and after every change, the passing of time included.

    `routable` returns them for a time of the loop's clock. Completes with the pool. What a subscriber raises is logged.
    """

    def subscribe(observer: ObserverBase[Ids], _: Any = None) -> DisposableBase:
        known: Ids | None = None
        waiting: DisposableBase = Disposable()

        def look(_: Any = None, due_s: float = 0.0) -> None:
            nonlocal known, waiting
            # The scheduler's `now` is rounded to microseconds; what is due at `due_s` has run out then.
            now_s = max(scheduler.to_seconds(scheduler.now), due_s)
            found = tuple(routable(now_s))
            waiting.dispose()
            if (end_s := cooldowns.first_end_s()) is not None:
                waiting = scheduler.schedule_absolute(end_s, lambda *_: look(due_s=end_s))
            if found != known:
                known = found
                observer.on_next(found)

        following = CompositeDisposable(log_errors(cooldowns.added).subscribe(look))
        following.add(pool.subscribe(look, observer.on_error, observer.on_completed))
        following.add(Disposable(lambda: waiting.dispose()))
        return following

    return log_errors(Observable(subscribe))  # its timers must not break the scheduler, which others share


_NO_IDS: AbstractSet[int] = frozenset()


class InstanceHealth:
    """The health of each instance of a router's pool: cooldown after faults, load shedding, admission.

    An instance that refuses a request as overloaded is busy for `cooldown_s`, or until its next report in `loads`
    readmits it: by `busy` alone, if that is given, else by a report that it is idle. A report from before the refusal
    does not count. A healthy pool needs no clock.

    workers: the pool
    loads: what the instances report
    cooldown_s: how long an instance cools down, in seconds; 0 for not at all
    busy: returns the instances that are busy by another's judgement, as `BusyWatch.busy`
    admits: whether an instance is one of this router's; None for all
    skips_cooling_down: whether instances that are cooling down get no requests; false where requests name theirs
    """

    def __init__(
        self,
        workers: Workers[Any, Any],
        *,
        loads: WorkerLoads,
        cooldown_s: float,
        busy: Callable[[], AbstractSet[int]] | None = None,
        admits: Callable[[int], bool] | None = None,
        skips_cooling_down: bool = True,
    ) -> None:
        self._workers = workers
        self._loads = loads
        self._busy = busy
        self._admits = admits
        self._skips_cooling_down = skips_cooling_down
        self._cooldowns = Cooldowns(cooldown_s)
        self._overloaded = Cooldowns(cooldown_s)
        self._reported: dict[int, Mapping[int, RankLoad]] = {}
        """What overloaded instances had reported when they refused; each report makes another mapping."""

    def admitted(self) -> Sequence[int]:
        """Return the instances that are there and this router's."""
        ids = self._workers.instance_ids()
        return ids if self._admits is None else [i for i in ids if self._admits(i)]

    def is_admitted(self, instance_id: int) -> bool:
        """Whether that instance is admitted; costs the same however many there are."""
        return self._workers.incarnation(instance_id) >= 0 and (self._admits is None or self._admits(instance_id))

    def routable(self, now_s: float | None = None) -> Sequence[int]:
        """Return the instances that are not cooling down at that time, by default now."""
        ids = self.admitted()
        if not self._cooldowns:
            return ids
        return self._cooldowns.without(ids, self._workers.incarnation, anyio.current_time() if now_s is None else now_s)

    def routable_changes(self, scheduler: AnyIOScheduler) -> Observable[Ids]:
        """`routable` now and after every change, also that of time; completes when the pool is closed."""
        return routable_changes(self._workers.changes(), self._cooldowns, self.routable, scheduler)

    def free(self) -> Sequence[int]:
        """Return the instances a request may be sent to now."""
        return self.not_busy(self.routable() if self._skips_cooling_down else self.admitted())

    def not_busy(self, ids: Sequence[int]) -> Sequence[int]:
        """Return those of the instances that are not busy now."""
        if self._overloaded:
            self._readmit()
            ids = self._overloaded.without(ids, self._workers.incarnation, anyio.current_time())
        if self._busy is not None and (busy := self._busy()):
            return [instance_id for instance_id in ids if instance_id not in busy]
        return ids

    def overloaded(self) -> AbstractSet[int]:
        """Return the instances that are busy now, by their reports or by a refusal a moment ago."""
        ids = self.admitted()
        free = self.not_busy(ids)
        return _NO_IDS if free is ids else frozenset(ids).difference(free)

    def blame(self, instance_id: int, incarnation: int, error: Exception) -> None:
        """Take the error of a request into account: after a fault the worker cools down, after a refusal it is busy."""
        if blames_worker(error):
            self._cooldowns.add(instance_id, incarnation, anyio.current_time())
        elif isinstance(error, WorkerOverloaded):
            self._overloaded.add(instance_id, incarnation, anyio.current_time())
            if (load := self._loads.current().get(instance_id)) is not None:
                self._reported[instance_id] = load.ranks

    def _readmit(self) -> None:
        """Judge overloaded instances by what they have reported since."""
        loads = self._loads.current()
        for instance_id, before in list(self._reported.items()):
            load = loads.get(instance_id)
            if load is None:
                del self._reported[instance_id]
            elif load.ranks is not before and load.ranks and (self._busy is not None or is_idle(load.ranks)):
                del self._reported[instance_id]
                self._overloaded.discard(instance_id)

    def refusal(self) -> Refused | None:
        """Return the error a request would meet now; None if an instance is free."""
        return None if self.free() else self.no_free_instance()

    def no_free_instance(self) -> Refused:
        """Return the error for a request that no instance can take."""
        name, ids = self._workers.name, self.admitted()
        if not ids:
            return no_instance(name, self._workers.absence())
        routable = self.routable() if self._skips_cooling_down else ids
        if not routable:
            first_back_s = self._cooldowns.first_back_s(ids, self._workers.incarnation)
            return all_cooling_down(name, len(ids), _time_to(first_back_s))
        # When `busy` will no longer name an instance is not known.
        busy = self._busy() if self._busy is not None else ()
        timed = [instance_id for instance_id in routable if instance_id not in busy]
        first_back_s = self._overloaded.first_back_s(timed, self._workers.incarnation)
        return all_busy(name, len(routable), len(ids) - len(routable), _time_to(first_back_s))

    def vanished(self, instance_id: int) -> Unavailable:
        """Return the error for an instance that is gone when no other can take its place."""
        name = self._workers.name
        return Unavailable(f"instance_id={instance_id} not found for endpoint {name}, no other instances available")


def _time_to(end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, end_s - anyio.current_time())


def note_failure(payload: Any, instance_id: int, error: Exception, link: TraceLink | None = None) -> None:
    """Record that the instance failed the request, if the request may migrate after such an error.

    For a payload without a MigrationState nothing is recorded.
    """
    state = getattr(payload, "migration_state", None)
    if isinstance(state, MigrationState) and may_migrate(error):
        state.exclude(instance_id, error, link)


def without_failed(ids: Sequence[int], payload: Any) -> Sequence[int]:
    """Return the instances that have not failed this request; all of them without a MigrationState."""
    state = getattr(payload, "migration_state", None)
    if not isinstance(state, MigrationState) or not state.excluded_worker_ids:
        return ids
    return [instance_id for instance_id in ids if instance_id not in state.excluded_worker_ids]


def all_failed(name: str, payload: Any) -> Refused:
    """Return the error if every free instance has failed this request: AllBusy if the last one was too busy."""
    state = payload.migration_state
    failed = ", ".join(map(str, state.excluded_worker_ids))
    message = f"no instances left for endpoint {name}: this request has failed on {failed}"
    return AllBusy(message) if isinstance(state.last_error, WorkerOverloaded) else Unavailable(message)
