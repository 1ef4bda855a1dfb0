"""PushRouter: sends each request to one of the instances of an endpoint.

    candidates ──► picker ──► instance ──► its stream, watched
    all that are there, less those that are cooling down after a fault, less those that are busy

Source: dynamo lib/runtime/src/pipeline/network/egress/push_router.rs. Other than there, each reason why no instance can
take a request is an error of its own type, what is in flight is counted in every mode, each instance has a cooldown of
its own, and direct requests go through the graph like all others.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import isfinite
from random import Random
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import anyio

from pipeline import (
    AnyContext,
    AsyncEngine,
    CannotConnect,
    Context,
    GraphError,
    InvalidArgument,
    ReleaseOnce,
    ResponseStream,
    ResponseTimeout,
    Unavailable,
    Watch,
    WorkerOverloaded,
)
from pipeline.errors import Refused
from pipeline.protocols import RouterChoice
from pipeline.telemetry import annotate, trace_link

from .assigned import ASSIGNED
from .errors import AllBusy
from .health import COOLDOWN_S, InstanceHealth, all_failed, allowed, note_failure, without_failed
from .load import UNCOUNTED, WorkerLoads
from .pickers import DeviceAware, Picker, RoundRobin, Uncounted, least_loaded, power_of_two, random_pick

if TYPE_CHECKING:
    from pipeline.network import Workers
    from pipeline.rx import Observable

    from .view import PoolCards


T = TypeVar("T")


async def until_silent(
    items: AsyncIterator[T], request: AnyContext, timeout_s: float, source: str
) -> AsyncGenerator[T, None]:
    """Return the items; raise ResponseTimeout, naming the source, when the next is not there after `timeout_s`.

    Only waiting counts, not the time the reader takes. Once the request is stopped the stream ends instead. Costs a
    cancel scope for each item, so it is used only where a timeout is set. The owner of the items closes them.
    """
    ended: Any = object()
    while True:
        item = ended
        with anyio.move_on_after(timeout_s) as scope:
            item = await anext(items, ended)
        if scope.cancelled_caught and not request.is_stopped:
            raise ResponseTimeout(f"{source} sent nothing for {timeout_s:g} s")
        if item is ended:
            return
        yield item


In = TypeVar("In")
Out = TypeVar("Out")

RouterMode = Literal["round_robin", "random", "power_of_two_choices", "least_loaded", "device_aware_weighted", "direct"]
_HINT = "routing.backend_instance_id"


class PushRouter(AsyncEngine[In, Out], Generic[In, Out]):
    """Ends a graph at a pool of workers: picks one for each request and returns its stream.

    A request goes to the worker that a stage above has assigned to it (see `assign_worker`), in every mode and for this
    one dispatch; also while that worker is left out. CannotConnect is raised if it is not there, WorkerOverloaded if it
    is busy; no other worker takes its place. Any other request goes where the mode has it.

    Where instances are in other processes, those whose process is not connected are left out, ahead of any request (see
    `PoolView.routable`). An instance at fault (see `pipeline.errors.FACTS`) cools down for `cooldown_s`; one that
    answers WorkerOverloaded is busy for as long, or until its next report readmits it: see `InstanceHealth`. A request
    that migrates (see `Migration`) is not sent again to an instance it has failed on. What a worker raises goes to the
    caller, when its request is no longer in flight. Where `routing.allowed_worker_ids` is set, only these are picked.

    Raises, at once and with nothing sent: Unavailable without an instance, AllCoolingDown, AllBusy. An instance that
    vanishes between the choice and the dispatch is replaced once by another that is free; without another that is
    Unavailable. The worker handles stop, kill and close. The tracker of a request that has one records its worker.

    workers: the pool
    mode: how to pick; by default round robin. In mode `direct` the request names its instance in
        `routing.backend_instance_id`
    rng: for what is left to chance; a seeded one repeats a run
    pick: a picker of one's own in place of a mode (see `operators.pool`)
    cards: the model cards of the instances, for a stage that reads `health` (see `cards_of`)
    loads: counts what is in flight; routers of one pool may share it
    busy: the instances that are busy, now and after each change, as `BusyWatch.changes`
    admits: whether an instance is one of this router's; by default all are
    cooldown_s: how long an instance cools down, in seconds; 0 for not at all
    silence_timeout_s: a stream without an item for so many seconds raises ResponseTimeout; None for no limit
    """

    def __init__(
        self,
        workers: Workers[In, Out],
        mode: RouterMode | None = None,
        rng: Random | None = None,
        *,
        pick: Picker | None = None,
        cards: Observable[PoolCards] | None = None,
        loads: WorkerLoads | None = None,
        busy: Observable[AbstractSet[int]] | None = None,
        admits: Callable[[int], bool] | None = None,
        cooldown_s: float = COOLDOWN_S,
        silence_timeout_s: float | None = None,
    ) -> None:
        if silence_timeout_s is not None and not (isfinite(silence_timeout_s) and silence_timeout_s > 0):
            raise InvalidArgument(f"must be finite and above 0, got {silence_timeout_s}", field="silence_timeout_s")
        self.loads = WorkerLoads(workers) if loads is None else loads
        self._workers = workers
        self._pick = _picker(mode, pick)
        rule = (mode or "round_robin") if pick is None else getattr(pick, "__name__", type(pick).__name__)
        self._choice = RouterChoice(rule)
        self.health = InstanceHealth(
            workers,
            cards=cards,
            loads=self.loads,
            cooldown_s=cooldown_s,
            busy=busy,
            admits=admits,
            skips_cooling_down=self._pick is not None,
        )
        self._rng = rng or Random()
        self._silence_timeout_s = silence_timeout_s

    # -- requests

    async def generate(self, request: Context[In]) -> ResponseStream[Out]:
        if (assigned := ASSIGNED.take(request)) is not None:
            return await self._send(request, self._present(assigned.worker_id), is_accounted=assigned.is_accounted)
        if self._pick is None:
            return await self._send(request, self._present(_named_instance(request.payload)))
        chosen = self._picked(self._candidates(request), request)
        try:
            return await self._send(request, chosen)
        except CannotConnect:
            if chosen in self._workers.instance_ids():
                raise  # it is still there: what it could not reach is something else
        free = allowed(self.health.view.free, request.payload)
        if not (others := [i for i in without_failed(free, request.payload) if i != chosen]):
            name = self._workers.name
            raise Unavailable(f"instance_id={chosen} not found for endpoint {name}, no other instances available")
        return await self._send(request, self._picked(others, request))

    def _present(self, instance_id: int) -> int:
        """Return that instance, also while it cools down.

        Raise CannotConnect if it is not there, WorkerOverloaded if it is busy.
        """
        name, view = self._workers.name, self.health.view
        if instance_id not in view.incarnations:
            raise CannotConnect(f"instance_id={instance_id} not found for endpoint {name}")
        if instance_id in view.overloaded:
            raise WorkerOverloaded(f"the selected worker {instance_id} of endpoint {name} is busy")
        return instance_id

    # -- choosing

    def refusal(self) -> Refused | None:
        """Return the error a request would meet now because of the pool; None if it would be sent."""
        return self.health.refusal()

    def select_worker(self, request: Context[In], *, advances: bool = True) -> int:
        """Return the instance the request would go to now, for a stage that decides before it sends.

        To have the request sent there, give it to `assign_worker`. `advances` moves the picker on, as a request does;
        without it nothing changes. Raise what `generate` raises where no instance can take the request, InvalidArgument
        in mode `direct` for a request that names none.
        """
        if self._pick is None:
            return _named_instance(request.payload)
        if advances:
            return self._picked(self._candidates(request), request)
        ids, pick = self._candidates(request), getattr(self._pick, "peek", self._pick)
        before = self._rng.getstate()
        try:
            return int(pick(ids, self.loads.current(), request, self._rng))
        finally:
            self._rng.setstate(before)

    def give_back_turn(self) -> None:
        """Undo the turn that `select_worker` took for a request that is not sent after all; other modes have none."""
        if isinstance(self._pick, RoundRobin):
            self._pick.give_back()

    @property
    def is_direct(self) -> bool:
        """Whether each request has to name its instance."""
        return self._pick is None

    def members(self) -> Sequence[str]:
        return [f"{self._workers.name}/{instance_id}" for instance_id in self._workers.instance_ids()]

    def _candidates(self, request: Context[In]) -> Sequence[int]:
        """Return the instances the request may be sent to now. Raise the reason if there is none."""
        if not (free := self.health.view.free):
            raise self.health.no_free_instance()
        if not (among := allowed(free, request.payload)):
            raise self._none_allowed(request)
        if not (ids := without_failed(among, request.payload)):
            raise all_failed(self._workers.name, request.payload)
        return ids

    def _none_allowed(self, request: Context[In]) -> Refused:
        """Return the error for a request that allows none of the free instances: AllBusy if one of its own is busy."""
        name, view = self._workers.name, self.health.view
        if allowed(tuple(view.overloaded), request.payload):
            return AllBusy(f"all workers of endpoint {name} that the request allows are busy")
        return Unavailable(f"no instance of endpoint {name} that the request allows can take it")

    def _picked(self, ids: Sequence[int], request: Context[In]) -> int:
        assert self._pick is not None
        return self._pick(ids, self.loads.current(), request, self._rng)

    # -- acting

    async def _send(self, request: Context[In], instance_id: int, *, is_accounted: bool = False) -> ResponseStream[Out]:
        is_uncounted = is_accounted or type(instance_id) is Uncounted
        counted = UNCOUNTED if is_uncounted else self.loads.begin(instance_id)
        sent = _Sent(self, request, instance_id, counted)
        if request.trace is not None:
            annotate(request, {"penstock.worker_id": int(instance_id), "penstock.endpoint": self._workers.name})
        try:
            stream = await self._workers.engine(instance_id).generate(request)
        except BaseException as error:
            counted.release()
            if isinstance(error, Exception):
                sent.on_failure(error)
            raise
        if not is_accounted and (tracker := getattr(request.payload, "tracker", None)) is not None:
            tracker.record_worker(int(instance_id))
            tracker.record_choice(self._choice)
        if self._silence_timeout_s is not None:
            source = f"instance_id={instance_id} of endpoint {self._workers.name}"
            stream = ResponseStream(until_silent(stream, request, self._silence_timeout_s, source), request, stream)
        # By the time of an error the request is not counted and the worker cools down.
        return stream.watched(sent)


class _Sent(Watch):
    """A request that was sent to an instance of this incarnation, after so many losses of its connection."""

    __slots__ = ("_health", "_incarnation", "_instance_id", "_losses", "_request")

    def __init__(
        self, router: PushRouter[Any, Any], request: AnyContext, instance_id: int, counted: ReleaseOnce
    ) -> None:
        self.reservation = counted
        self._health, self._request, self._instance_id = router.health, request, instance_id
        workers = router._workers
        self._incarnation, self._losses = workers.incarnation(instance_id), workers.losses(instance_id)

    def on_failure(self, error: Exception) -> None:
        """Have the instance cool down, and the request not come to it again."""
        request, health = self._request, self._health
        health.blame(self._instance_id, self._incarnation, error, losses=self._losses)
        link = None if request.trace is None else trace_link(request)
        free = allowed(health.view.free, request.payload)
        note_failure(request.payload, self._instance_id, error, link, free=free)


_PICKERS: Mapping[RouterMode, Callable[[], Picker | None]] = {
    "round_robin": RoundRobin,
    "random": lambda: random_pick,
    "power_of_two_choices": lambda: power_of_two,
    "least_loaded": lambda: least_loaded,
    "device_aware_weighted": DeviceAware,
    "direct": lambda: None,
}


def _picker(mode: RouterMode | None, pick: Picker | None) -> Picker | None:
    """Return the picker; None for mode direct, where the request decides. Raise GraphError if both are given."""
    if pick is not None and mode is not None:
        raise GraphError(f"both a mode, {mode!r}, and a picker: they exclude each other")
    if pick is not None:
        return pick
    name = "round_robin" if mode is None else mode
    if name not in _PICKERS:
        raise GraphError(f"unknown router mode {mode!r}: expected one of {', '.join(_PICKERS)}")
    return _PICKERS[name]()


def _named_instance(payload: Any) -> int:
    """Return the instance a request names. Raise InvalidArgument if it names none."""
    routing = getattr(payload, "routing", None)
    instance_id = getattr(routing, "backend_instance_id", None)
    if not isinstance(instance_id, int):
        raise InvalidArgument(f"the request must name its instance in {_HINT}", field=_HINT)
    return instance_id
