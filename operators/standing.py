"""Standing: who in a pool may be asked now, and why nobody may.

there ──► admitted ──► not left out after a fault: routable ──► not busy: free
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import anyio

from pipeline import Unavailable, WorkerOverloaded
from pipeline.errors import Refused, blames_worker

from .availability import all_busy, all_excluded, nobody
from .exclusion import Exclusions, routable_changes
from .worker_load import RankLoad, WorkerLoads, is_idle

if TYPE_CHECKING:
    from pipeline.network import Ids, Workers
    from pipeline.rx import AnyIOScheduler, Observable

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
