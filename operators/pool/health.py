"""InstanceHealth: which instances of a pool may take a request now, and why none may.

    members, connections, cards, faults, refusals, reports, busy, time ──► view ──► routers

Cooldowns: instances that get no requests for a while after a fault, each until its own time. Where processes are
connected to, a lost connection is no such fault: its instances are left out until there is another one, be that sooner
or later. A request that migrates does not go back to an instance it has failed on, however long that is ago: see
`without_failed`.

Source: dynamo lib/runtime/src/component/client.rs, report_instance_down. Other than there, each instance has its own
deadline, which no change of another one shortens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from math import isfinite
from typing import TYPE_CHECKING, Any

import anyio

from pipeline import CannotConnect, Disconnected, InvalidArgument, Unavailable, WorkerOverloaded
from pipeline.errors import Refused, TransferFailed, blames_worker, chain, may_migrate
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

from .errors import AllBusy, AllCoolingDown
from .load import LoadReport, WorkerLoads, is_idle, log_errors
from .view import PoolCards, PoolView

if TYPE_CHECKING:
    from pipeline.network import Workers


COOLDOWN_S = 5.0
COOLDOWN = Variable(
    "DYN_RUNTIME_INHIBITED_DURATION_SECS",
    COOLDOWN_S,
    "Seconds that a worker gets no requests after a fault; 0: none at all.",
    whole(unit=1.0),
)


RETRY_AFTER_S = 1.0
"""When to try again where no worker can be reached: which one can be next is not known."""


class InstanceHealth:
    """The health of each instance of a router's pool: cooldown after faults, load shedding, admission.

    Every change of the pool makes a new `view` at once: an instance comes or leaves, a connection, a card, a fault, a
    refusal, a report, the busy ones change. The end of a cooldown is seen by the next reader, and by subscribers of
    `changes` when it comes.

    An instance that refuses a request as overloaded is busy for `cooldown_s`, or until its next report in `loads`
    readmits it: by `busy` alone, if that is given, else by a report that it is idle. A report from before the refusal
    does not count. A healthy pool needs no clock.

    workers: the pool
    cards: the model cards of the instances, now and after each change (see `cards_of`); by default there are none
    loads: what the instances report; by default nothing
    cooldown_s: how long an instance cools down, in seconds; 0 for not at all
    busy: the instances that are busy by another's judgement, now and after each change, as `BusyWatch.changes`
    admits: whether an instance is one of this router's, decided at each change of the pool; None for all
    skips_cooling_down: whether instances that are cooling down get no requests; false where requests name theirs
    """

    def __init__(
        self,
        workers: Workers[Any, Any],
        *,
        cards: Observable[PoolCards] | None = None,
        loads: WorkerLoads | None = None,
        cooldown_s: float = COOLDOWN_S,
        busy: Observable[AbstractSet[int]] | None = None,
        admits: Callable[[int], bool] | None = None,
        skips_cooling_down: bool = True,
    ) -> None:
        if not isfinite(cooldown_s) or cooldown_s < 0:
            raise InvalidArgument(f"must be finite and not negative, got {cooldown_s}", field="cooldown_s")
        self._workers = workers
        self._cooldown_s = cooldown_s
        self._has_busy = busy is not None
        self._view = PoolView(skips_cooling_down=skips_cooling_down)
        self._views: Subject[PoolView] = Subject()
        workers.keep_connected(lambda: self._push(self._view.with_reach(workers.reach())))
        workers.follow(lambda members: self._push(self._view.with_members(members, admits).with_reach(workers.reach())))
        if cards is not None:
            cards.subscribe(lambda found: self._push(self._view.with_cards(found)))
        if loads is not None:
            loads.reports().subscribe(self._on_report)
        if busy is not None:
            busy.subscribe(lambda ids: self._push(self._view.with_busy(ids)))

    @property
    def view(self) -> PoolView:
        """The pool now. The same object until something changes."""
        if self._view.valid_until_s is not None:
            self._push(self._view.at(anyio.current_time()))
        return self._view

    def changes(self, scheduler: AnyIOScheduler | None = None) -> Observable[PoolView]:
        """Return the view now and after every change; completes when the pool is closed, which it keeps running.

        With a scheduler the end of a cooldown is such a change; without one it is seen with the next change or reader.
        What a subscriber raises is logged.
        """

        def subscribe(observer: ObserverBase[PoolView], _: Any = None) -> DisposableBase:
            waiting: DisposableBase = Disposable()
            known: PoolView | None = None

            def look(_: PoolView) -> None:
                nonlocal known, waiting
                if (view := self._view) is known:
                    return  # a change that another subscriber made at the change before, and that was seen then
                known = view
                waiting.dispose()
                if scheduler is not None and (end_s := view.valid_until_s) is not None:
                    # The scheduler's `now` is rounded to microseconds: what is due then has run out.
                    waiting = scheduler.schedule_absolute(end_s, lambda *_: self._push(self._view.at(end_s)))
                observer.on_next(view)

            look(self.view)
            following = CompositeDisposable(log_errors(self._views).subscribe(look))
            following.add(self._workers.changes().subscribe(on_completed=observer.on_completed))
            following.add(Disposable(lambda: waiting.dispose()))
            return following

        return log_errors(Observable(subscribe))  # its timers must not break the scheduler, which others share

    def blame(self, instance_id: int, incarnation: int, error: Exception, *, losses: int = 0) -> None:
        """Take the error of a request into account: after a fault the worker cools down, after a refusal it is busy.

        Nothing happens if that incarnation was followed by another, or is gone; nor if the error is that of a
        connection, which `view.reach` has. `losses` are `Workers.losses` of before the request was sent.
        """
        if not self._cooldown_s or self._is_of_connection(instance_id, error, losses):
            return
        if blames_worker(error):
            until_s = anyio.current_time() + self._cooldown_s
            self._push(self.view.with_cooldown(instance_id, incarnation, until_s))
        elif isinstance(error, WorkerOverloaded):
            until_s = anyio.current_time() + self._cooldown_s
            self._push(self.view.with_refusal(instance_id, incarnation, until_s))

    def _is_of_connection(self, instance_id: int, error: Exception, losses: int) -> bool:
        """Return whether the request may have failed because its connection was lost, or there was none."""
        if not isinstance(error, (CannotConnect, Disconnected)):
            return False
        is_unconnected = instance_id in self._workers.reach().unconnected
        return is_unconnected or self._workers.losses(instance_id) != losses

    def _on_report(self, report: LoadReport) -> None:
        """Judge an overloaded instance by what it reports."""
        if report.ranks and (self._has_busy or is_idle(report.ranks)):
            self._push(self._view.without_refusal(report.instance_id))

    def _push(self, view: PoolView) -> None:
        if view is not self._view:
            self._view = view
            self._views.on_next(view)

    def refusal(self) -> Refused | None:
        """Return the error a request would meet now; None if an instance is free."""
        return None if self.view.free else self.no_free_instance()

    def no_free_instance(self) -> Refused:
        """Return the error for a request that no instance can take. What cannot be reached is tried again then."""
        name, view = self._workers.name, self.view
        if not view.ids:
            return Unavailable(f"no instances found for endpoint {name}: {_ABSENCES[self._workers.absence()]}")
        routable = view.routable if view.skips_cooling_down else view.ids
        if not routable:
            self._workers.retry_unreachable()
            unreachable = sum(i in view.reach.unreachable for i in view.ids)
            message = f"no instances found for endpoint {name} that may be asked: {_out(len(view.ids), unreachable)}"
            ends_s = [view.cooling_down[i] for i in view.cooling_down if i not in view.reach.unreachable]
            retry_after_s = _time_to(ends_s)
            return AllCoolingDown(message, retry_after_s=RETRY_AFTER_S if retry_after_s is None else retry_after_s)
        # When `busy` will no longer name an instance is not known.
        refused = [view.refused[i] for i in routable if i in view.refused and i not in view.busy]
        message = f"all workers are busy: {len(routable)} of endpoint {name}"
        if cooling_down := len(view.ids) - len(routable):
            message += f", {cooling_down} more failed a moment ago or cannot be reached"
        return AllBusy(message, retry_after_s=_time_to(refused))


_ABSENCES = {
    "none_yet": "none has appeared yet",
    "all_left": "all there were have left",
    "closed": "its discovery was closed",
    None: "none of those that are there is admitted",
}


def _out(instances: int, unreachable: int) -> str:
    """Return why none of these instances is routable."""
    if not unreachable:
        return f"all {instances} failed a moment ago"
    if unreachable == instances:
        return f"none of the {instances} can be reached"
    return f"{unreachable} of {instances} cannot be reached, the others failed a moment ago"


def _time_to(ends_s: Collection[float]) -> float | None:
    """Return the time to the first of these ends; None if there is none."""
    return max(0.0, min(ends_s) - anyio.current_time()) if ends_s else None


def note_failure(
    payload: Any, instance_id: int, error: Exception, link: TraceLink | None = None, *, free: Sequence[int] = ()
) -> None:
    """Record that the instance failed the request, if the request may migrate after such an error.

    Either worker may be at fault for a transfer that failed: it is held against the worker that prefilled unless
    another one of the `free` instances may decode. For a payload without a MigrationState nothing is recorded.
    """
    state = getattr(payload, "migration_state", None)
    if not isinstance(state, MigrationState) or not may_migrate(error):
        return
    failed: int | None = instance_id
    if any(isinstance(each, TransferFailed) for each in chain(error)):
        has_others = any(other != instance_id for other in without_failed(free, payload))
        hints = payload.routing
        if not has_others and hints is not None and hints.prefill_worker_id is not None:
            failed = None if hints.prefill_worker_id == instance_id else hints.prefill_worker_id
    if failed is None:
        state.last_error, state.failed_link = error, link
    else:
        state.exclude(failed, error, link)


def allowed(ids: Sequence[int], payload: Any) -> Sequence[int]:
    """Return the instances that the request's routing hints allow; all of them without hints of that kind."""
    workers = getattr(getattr(payload, "routing", None), "allowed_worker_ids", None)
    return ids if workers is None else [instance_id for instance_id in ids if instance_id in workers]


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
