"""Sessions: which request is first, which are bound, what ends a binding."""

from __future__ import annotations

from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.sessions import BINDINGS_MAX, SESSION_HEADER, Bound, Claimed, Sessions, check_explicit, session_id_of
from operators.kv.types import WorkerRank
from pipeline import InvalidArgument, ResourceExhausted

A, B = WorkerRank(1), WorkerRank(2, 3)


class TimedSessions(Sessions):
    """Sessions with the time of each step in the call."""

    def __init__(self, ttl_s: float, bindings_max: int = BINDINGS_MAX) -> None:
        self.time_s = 0.0
        super().__init__(ttl_s, lambda: self.time_s, bindings_max)

    def at(self, time_s: float) -> Self:
        self.time_s = time_s
        return self


def first(sessions: TimedSessions, session_id: str = "s", now_s: float = 0.0) -> Claimed:
    entry = sessions.at(now_s).enter_nowait(session_id)
    assert isinstance(entry, Claimed)
    return entry


def bound(sessions: TimedSessions, session_id: str = "s", now_s: float = 0.0) -> Bound:
    entry = sessions.at(now_s).enter_nowait(session_id)
    assert isinstance(entry, Bound)
    return entry


def everyone(_: WorkerRank) -> bool:
    return True


@pytest.mark.parametrize("ttl_s", [0, -1, 31_536_001, float("nan"), float("inf")])
def test_the_time_is_between_a_second_and_a_year(ttl_s: float) -> None:
    with pytest.raises(InvalidArgument):
        TimedSessions(ttl_s)
    assert [TimedSessions(good).ttl_s for good in (1, 31_536_000)] == [1, 31_536_000]


def test_a_session_id_is_at_most_256_bytes() -> None:
    assert session_id_of({}) is None
    for text in ("", "a" * 256, "é" * 128):
        assert session_id_of({SESSION_HEADER.upper(): text}) == (text or None)
    with pytest.raises(InvalidArgument):
        session_id_of({SESSION_HEADER: "é" * 129})


def test_the_first_dispatch_binds_and_others_wait_for_it() -> None:
    sessions = TimedSessions(60)
    claim = first(sessions)
    assert sessions.at(0.0).enter_nowait("s") is None
    sessions.bind(claim, A)
    assert (bound(sessions).rank, sessions.at(0.0).peek("s")) == (A, A)


def test_when_the_first_is_not_dispatched_the_next_is_first() -> None:
    sessions = TimedSessions(60)
    sessions.give_up(first(sessions))
    assert len(sessions) == 0
    again = first(sessions)
    sessions.bind(again, B)
    sessions.give_up(again)
    assert bound(sessions).rank == B, "giving up after binding changes nothing"


def test_a_binding_idles_only_without_a_lease() -> None:
    sessions = TimedSessions(10)
    held = sessions.bind(first(sessions), A)
    other = bound(sessions, now_s=1.0)
    assert sessions.at(1000.0).expire() == []
    sessions.at(1000.0).leave(held)
    sessions.at(1000.0).leave(held)
    assert sessions.at(2000.0).peek("s") == A, "the other one still holds it"
    sessions.at(2000.0).leave(other)
    assert (sessions.at(2009.0).peek("s"), sessions.at(2009.0).expire()) == (A, [])
    assert (sessions.at(2010.0).peek("s"), sessions.at(2010.0).expire()) == (None, ["s"])


def test_a_binding_that_is_over_does_not_wait_for_the_reaper() -> None:
    sessions = TimedSessions(10)
    sessions.at(0.0).leave(sessions.bind(first(sessions), A))
    assert isinstance(sessions.at(10.0).enter_nowait("s"), Claimed)


@pytest.mark.parametrize(("ttl_s", "every_s"), [(5.0, 5.0), (600.0, 30.0)])
def test_the_reaper_comes_every_half_minute_or_sooner(ttl_s: float, every_s: float) -> None:
    assert TimedSessions(ttl_s).reap_every_s == every_s


def test_a_failed_worker_loses_the_session_and_old_leases_do_no_harm() -> None:
    sessions = TimedSessions(10)
    old = sessions.bind(first(sessions), A)
    assert sessions.invalidate(old)
    sessions.bind(first(sessions, now_s=1.0), B)
    assert not sessions.invalidate(old), "it is bound anew"
    sessions.at(5.0).leave(old)
    assert (sessions.at(100.0).peek("s"), sessions.at(100.0).expire()) == (B, [])


def test_an_explicit_worker_must_be_that_of_the_session() -> None:
    check_explicit(B, 2)
    check_explicit(B, 2, 3)
    for worker_id, dp_rank in [(1, None), (2, 0)]:
        with pytest.raises(InvalidArgument):
            check_explicit(B, worker_id, dp_rank)


def test_peeking_reserves_nothing() -> None:
    sessions = TimedSessions(10)
    assert (sessions.at(0.0).peek("s"), len(sessions)) == (None, 0)
    claim = first(sessions)
    assert sessions.at(0.0).peek("s") is None
    sessions.at(0.0).leave(sessions.bind(claim, A))
    assert sessions.at(9.0).peek("s") == A
    assert sessions.at(10.0).expire() == ["s"], "peeking did not refresh it"


def test_there_is_room_for_so_many_sessions() -> None:
    sessions = TimedSessions(10, bindings_max=1)
    sessions.at(0.0).leave(sessions.bind(first(sessions, "a"), A))
    with pytest.raises(ResourceExhausted):
        sessions.at(1.0).enter_nowait("b")
    assert not sessions.at(1.0).observe("b", A, everyone)
    assert bound(sessions, "a", 1.0).rank == A
    assert TimedSessions(10).bindings_max == 65_536


def test_of_two_replicas_the_first_live_binding_stays() -> None:
    sessions = TimedSessions(10)
    assert sessions.at(0.0).observe("s", A, everyone)
    assert not sessions.at(5.0).observe("s", B, everyone)
    assert sessions.at(9.0).peek("s") == A
    assert sessions.at(5.0).observe("s", A, everyone), "the same again refreshes it"
    assert sessions.at(14.0).peek("s") == A
    assert sessions.at(15.0).observe("s", B, everyone), "the first is over"
    assert sessions.at(15.0).peek("s") == B


def test_news_of_an_unknown_rank_is_passed_over() -> None:
    sessions = TimedSessions(10)
    assert not sessions.at(0.0).observe("s", A, lambda rank: rank != A)
    assert len(sessions) == 0


def test_a_replica_that_binds_while_a_request_is_deciding_wins() -> None:
    sessions = TimedSessions(10)
    claim = first(sessions)
    assert sessions.at(0.0).observe("s", B, everyone)
    late = sessions.bind(claim, A)
    assert (late.rank, sessions.at(0.0).peek("s")) == (A, B)
    assert not sessions.invalidate(late)
    sessions.at(1.0).leave(late)
    sessions.give_up(claim)
    assert sessions.at(9.0).peek("s") == B


class Users:
    """Requests that enter a session, and end what they began in one way or another."""

    def __init__(self) -> None:
        self.sessions = TimedSessions(5)
        self.claims: list[Claimed] = []
        self.holding: list[Bound] = []

    def enter(self, session: int, _: int, now_s: float) -> None:
        entry = self.sessions.at(now_s).enter_nowait(str(session))
        if isinstance(entry, Claimed):
            self.claims.append(entry)
        elif isinstance(entry, Bound):
            self.holding.append(entry)

    def bind(self, session: int, pick: int, _: float) -> None:
        if self.claims:
            claim = self.claims.pop(pick % len(self.claims))
            self.holding.append(self.sessions.bind(claim, WorkerRank(session)))

    def give_up(self, _: int, pick: int, __: float) -> None:
        if self.claims:
            self.sessions.give_up(self.claims.pop(pick % len(self.claims)))

    def leave(self, _: int, pick: int, now_s: float) -> None:
        if self.holding:
            self.sessions.at(now_s).leave(self.holding[pick % len(self.holding)])

    def invalidate(self, _: int, pick: int, __: float) -> None:
        if self.holding:
            self.sessions.invalidate(self.holding[pick % len(self.holding)])

    def expire(self, _: int, __: int, now_s: float) -> None:
        self.sessions.at(now_s).expire()

    def finish(self, now_s: float) -> None:
        for claim in self.claims:
            self.sessions.give_up(claim)
        for one in self.holding:
            self.sessions.at(now_s).leave(one)


actions = st.sampled_from(["enter", "bind", "give_up", "leave", "invalidate", "expire"])


@given(st.lists(st.tuples(st.integers(0, 2), actions, st.integers(0, 3)), max_size=60))
def test_after_all_have_left_every_binding_expires(steps: list[tuple[int, str, int]]) -> None:
    users = Users()
    for now, (session, action, pick) in enumerate(steps):
        getattr(users, action)(session, pick, float(now))
    users.finish(100.0)
    users.sessions.at(200.0).expire()
    assert len(users.sessions) == 0
