"""Workers: the live instances of one endpoint, as a router sees them.

Members: which there are. Reach: which of them can be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from math import inf
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

import anyio
from attrs import frozen

from pipeline import AsyncEngine, Context, ResponseStream, Unavailable
from pipeline.rx import CompositeDisposable, Disposable, DisposableBase, Observable, ObserverBase, RefCountDisposable

from .discovery import Added, Removed
from .events import Fanout
from .names import DeviceType, EndpointId, Instance
from .requests import Connectivity, KeptConnection, not_found

In = TypeVar("In")
Out = TypeVar("Out")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)

Ids = tuple[int, ...]
_RETRY_EVERY_S = 0.5
"""A thousand requests a second must not look at a thousand instances each."""
Absence = Literal["none_yet", "all_left", "closed"]
"""Why a pool has no instance: none has appeared so far, all have gone, or the pool is closed."""


@frozen(eq=False)
class Members:
    """The instances of a pool at one moment. A change makes another record."""

    ids: Ids = ()
    """Sorted."""
    incarnations: Mapping[int, int] = MappingProxyType({})
    """The number of each instance's present stay, see `Workers.incarnation`."""

    @classmethod
    def of(cls, incarnations: Mapping[int, int]) -> Members:
        """Return the record of these instances."""
        ids = tuple(sorted(incarnations))
        return cls(ids, {instance_id: incarnations[instance_id] for instance_id in ids})

    def gone_since(self, before: Members) -> list[int]:
        """Return the instances that have left since `before`, those that have come back included; in its order."""
        now = self.incarnations
        return [i for i, incarnation in before.incarnations.items() if now.get(i) != incarnation]

    def new_since(self, before: Members) -> list[int]:
        """Return the instances that have come since `before`, those that have come back included; sorted."""
        return before.gone_since(self)


_NO_IDS: AbstractSet[int] = frozenset()


@frozen
class Reach:
    """Which instances of a pool can be reached, as far as that is known. A change makes another record."""

    unconnected: AbstractSet[int] = _NO_IDS
    """Those to whose process there is no connection now."""
    unreachable: AbstractSet[int] = _NO_IDS
    """Those of them whose process has refused the last connection, or does not answer."""

    def with_state(self, instance_id: int, state: Connectivity | None) -> Reach:
        """Return the record with this state of an instance, None for one that is gone; the same one without a change.

        What there is no connection to is in here; a pool whose plane has none is reached as a whole.
        """
        unconnected = _with(self.unconnected, instance_id, state in ("connecting", "unreachable"))
        unreachable = _with(self.unreachable, instance_id, state == "unreachable")
        if unconnected is self.unconnected and unreachable is self.unreachable:
            return self
        return Reach(unconnected, unreachable)


def _with(ids: AbstractSet[int], instance_id: int, is_in: bool) -> AbstractSet[int]:
    if (instance_id in ids) == is_in:
        return ids
    return ids | {instance_id} if is_in else ids - {instance_id}


class Workers(Generic[In_contra, Out_co]):
    """A pool of instances as its router sees it; `runtime.workers(...)` and `static_workers(...)` return one.

    Calls of an engine raise CannotConnect while its instance is absent.
    """

    def __init__(
        self, name: str, engines: Mapping[int, AsyncEngine[In_contra, Out_co]], device_types: Mapping[int, DeviceType]
    ) -> None:
        self.name = name
        """Name of the pool, for messages and drawings."""
        self._engines = dict(engines)
        self._members = Members.of({instance_id: number for number, instance_id in enumerate(sorted(engines))})
        self._arrived = len(engines)
        self._device_types: dict[int, DeviceType | None] = dict(device_types)
        self._is_closed = False
        self._listeners: Fanout[Ids] = Fanout()
        self._reach = Reach()

    def instance_ids(self) -> Ids:
        """Return the ids of the present instances, sorted."""
        return self._members.ids

    def members(self) -> Members:
        """Return the present instances with their incarnations; the same record until they change."""
        return self._members

    def absence(self) -> Absence | None:
        """Return why there is no instance now; None if there is one."""
        if self._members.ids:
            return None
        if self._is_closed:
            return "closed"
        return "all_left" if self._arrived else "none_yet"

    def incarnation(self, instance_id: int) -> int:
        """Return the number of the instance's present stay in the pool; -1 if it is absent.

        A number other than before means that the instance has left and come back: what was known of it is void.
        """
        return self._members.incarnations.get(instance_id, -1)

    def device_type(self, instance_id: int) -> DeviceType | None:
        """Return the instance's device type; None if unknown or if there is no such instance."""
        return self._device_types.get(instance_id)

    def changes(self) -> Observable[Ids]:
        """`instance_ids` now and after every change; completes when the pool is closed."""
        return Observable(lambda observer, _: self._listen(observer))

    def follow(self, on_members: Callable[[Members], None]) -> DisposableBase:
        """Call `on_members` with `members` now, after every change and at the end of the pool, until disposed.

        Other than a subscriber of `changes`, this does not keep a closed pool running.
        """

        def look(_: Ids = ()) -> None:
            on_members(self._members)

        return self._loosely().subscribe(look, on_completed=look)

    def reach(self) -> Reach:
        """Return which instances can be reached; the same record until that changes. All, before `keep_connected`."""
        return self._reach

    def losses(self, instance_id: int) -> int:
        """Return how often the connection to the instance's process was lost since `keep_connected`; 0 if unknown."""
        return 0

    def keep_connected(self, on_reach: Callable[[], None]) -> None:
        """Connect to the process of each instance ahead of requests, until the pool ends.

        `on_reach` is called after each change of `reach` but those that come with a change of the members, and with the
        first call of this. Nothing happens where there are no connections: in one process, and in a pool that never
        changes.
        """

    def retry_unreachable(self) -> None:
        """Try again, without the pauses between attempts, to connect to what cannot be reached.

        Called for a request that no other instance can take. Only one call in half a second has an effect.
        """

    def engine(self, instance_id: int) -> AsyncEngine[In_contra, Out_co]:
        """Return the instance as an engine."""
        found = self._engines.get(instance_id)
        return _Missing(self.name, instance_id) if found is None else found

    async def wait_for_instances(self, count: int = 1) -> Ids:
        """Return the ids once there are at least so many. Raise Unavailable if the pool is closed before."""
        known = anyio.Event()

        def look(ids: Ids) -> None:
            if len(ids) >= count:
                known.set()

        # Not `changes`, whose subscribers keep a closed pool running: the wait would never end.
        listening = self._loosely().subscribe(look, on_completed=lambda: known.set())
        try:
            while True:
                await known.wait()
                if len(ids := self._members.ids) >= count:
                    return ids
                if self._is_closed:
                    raise Unavailable(f"{self.name} was closed before it had {count} instances")
                known = anyio.Event()  # some have left again before it was this task's turn
        finally:
            listening.dispose()

    def _listen(self, observer: ObserverBase[Ids]) -> DisposableBase:
        return self._listeners.add(observer, first=[self._members.ids])

    def _loosely(self) -> Observable[Ids]:
        """`changes` for a subscriber that does not keep a closed pool running."""
        return Observable(lambda observer, _: Workers._listen(self, observer))

    def __str__(self) -> str:
        return self.name


Keep = Callable[[Instance, Callable[[], object]], KeptConnection | None]
"""As `RequestPlane.keep_connected`."""


class EndpointWorkers(Workers[In, Out]):
    """Follows discovery until it is closed and `changes` has no subscriber.

    connect: returns an instance as an engine
    keep: opens the connection to its process ahead of requests, for a pool of which that is wanted
    """

    def __init__(
        self,
        endpoint: EndpointId,
        watch: Observable[Added[Instance] | Removed[Instance]],
        connect: Callable[[Instance], AsyncEngine[In, Out]],
        keep: Keep | None = None,
    ) -> None:
        super().__init__(str(endpoint), {}, {})
        self._connect, self._keep = connect, keep
        self._instances: dict[int, Instance] = {}
        self._kept: dict[int, KeptConnection] = {}
        self._is_kept = False
        self._retried_s = -inf
        self._reaches: Fanout[None] = Fanout()
        followed = watch.subscribe(self._follow, on_completed=self._end)
        self._users = RefCountDisposable(CompositeDisposable(followed, Disposable(self._end)))

    def close(self) -> None:
        """Close this view. A subscriber of `changes` still receives changes until it is disposed."""
        self._users.dispose()

    def losses(self, instance_id: int) -> int:
        kept = self._kept.get(instance_id)
        return 0 if kept is None else kept.losses

    def keep_connected(self, on_reach: Callable[[], None]) -> None:
        if self._keep is None or self._is_closed:
            return
        reaches: Observable[None] = Observable(lambda observer, _: self._reaches.add(observer))
        reaches.subscribe(lambda _: on_reach())
        if not self._is_kept:
            self._is_kept = True
            for instance in self._instances.values():
                self._keep_one(instance)

    def retry_unreachable(self) -> None:
        if (now_s := anyio.current_time()) - self._retried_s < _RETRY_EVERY_S:
            return
        self._retried_s = now_s
        for instance_id in self._reach.unreachable & self._kept.keys():
            self._kept[instance_id].retry()

    def _keep_one(self, instance: Instance) -> None:
        """Have a connection to the process of the instance, and no longer to that which it had before."""
        instance_id, before = instance.instance_id, self._kept.pop(instance.instance_id, None)
        if self._is_kept and self._keep is not None:
            kept = self._keep(instance, lambda: self._on_connectivity(instance_id))
            if kept is not None:
                self._kept[instance_id] = kept
                self._reach = self._reach.with_state(instance_id, kept.state)
        if before is not None:  # not sooner, or a process that stays the same would be left and connected to again
            before.close()

    def _on_connectivity(self, instance_id: int) -> None:
        if (kept := self._kept.get(instance_id)) is not None:
            before, self._reach = self._reach, self._reach.with_state(instance_id, kept.state)
            if self._reach is not before:
                self._reaches.push(None)

    def _let_go(self, instance_id: int) -> None:
        if (kept := self._kept.pop(instance_id, None)) is not None:
            kept.close()
            self._reach = self._reach.with_state(instance_id, None)

    def _listen(self, observer: ObserverBase[Ids]) -> DisposableBase:
        return CompositeDisposable(super()._listen(observer), self._users.disposable)

    def _follow(self, event: Added[Instance] | Removed[Instance]) -> None:
        incarnations, instance_id = self._members.incarnations, event.item.instance_id
        if isinstance(event, Added):
            self._engines[instance_id] = self._connect(event.item)
            self._device_types[instance_id] = event.item.device_type
            self._instances[instance_id] = event.item
            self._keep_one(event.item)
            if instance_id in incarnations:  # it was published again with other content
                self._reaches.push(None)
                return
            incarnations = {**incarnations, instance_id: self._arrived}
            self._arrived += 1
        else:
            self._engines.pop(instance_id, None)
            self._device_types.pop(instance_id, None)
            self._instances.pop(instance_id, None)
            self._let_go(instance_id)
            if instance_id not in incarnations:
                return
            incarnations = {i: number for i, number in incarnations.items() if i != instance_id}
        self._members = Members.of(incarnations)
        self._listeners.push(self._members.ids)

    def _end(self) -> None:
        self._engines.clear()
        self._device_types.clear()
        self._instances.clear()
        for instance_id in list(self._kept):
            self._let_go(instance_id)
        self._reaches.complete()
        self._members, self._is_closed = Members(), True
        self._listeners.complete()


def static_workers(
    engines: Mapping[int, AsyncEngine[In, Out]],
    *,
    name: str = "static",
    device_types: Mapping[int, DeviceType] = MappingProxyType({}),
) -> Workers[In, Out]:
    """Return a pool of these engines that never changes: for tests, and for programs of one file."""
    return Workers(name, engines, device_types)


class _Missing(AsyncEngine[Any, Any]):
    """The engine of an absent instance."""

    def __init__(self, pool: str, instance_id: int) -> None:
        self._pool, self._instance_id = pool, instance_id

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        raise not_found(self._pool, self._instance_id)
