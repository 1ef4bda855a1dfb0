"""Sessions: requests of one session go where its first one went.

    enter ──► Bound: go there, holding a lease
          ──► Claimed: route freely, then `bind` or `give_up`
          another request has claimed it: wait until it is decided

Source: dynamo lib/llm/src/kv_router, session affinity. Other than there only `enter` waits, and the time is read from a
clock that is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeAlias

import anyio
from attrs import define, field, frozen

from pipeline import Cancelled, Control, InvalidArgument, ResourceExhausted
from pipeline.protocols.field_rules import InvalidRecord

from .types import WorkerRank

SESSION_HEADER = "X-Dynamo-Session-ID"
SESSION_ID_BYTES_MAX = 256
BINDINGS_MAX = 65_536
TTL_S_MAX = 31_536_000
REAP_EVERY_S_MAX = 30.0


@frozen
class SessionBinding:
    """A session and its worker, as routers show it to each other."""

    session_id: str
    worker: WorkerRank
    idle_s: float = 0.0
    """Seconds since its last request ended; 0 while one runs."""

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.idle_s < math.inf:
            raise InvalidRecord("expected seconds", "idle_s")


@define(eq=False)
class _Session:
    """A binding, or the claim of the request that is to make one (`rank` is None)."""

    rank: WorkerRank | None = None
    leases: int = 0
    idle_since_s: float = 0.0
    waiting: list[anyio.Event] = field(factory=list)
    """One for each request that waits for the claim to be decided."""


@define(eq=False)
class Bound:
    """The session is bound: the request is pinned to `rank` and holds a lease until `leave`."""

    session_id: str
    rank: WorkerRank
    _session: _Session
    _holds: bool = True


@frozen(eq=False)
class Claimed:
    """This request selects the worker of the session: end it with `bind` or `give_up`."""

    session_id: str
    _session: _Session


Entered: TypeAlias = Bound | Claimed
"""A request inside its session: bound to a worker, or the one that selects it."""


def session_id_of(metadata: Mapping[str, str]) -> str | None:
    """Return the session in a request's metadata, whose names know no case; None if it is absent or empty.

    Raises InvalidArgument if it is too long.
    """
    wanted = SESSION_HEADER.lower()
    text = next((text for name, text in metadata.items() if name.lower() == wanted), "")
    if len(text.encode("utf-8", "surrogatepass")) > SESSION_ID_BYTES_MAX:
        raise InvalidArgument(f"must be at most {SESSION_ID_BYTES_MAX} bytes", field=SESSION_HEADER)
    return text or None


def check_explicit(bound: WorkerRank, worker_id: int, dp_rank: int | None = None) -> None:
    """Raise InvalidArgument if a request names another worker or rank than its session is bound to."""
    if worker_id != bound.worker_id or dp_rank not in (None, bound.dp_rank):
        text = f"the session is bound to worker {bound.worker_id}, rank {bound.dp_rank}"
        raise InvalidArgument(f"{text}; the request names another", field="routing.backend_instance_id")


@define(eq=False)
class Sessions:
    """The sessions of one router, used in one loop; one that no request holds is dropped after `ttl_s` seconds.

    Without `run` in a task idle sessions are kept until they are entered. Raises InvalidArgument for a time outside 1
    second to 365 days.
    """

    ttl_s: float
    now_s: Callable[[], float]
    """The time in seconds; does not go back."""
    bindings_max: int = BINDINGS_MAX
    on_bound: Callable[[SessionBinding], object] | None = field(default=None, init=False)
    """Called when a request here has bound a session."""
    on_unbound: Callable[[SessionBinding], object] | None = field(default=None, init=False)
    """Called when a request here has unbound one, whose worker is at fault."""
    _sessions: dict[str, _Session] = field(factory=dict, init=False)
    _used: set[str] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.ttl_s <= TTL_S_MAX:
            text = f"must be between 1 and {TTL_S_MAX}, got {self.ttl_s}"
            raise InvalidArgument(text, field="session_affinity_ttl_s")

    @property
    def reap_every_s(self) -> float:
        """How often `expire` should be called."""
        return min(self.ttl_s, REAP_EVERY_S_MAX)

    @property
    def share_every_s(self) -> float:
        """How often other routers should get `take_used`."""
        return min(self.ttl_s / 3, REAP_EVERY_S_MAX)

    def __len__(self) -> int:
        return len(self._sessions)

    def peek(self, session_id: str) -> WorkerRank | None:
        """Return the rank the session is bound to; changes nothing."""
        session = self._sessions.get(session_id)
        return None if session is None or self._is_over(session) else session.rank

    async def enter(self, session_id: str, request_id: str, control: Control) -> Entered:
        """Begin a request of the session, once no other request claims it. A claim must end with `bind` or `give_up`.

        Raises ResourceExhausted when there is no room for a new session, Cancelled on a stop while it waits.
        """
        while (entered := self.enter_nowait(session_id)) is None:
            if control.is_stopped:
                raise Cancelled(f"Request {request_id} was cancelled")
            decided, waiting = anyio.Event(), self._sessions[session_id].waiting
            waiting.append(decided)
            forget = control.on_stop(decided.set)
            try:
                await decided.wait()
            finally:
                forget()
                with suppress(ValueError):  # woken: it is off the list
                    waiting.remove(decided)
        return entered

    def enter_nowait(self, session_id: str) -> Entered | None:
        """`enter`, or None while another request claims the session."""
        session = self._live(session_id)
        if session is None:
            if len(self._sessions) >= self.bindings_max:
                raise ResourceExhausted(f"{self.bindings_max} sessions are bound already")
            session = self._sessions[session_id] = _Session()
            return Claimed(session_id, session)
        if session.rank is None:
            return None
        session.leases += 1
        if self.on_bound is not None:
            self._used.add(session_id)
        return Bound(session_id, session.rank, session)

    def bind(self, claimed: Claimed, rank: WorkerRank) -> Bound:
        """Bind the session to the rank to which the request that claimed it was sent; it holds a lease now.

        If a replica bound the session meanwhile, that binding stays and this request has no lease.
        """
        session = claimed._session
        holds = self._sessions.get(claimed.session_id) is session and session.rank is None
        if holds:
            session.rank, session.leases = rank, 1
            _wake(session)
            if self.on_bound is not None:
                self.on_bound(SessionBinding(claimed.session_id, rank))
        return Bound(claimed.session_id, rank, session, holds)

    def give_up(self, claimed: Claimed) -> None:
        """Drop a claim whose request was not sent; the next request claims the session."""
        if self._sessions.get(claimed.session_id) is claimed._session and claimed._session.rank is None:
            del self._sessions[claimed.session_id]
            _wake(claimed._session)

    def leave(self, bound: Bound) -> None:
        """End a request's lease, once; the session is idle from the end of the last lease on.

        May be called in a plain callback.
        """
        if bound._holds:
            bound._holds = False
            bound._session.leases -= 1
            bound._session.idle_since_s = self.now_s()
            if self.on_bound is not None:
                self._used.add(bound.session_id)

    def invalidate(self, bound: Bound) -> bool:
        """Unbind the session after its worker left or failed the request. Return False if it was bound anew.

        Not for a request that was cancelled, which does not mean that the worker is at fault.
        """
        if self._sessions.get(bound.session_id) is not bound._session:
            return False
        del self._sessions[bound.session_id]
        if self.on_unbound is not None:
            self.on_unbound(SessionBinding(bound.session_id, bound.rank))
        return True

    def forget(self, session_id: str, rank: WorkerRank) -> None:
        """Take in that a replica unbound the session from that rank. Requests that run there keep their leases."""
        session = self._sessions.get(session_id)
        if session is not None and session.rank == rank:
            del self._sessions[session_id]

    def bindings(self) -> list[SessionBinding]:
        """Return all bindings, for a replica that does not know them."""
        return [self._binding(name, session) for name, session in self._sessions.items() if session.rank is not None]

    def take_used(self) -> list[SessionBinding]:
        """Return the bindings that requests here hold, or have held since the last call."""
        used, self._used = self._used, set()
        return [each for each in self.bindings() if each.session_id in used or self._sessions[each.session_id].leases]

    def _binding(self, session_id: str, session: _Session) -> SessionBinding:
        assert session.rank is not None, "the session is bound"
        idle_s = 0.0 if session.leases else max(0.0, self.now_s() - session.idle_since_s)
        return SessionBinding(session_id, session.rank, idle_s)

    def observe(
        self, session_id: str, rank: WorkerRank, is_known: Callable[[WorkerRank], bool], idle_s: float = 0.0
    ) -> bool:
        """Take in that a replica bound the session; return whether it is bound there now.

        The first live binding stays, and the same one again is refreshed. An unknown rank is ignored, and so is a new
        binding for which there is no room, or that is over there. The binding replaces a claim that is still open.
        """
        if not is_known(rank) or idle_s >= self.ttl_s:
            return False
        since_s = self.now_s() - idle_s
        session = self._live(session_id)
        if session is not None and session.rank is not None:
            if session.rank == rank:
                session.idle_since_s = max(session.idle_since_s, since_s)
            return session.rank == rank
        if session is None and len(self._sessions) >= self.bindings_max:
            return False
        self._sessions[session_id] = _Session(rank, 0, since_s)
        if session is not None:
            _wake(session)
        return True

    def expire(self) -> list[str]:
        """Drop the bindings that were idle for `ttl_s`; return their sessions."""
        over = [session_id for session_id, session in self._sessions.items() if self._is_over(session)]
        for session_id in over:
            del self._sessions[session_id]
        return over

    async def run(self) -> None:
        """Drop idle sessions, until cancelled."""
        while True:
            await anyio.sleep(self.reap_every_s)
            self.expire()

    def _is_over(self, session: _Session) -> bool:
        return session.rank is not None and not session.leases and self.now_s() - session.idle_since_s >= self.ttl_s

    def _live(self, session_id: str) -> _Session | None:
        """Return the session's binding or claim; drop one that has expired."""
        session = self._sessions.get(session_id)
        if session is not None and self._is_over(session):
            del self._sessions[session_id]
            return None
        return session


def _wake(session: _Session) -> None:
    for decided in session.waiting:
        decided.set()
    session.waiting.clear()
