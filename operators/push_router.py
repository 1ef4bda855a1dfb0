"""PushRouter: sends each request to one of the instances of an endpoint.

Source: dynamo lib/runtime/src/pipeline/network/egress/push_router.rs. Other than there, no instance at all and an
instance that vanished are errors of different types, and direct requests go through the graph like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pipeline import AsyncEngine, CannotConnect, Context, GraphError, InvalidArgument, ResponseStream, Unavailable

if TYPE_CHECKING:
    from pipeline.network import Workers  # a graph without instances of its own needs no network

In = TypeVar("In")
Out = TypeVar("Out")

RouterMode = Literal["round_robin", "random", "direct"]
Picker = Callable[[Sequence[int]], int]
"""Chooses one of some instance ids, which are sorted and at least one."""

_HINT = "routing.backend_instance_id"


class RoundRobin:
    """A picker that takes one id after the other; `peek` says which would be next."""

    def __init__(self) -> None:
        self._turn = 0

    def peek(self, instance_ids: Sequence[int]) -> int:
        return instance_ids[self._turn % len(instance_ids)]

    def __call__(self, instance_ids: Sequence[int]) -> int:
        chosen = self.peek(instance_ids)
        self._turn += 1
        return chosen


def random_pick(rng: Random) -> Picker:
    """A picker that draws from `rng`, each id as likely as the others."""
    return rng.choice


class PushRouter(AsyncEngine[In, Out], Generic[In, Out]):
    """Ends a graph at a pool of workers: picks one for each request and hands on its stream as it is.

    `mode` is one of the names, or a picker of one's own. `rng` is for mode `random`; give a seeded one to repeat a run.
    In mode `direct` the request names its instance in `routing.backend_instance_id`.

    Raises Unavailable, at once, if there is no instance. An instance that vanishes between the choice and the dispatch
    is replaced once by another; without another one that is Unavailable too. What a worker itself raises goes to the
    caller. Stop, kill and close are the worker's business.
    """

    def __init__(
        self, workers: Workers[In, Out], mode: RouterMode | Picker = "round_robin", rng: Random | None = None
    ) -> None:
        self._workers = workers
        self._pick = _picker(mode, rng)

    async def generate(self, request: Context[In]) -> ResponseStream[Out]:
        if self._pick is None:
            return await self.direct(request, _named_instance(request.payload))
        name, instance_ids = self._workers.name, self._workers.instance_ids()
        if not instance_ids:
            raise Unavailable(f"no instances found for endpoint {name}")
        chosen = self._pick(instance_ids)
        try:
            return await self.direct(request, chosen)
        except CannotConnect:
            others = self._workers.instance_ids()
            if chosen in others:
                raise  # it is still there: what it could not reach is something else
        if not others:
            raise Unavailable(f"instance_id={chosen} not found for endpoint {name}, no other instances available")
        return await self.direct(request, self._pick(others))

    async def direct(self, request: Context[In], instance_id: int) -> ResponseStream[Out]:
        """The answer of that instance. Raises CannotConnect if it is not there; no other one is asked."""
        return await self._workers.engine(instance_id).generate(request)

    def members(self) -> Sequence[str]:
        return [f"{self._workers.name}/{instance_id}" for instance_id in self._workers.instance_ids()]


def _picker(mode: RouterMode | Picker, rng: Random | None) -> Picker | None:
    """The picker of that mode; None for direct, where the request decides. Raises GraphError for an unknown one."""
    if callable(mode):
        return mode
    pickers: dict[str, Callable[[], Picker | None]] = {
        "round_robin": RoundRobin,
        "random": lambda: random_pick(rng or Random()),
        "direct": lambda: None,
    }
    if mode not in pickers:
        raise GraphError(f"unknown router mode {mode!r}: expected a picker or one of {', '.join(pickers)}")
    return pickers[mode]()


def _named_instance(payload: Any) -> int:
    """The instance a request names. Raises InvalidArgument if it names none."""
    routing = getattr(payload, "routing", None)
    instance_id = getattr(routing, "backend_instance_id", None)
    if not isinstance(instance_id, int):
        raise InvalidArgument(f"the request must name its instance in {_HINT}", field=_HINT)
    return instance_id
