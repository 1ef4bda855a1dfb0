"""Exclusion: instances that are left out for a while after a fault, each until its own time.

Source: dynamo lib/runtime/src/component/client.rs, report_instance_down. Other than there, each instance has its own
deadline, which no change of another one shortens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.network import Ids
from pipeline.rx import (
    AnyIOScheduler,
    CompositeDisposable,
    Disposable,
    DisposableBase,
    Observable,
    ObserverBase,
    Subject,
)

from .listening import isolated

EXCLUSION_S = 5.0
EXCLUSION_ENV = "DYN_RUNTIME_INHIBITED_DURATION_SECS"


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
    """The duration the environment sets, in whole seconds; the default where it is not set or not a number."""
    text = environment.get(EXCLUSION_ENV, "").strip()
    return float(text) if text.isascii() and text.isdigit() else EXCLUSION_S


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
