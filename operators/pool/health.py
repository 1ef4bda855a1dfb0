"""Standing: who in a pool may be asked now, and why nobody may.

there ──► admitted ──► not left out after a fault: routable ──► not busy: free

Exclusion: instances that are left out for a while after a fault, each until its own time.

Source: dynamo lib/runtime/src/component/client.rs, report_instance_down. Other than there, each instance has its own
deadline, which no change of another one shortens.

Which instances a request that moves on must not come back to; for whoever sends requests to instances.

A payload without a MigrationState, or of another kind altogether, leaves nobody out.
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

from .errors import AllBusy, all_busy, all_excluded, nobody
from .load import RankLoad, WorkerLoads, is_idle, isolated

if TYPE_CHECKING:
    from pipeline.network import Ids, Workers
    from pipeline.rx import AnyIOScheduler, Observable


EXCLUSION_S = 5.0
COOLDOWN = Variable(
    "DYN_RUNTIME_INHIBITED_DURATION_SECS",
    EXCLUSION_S,
    "Seconds that a worker gets no requests after a fault; 0: none at all.",
    whole(unit=1.0),
)


@frozen
class Exclusion:
    """Which arrival of an instance is left out, and until when by the loop's clock."""

    arrival: int
    until_s: float


class Exclusions:
    """Who is left out. Falsy while it holds nobody, so that a healthy pool costs no look at the clock.

    Only the arrival that was at fault is left out: an instance that has left and come back starts clean. With a
    `duration_s` of 0 nobody ever is.
    """

    def __init__(self, duration_s: float = EXCLUSION_S) -> None:
        if not isfinite(duration_s) or duration_s < 0:
            raise InvalidArgument(f"must be finite and not negative, got {duration_s}", field="exclusion_s")
        self.duration_s = duration_s
        self.added: Subject[int] = Subject()
        """The id of each instance as it is left out."""
        self._entries: Mapping[int, Exclusion] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, instance_id: int, arrival: int, now_s: float) -> None:
        """Leaves that arrival out from now on, for the whole duration again if it was left out already.

        A late word of an arrival that has been followed by another does nothing, nor does one without a number.
        """
        known = self._entries.get(instance_id)
        if not self.duration_s or arrival < 0 or (known is not None and known.arrival > arrival):
            return
        self._entries = {**self._entries, instance_id: Exclusion(arrival, now_s + self.duration_s)}
        self.added.on_next(instance_id)

    def discard(self, instance_id: int) -> None:
        """Ends the exclusion of an instance, if there is one, before its time."""
        self._entries = {one: entry for one, entry in self._entries.items() if one != instance_id}

    def without(self, ids: Sequence[int], arrival: Callable[[int], int], now_s: float) -> Sequence[int]:
        """Those of the instances that are not left out now; `arrival` says which arrival each one is."""
        self._entries = lasting(self._entries, now_s)
        entries = self._entries
        return [i for i in ids if i not in entries or entries[i].arrival != arrival(i)] if entries else ids

    def first_end_s(self) -> float | None:
        """When the first entry ends, as of the last time somebody asked who is left out; None if nobody is."""
        return min((entry.until_s for entry in self._entries.values()), default=None)

    def first_back_s(self, ids: Sequence[int], arrival: Callable[[int], int]) -> float | None:
        """When the first of these instances is back, as of then too; None if none of them is left out.

        Entries of others do not count: an instance that is gone, or has come back since, takes no request then.
        """
        entries = self._entries
        ends_s = (entries[i].until_s for i in ids if i in entries and entries[i].arrival == arrival(i))
        return min(ends_s, default=None)


def lasting(entries: Mapping[int, Exclusion], now_s: float) -> Mapping[int, Exclusion]:
    """Those that have not run out; the very same mapping if none has."""
    if all(entry.until_s > now_s for entry in entries.values()):
        return entries
    return {instance_id: entry for instance_id, entry in entries.items() if entry.until_s > now_s}


def exclusion_s(environment: Mapping[str, str]) -> float:
    """Return the duration that the environment sets, or the default."""
    return COOLDOWN.of(environment)


def routable_changes(
    pool: Observable[Ids],
    exclusions: Exclusions,
    routable: Callable[[float], Sequence[int]],
    scheduler: AnyIOScheduler,
) -> Observable[Ids]:
    """The instances that are not left out, now and after every change, also that of time.

    `routable` gives them at a time of the loop's clock; completes with the pool. What a listener raises is logged.
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
            if (end_s := exclusions.first_end_s()) is not None:
                waiting = scheduler.schedule_absolute(end_s, lambda *_: look(due_s=end_s))
            if found != known:
                known = found
                observer.on_next(found)

        listening = CompositeDisposable(isolated(exclusions.added).subscribe(look))
        listening.add(pool.subscribe(look, observer.on_error, observer.on_completed))
        listening.add(Disposable(lambda: waiting.dispose()))
        return listening

    return isolated(Observable(subscribe))  # its timers must not break the scheduler, which others share


_NOBODY: AbstractSet[int] = frozenset()


class Standing:
    """What a router holds against the instances of its pool: their faults, their being busy, whom it admits.

    `skips_excluded`: whether instances that are left out are not to be asked; so it is unless requests name theirs.
    `busy` gives those that are busy by the judgement of another. A healthy pool costs no look at the clock.

    An instance that refuses a request as overloaded is busy for `exclusion_s`, or until its next report in `loads` if
    that readmits it: by `busy` alone, if that is given, else if it reports that it has nothing to do. A report that had
    come before the refusal does not count.
    """

    def __init__(
        self,
        workers: Workers[Any, Any],
        *,
        loads: WorkerLoads,
        exclusion_s: float,
        busy: Callable[[], AbstractSet[int]] | None = None,
        admits: Callable[[int], bool] | None = None,
        skips_excluded: bool = True,
    ) -> None:
        self._workers = workers
        self._loads = loads
        self._busy = busy
        self._admits = admits
        self._skips_excluded = skips_excluded
        self._excluded = Exclusions(exclusion_s)
        self._overloaded = Exclusions(exclusion_s)
        self._reported: dict[int, Mapping[int, RankLoad]] = {}
        """What those that are overloaded had reported by then: each report makes another mapping."""

    def admitted(self) -> Sequence[int]:
        """The instances that are there and this router's."""
        ids = self._workers.instance_ids()
        return ids if self._admits is None else [i for i in ids if self._admits(i)]

    def is_admitted(self, instance_id: int) -> bool:
        """Whether that one is; costs the same however many there are."""
        return self._workers.arrival(instance_id) >= 0 and (self._admits is None or self._admits(instance_id))

    def routable(self, now_s: float | None = None) -> Sequence[int]:
        """Those that are not left out at that time, by default now."""
        ids = self.admitted()
        if not self._excluded:
            return ids
        return self._excluded.without(ids, self._workers.arrival, anyio.current_time() if now_s is None else now_s)

    def routable_changes(self, scheduler: AnyIOScheduler) -> Observable[Ids]:
        """`routable` now and after every change, also that of time; completes when the pool is closed."""
        return routable_changes(self._workers.changes(), self._excluded, self.routable, scheduler)

    def free(self) -> Sequence[int]:
        """Those a request may be sent to now."""
        return self.not_busy(self.routable() if self._skips_excluded else self.admitted())

    def not_busy(self, ids: Sequence[int]) -> Sequence[int]:
        """Those of the instances that are not busy now."""
        if self._overloaded:
            self._readmit()
            ids = self._overloaded.without(ids, self._workers.arrival, anyio.current_time())
        if self._busy is not None and (busy := self._busy()):
            return [instance_id for instance_id in ids if instance_id not in busy]
        return ids

    def overloaded(self) -> AbstractSet[int]:
        """Those that are busy now, by their reports or by what one of them answered a moment ago."""
        ids = self.admitted()
        free = self.not_busy(ids)
        return _NOBODY if free is ids else frozenset(ids).difference(free)

    def blame(self, instance_id: int, arrival: int, error: Exception) -> None:
        """Takes note of what a request met there: a fault of the worker leaves it out, a refusal makes it busy."""
        if blames_worker(error):
            self._excluded.add(instance_id, arrival, anyio.current_time())
        elif isinstance(error, WorkerOverloaded):
            self._overloaded.add(instance_id, arrival, anyio.current_time())
            if (load := self._loads.current().get(instance_id)) is not None:
                self._reported[instance_id] = load.ranks

    def _readmit(self) -> None:
        """Lets those that were overloaded be judged by what they have reported since."""
        loads = self._loads.current()
        for instance_id, before in list(self._reported.items()):
            load = loads.get(instance_id)
            if load is None:
                del self._reported[instance_id]
            elif load.ranks is not before and load.ranks and (self._busy is not None or is_idle(load.ranks)):
                del self._reported[instance_id]
                self._overloaded.discard(instance_id)

    def refusal(self) -> Refused | None:
        """Why nobody can be asked; None if somebody can."""
        return None if self.free() else self.nobody()

    def nobody(self) -> Refused:
        """The error for a request that nobody can take."""
        name, ids = self._workers.name, self.admitted()
        if not ids:
            return nobody(name, self._workers.absence())
        asked = self.routable() if self._skips_excluded else ids
        if not asked:
            return all_excluded(name, len(ids), _time_to(self._excluded.first_back_s(ids, self._workers.arrival)))
        # When somebody else will call an instance free is not known.
        busy = self._busy() if self._busy is not None else ()
        timed = [instance_id for instance_id in asked if instance_id not in busy]
        first_back_s = self._overloaded.first_back_s(timed, self._workers.arrival)
        return all_busy(name, len(asked), len(ids) - len(asked), _time_to(first_back_s))

    def vanished(self, instance_id: int) -> Unavailable:
        """The error for an instance that is gone when nobody can take its place."""
        name = self._workers.name
        return Unavailable(f"instance_id={instance_id} not found for endpoint {name}, no other instances available")


def _time_to(end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, end_s - anyio.current_time())


def note_failure(payload: Any, instance_id: int, error: Exception, link: TraceLink | None = None) -> None:
    """Takes note that the instance failed the request, if the request may go on elsewhere after such an error."""
    state = getattr(payload, "migration_state", None)
    if isinstance(state, MigrationState) and may_migrate(error):
        state.exclude(instance_id, error, link)


def without_failed(ids: Sequence[int], payload: Any) -> Sequence[int]:
    """Those of the instances that have not failed this request."""
    state = getattr(payload, "migration_state", None)
    if not isinstance(state, MigrationState) or not state.excluded_worker_ids:
        return ids
    return [instance_id for instance_id in ids if instance_id not in state.excluded_worker_ids]


def all_failed(name: str, payload: Any) -> Refused:
    """The error where every instance that is free has failed this request: AllBusy if the last one was too busy."""
    state = payload.migration_state
    failed = ", ".join(map(str, state.excluded_worker_ids))
    message = f"no instances left for endpoint {name}: this request has failed on {failed}"
    return AllBusy(message) if isinstance(state.last_error, WorkerOverloaded) else Unavailable(message)
