"""shared_sessions: routers in different processes keep a session on the same worker.

    bound, unbound, used again ──► published to the other routers ──► observed by their Sessions
    a router appears, or events may be lost ──► SessionsRequest ──► all bindings that it knows

What is received is advice: the first live binding of a router stays, one for an unknown worker is ignored. Turns of one
session that overlap in two processes may go to two workers. A router's bindings outlive it in the others, as the
caches of the workers do.

Source: dynamo lib/kv-router, session affinity replicas. Other than there a router that starts late requests the
bindings.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice

import anyio
from attrs import frozen

from pipeline import Context, function_engine
from pipeline.errors import InvalidMessage
from pipeline.loop import clock
from pipeline.network import EndpointId, EndpointWorkers, Event, EventPlane, Runtime, Scope
from pipeline.protocols.field_rules import U64
from pipeline.rx import CompositeDisposable, Disposable

from .other_routers import OtherRouters
from .sessions import SESSION_ID_BYTES_MAX, SessionBinding, Sessions
from .types import WorkerRank

SESSIONS_TOPIC = "session_affinity_events"
"""Topic of these events on the event plane."""
SESSIONS_ENDPOINT = "router_sessions"
"""Name of the endpoint, in the workers' component, at which routers give their bindings."""

_PART_BINDINGS = 256
"""Bindings in one event, and in one item of an answer."""
_UNKNOWN_S = 30.0
"""Seconds in which a binding is tried again whose worker is not known here yet."""
_UNKNOWN_MAX = 4096
_UNKNOWN_EVERY_S = 1.0

_log = logging.getLogger(__name__)


@frozen
class SessionEvent:
    """What a router has done with sessions."""

    router_id: U64
    bound: list[SessionBinding]
    """Bound by it, or used again."""
    unbound: list[SessionBinding]
    """No longer bound: their worker left, or failed a request."""


@frozen
class SessionsRequest:
    """A request for all bindings that the router knows."""


@frozen
class SessionsPart:
    """Some of a router's bindings."""

    bindings: list[SessionBinding]


@asynccontextmanager
async def shared_sessions(
    runtime: Runtime, endpoint: str | EndpointId, sessions: Sessions, is_known: Callable[[WorkerRank], bool]
) -> AsyncIterator[None]:
    """Share the sessions of a router with all routers of the component until the block ends.

    `is_known` returns whether the router has a worker. Raise as `Runtime.serve`.
    """
    where = EndpointId.parse(endpoint)
    served_at = EndpointId(where.namespace, where.component, SESSIONS_ENDPOINT)
    sync = SessionSync(runtime.events, Scope(where.namespace, where.component), sessions, is_known)

    async def give(request: SessionsRequest) -> AsyncIterator[SessionsPart]:
        bindings = iter(sessions.bindings())
        while part := list(islice(bindings, _PART_BINDINGS)):
            yield SessionsPart(part)

    served = await runtime.serve(served_at, function_engine(give), instance_id=sync.router_id)
    try:
        workers = runtime.workers(served_at, SessionsPart)
        missed = runtime.events.missed(sync.scope, SESSIONS_TOPIC)
        others = OtherRouters(workers, missed, sync.router_id, partial(sync.request, workers))
        with CompositeDisposable(sync.follow(), others.follow(runtime.scheduler)):
            running = runtime.scheduler.spawn(sync.run)
            try:
                yield
            finally:
                running.dispose()
    finally:
        await served.close(0)


class SessionSync:
    """The share of one router in this. For one loop."""

    def __init__(
        self, events: EventPlane, scope: Scope, sessions: Sessions, is_known: Callable[[WorkerRank], bool]
    ) -> None:
        self.scope, self._sessions, self._is_known = scope, sessions, is_known
        self._publisher = events.publisher(scope, SESSIONS_TOPIC)
        self._events = events.subscribe(scope, SESSIONS_TOPIC, SessionEvent)
        self._unknown: deque[tuple[float, SessionBinding]] = deque(maxlen=_UNKNOWN_MAX)
        self._clock = clock()

    @property
    def router_id(self) -> int:
        """Whose events are ours: random, at most 2^53 - 1."""
        return self._publisher.publisher_id

    def follow(self) -> Disposable:
        """Publish what the router does, and observe what others publish, until disposed."""
        sessions, following = self._sessions, self._events.subscribe(self._receive)

        def end() -> None:
            sessions.on_bound = sessions.on_unbound = None
            following.dispose()

        sessions.on_bound = lambda binding: self._publish([binding], [])
        sessions.on_unbound = lambda binding: self._publish([], [binding])
        return Disposable(end)

    async def run(self, scope: anyio.CancelScope) -> None:
        """Publish the sessions that are in use, so that they last elsewhere too, and try what was unknown again."""
        shared_s = self._clock()
        with scope:
            while True:
                await anyio.sleep(_UNKNOWN_EVERY_S if self._unknown else min(1.0, self._sessions.share_every_s))
                self._try_unknown()
                if self._clock() - shared_s >= self._sessions.share_every_s:
                    shared_s = self._clock()
                    used = self._sessions.take_used()
                    for at in range(0, len(used), _PART_BINDINGS):
                        self._publish(used[at : at + _PART_BINDINGS], [])

    async def request(self, workers: EndpointWorkers[SessionsRequest, SessionsPart], router_id: int) -> bool:
        """Request all bindings of another router and take them in. Raise if there are more than are kept here."""
        count = 0
        async with await workers.engine(router_id).generate(Context(SessionsRequest())) as stream:
            async for part in stream:
                count += len(part.bindings)
                if count > self._sessions.bindings_max:
                    raise InvalidMessage(f"more than {self._sessions.bindings_max} bindings")
                self.observe(part.bindings)
        return True

    def observe(self, bindings: Iterable[SessionBinding]) -> None:
        """Take in bindings of another router."""
        for binding in bindings:
            if len(binding.session_id.encode("utf-8", "surrogatepass")) > SESSION_ID_BYTES_MAX:
                continue
            if self._is_known(binding.worker):
                self._sessions.observe(binding.session_id, binding.worker, self._is_known, binding.idle_s)
            else:
                self._unknown.append((self._clock(), binding))

    def _try_unknown(self) -> None:
        now_s = self._clock()
        for _ in range(len(self._unknown)):
            since_s, binding = self._unknown.popleft()
            if self._is_known(binding.worker):
                self._sessions.observe(
                    binding.session_id, binding.worker, self._is_known, binding.idle_s + now_s - since_s
                )
            elif now_s - since_s < _UNKNOWN_S:
                self._unknown.append((since_s, binding))

    def _receive(self, event: Event[SessionEvent]) -> None:
        if (payload := event.payload).router_id == self.router_id:
            return
        for binding in payload.unbound:
            self._sessions.forget(binding.session_id, binding.worker)
        self.observe(payload.bound)

    def _publish(self, bound: list[SessionBinding], unbound: list[SessionBinding]) -> None:
        try:
            self._publisher.publish(SessionEvent(self.router_id, bound, unbound))
        except Exception as error:  # routing goes on without
            _log.warning("changes of sessions were not sent to the other routers: %s", error)
