"""SessionAffinity: who is first, who is bound, what ends a binding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.sessions import (
    Bound,
    Claimed,
    Pending,
    SessionAffinity,
    check_explicit,
    may_retry_unpinned,
    session_id_of,
)
from operators.kv.types import WorkerRank
from pipeline import InvalidArgument, ResourceExhausted

A, B = WorkerRank(1), WorkerRank(2, 3)


def first(affinity: SessionAffinity, session_id: str = "s", now_s: float = 0.0) -> Claimed:
    entry = affinity.enter(session_id, now_s)
    assert isinstance(entry, Claimed)
    return entry


def bound(affinity: SessionAffinity, session_id: str = "s", now_s: float = 0.0) -> Bound:
    entry = affinity.enter(session_id, now_s)
    assert isinstance(entry, Bound)
    return entry


def everyone(_: WorkerRank) -> bool:
    return True


@pytest.mark.parametrize("ttl_s", [0, -1, 31_536_001, float("nan"), float("inf")])
def test_the_time_is_between_a_second_and_a_year(ttl_s: float) -> None:
    with pytest.raises(InvalidArgument):
        SessionAffinity(ttl_s)
    assert [SessionAffinity(good).ttl_s for good in (1, 31_536_000)] == [1, 31_536_000]


def test_a_session_id_is_at_most_256_bytes() -> None:
    assert [session_id_of(text) for text in (None, "", "a" * 256, "é" * 128)] == [None, None, "a" * 256, "é" * 128]
    with pytest.raises(InvalidArgument):
        session_id_of("é" * 129)


def test_the_first_dispatch_binds_and_others_wait_for_it() -> None:
    affinity = SessionAffinity(60)
    claim = first(affinity)
    assert affinity.enter("s", 0.0) == Pending("s")
    affinity.bind(claim, A)
    assert (bound(affinity).rank, affinity.peek("s", 0.0)) == (A, A)


def test_when_the_first_is_not_dispatched_the_next_is_first() -> None:
    affinity = SessionAffinity(60)
    affinity.give_up(first(affinity))
    assert len(affinity) == 0
    again = first(affinity)
    affinity.bind(again, B)
    affinity.give_up(again)
    assert bound(affinity).rank == B, "giving up after binding changes nothing"


def test_a_binding_idles_only_without_a_lease() -> None:
    affinity = SessionAffinity(10)
    held = affinity.bind(first(affinity), A)
    other = bound(affinity, now_s=1.0)
    assert affinity.expire(1000.0) == []
    affinity.leave(held, 1000.0)
    affinity.leave(held, 1000.0)
    assert affinity.peek("s", 2000.0) == A, "the other one still holds it"
    affinity.leave(other, 2000.0)
    assert (affinity.peek("s", 2009.0), affinity.expire(2009.0)) == (A, [])
    assert (affinity.peek("s", 2010.0), affinity.expire(2010.0)) == (None, ["s"])


def test_a_binding_that_is_over_does_not_wait_for_the_reaper() -> None:
    affinity = SessionAffinity(10)
    affinity.leave(affinity.bind(first(affinity), A), 0.0)
    assert isinstance(affinity.enter("s", 10.0), Claimed)


@pytest.mark.parametrize(("ttl_s", "every_s"), [(5.0, 5.0), (600.0, 30.0)])
def test_the_reaper_comes_every_half_minute_or_sooner(ttl_s: float, every_s: float) -> None:
    assert SessionAffinity(ttl_s).reap_every_s == every_s


def test_a_failed_worker_loses_the_session_and_old_leases_do_no_harm() -> None:
    affinity = SessionAffinity(10)
    old = affinity.bind(first(affinity), A)
    assert affinity.invalidate(old)
    affinity.bind(first(affinity, now_s=1.0), B)
    assert not affinity.invalidate(old), "it is bound anew"
    affinity.leave(old, 5.0)
    assert (affinity.peek("s", 100.0), affinity.expire(100.0)) == (B, [])


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("retried", [False, True])
def test_a_failed_bound_request_goes_once_more_without_its_pin(cancelled: bool, explicit: bool, retried: bool) -> None:
    again = may_retry_unpinned(cancelled=cancelled, explicit=explicit, retried=retried)
    assert again == (True not in (cancelled, explicit, retried))


def test_an_explicit_worker_must_be_that_of_the_session() -> None:
    check_explicit(B, 2)
    check_explicit(B, 2, 3)
    for worker_id, dp_rank in [(1, None), (2, 0)]:
        with pytest.raises(InvalidArgument):
            check_explicit(B, worker_id, dp_rank)


def test_peeking_reserves_nothing() -> None:
    affinity = SessionAffinity(10)
    assert (affinity.peek("s", 0.0), len(affinity)) == (None, 0)
    claim = first(affinity)
    assert affinity.peek("s", 0.0) is None
    affinity.leave(affinity.bind(claim, A), 0.0)
    assert affinity.peek("s", 9.0) == A
    assert affinity.expire(10.0) == ["s"], "peeking did not refresh it"


def test_there_is_room_for_so_many_sessions() -> None:
    affinity = SessionAffinity(10, bindings_max=1)
    affinity.leave(affinity.bind(first(affinity, "a"), A), 0.0)
    with pytest.raises(ResourceExhausted):
        affinity.enter("b", 1.0)
    assert not affinity.observe("b", A, 1.0, everyone)
    assert bound(affinity, "a", 1.0).rank == A
    assert SessionAffinity(10).bindings_max == 65_536


def test_of_two_replicas_the_first_live_binding_stays() -> None:
    affinity = SessionAffinity(10)
    assert affinity.observe("s", A, 0.0, everyone)
    assert not affinity.observe("s", B, 5.0, everyone)
    assert affinity.peek("s", 9.0) == A
    assert affinity.observe("s", A, 5.0, everyone), "the same again refreshes it"
    assert affinity.peek("s", 14.0) == A
    assert affinity.observe("s", B, 15.0, everyone), "the first is over"
    assert affinity.peek("s", 15.0) == B


def test_news_of_an_unknown_rank_is_passed_over() -> None:
    affinity = SessionAffinity(10)
    assert not affinity.observe("s", A, 0.0, lambda rank: rank != A)
    assert len(affinity) == 0


def test_a_replica_that_binds_while_a_request_is_deciding_wins() -> None:
    affinity = SessionAffinity(10)
    claim = first(affinity)
    assert affinity.observe("s", B, 0.0, everyone)
    late = affinity.bind(claim, A)
    assert (late.rank, affinity.peek("s", 0.0)) == (A, B)
    assert not affinity.invalidate(late)
    affinity.leave(late, 1.0)
    affinity.give_up(claim)
    assert affinity.peek("s", 9.0) == B


class Users:
    """Requests that enter a session, and end what they began in one way or another."""

    def __init__(self) -> None:
        self.affinity = SessionAffinity(5)
        self.claims: list[Claimed] = []
        self.holding: list[Bound] = []

    def enter(self, session: int, _: int, now_s: float) -> None:
        entry = self.affinity.enter(str(session), now_s)
        if isinstance(entry, Claimed):
            self.claims.append(entry)
        elif isinstance(entry, Bound):
            self.holding.append(entry)

    def bind(self, session: int, pick: int, _: float) -> None:
        if self.claims:
            claim = self.claims.pop(pick % len(self.claims))
            self.holding.append(self.affinity.bind(claim, WorkerRank(session)))

    def give_up(self, _: int, pick: int, __: float) -> None:
        if self.claims:
            self.affinity.give_up(self.claims.pop(pick % len(self.claims)))

    def leave(self, _: int, pick: int, now_s: float) -> None:
        if self.holding:
            self.affinity.leave(self.holding[pick % len(self.holding)], now_s)

    def invalidate(self, _: int, pick: int, __: float) -> None:
        if self.holding:
            self.affinity.invalidate(self.holding[pick % len(self.holding)])

    def expire(self, _: int, __: int, now_s: float) -> None:
        self.affinity.expire(now_s)

    def finish(self, now_s: float) -> None:
        for claim in self.claims:
            self.affinity.give_up(claim)
        for one in self.holding:
            self.affinity.leave(one, now_s)


actions = st.sampled_from(["enter", "bind", "give_up", "leave", "invalidate", "expire"])


@given(st.lists(st.tuples(st.integers(0, 2), actions, st.integers(0, 3)), max_size=60))
def test_after_all_have_left_every_binding_expires(steps: list[tuple[int, str, int]]) -> None:
    users = Users()
    for now, (session, action, pick) in enumerate(steps):
        getattr(users, action)(session, pick, float(now))
    users.finish(100.0)
    users.affinity.expire(200.0)
    assert len(users.affinity) == 0
