"""Events into an index through a lossy channel: in order, repaired, and nothing kept of workers that are gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random
from typing import Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv import EventLog, KvIndex, WorkerRank
from operators.kv.events import EventFeed, RepairLimits
from pipeline import ContractViolation
from pipeline.protocols.kv import (
    DumpFailed,
    InvalidRange,
    KvCleared,
    KvEvent,
    KvEventData,
    KvRemoved,
    KvStored,
    RecoveredEvents,
    RecoveredTree,
    RecoveryAnswer,
    RecoveryReply,
    RouterEvent,
    StoredBlock,
    TooNew,
)

RANK = WorkerRank(1)
LIMITS = RepairLimits(timeout_s=5.0, first_delay_s=1.0, longest_delay_s=4.0, attempts=4)


class Workers:
    """Answers for the logs of its ranks; each answer takes `takes_s`, and is replaced by those in `scripted` first."""

    def __init__(self, *ranks: WorkerRank, takes_s: float = 1.0, kept: int = 1024) -> None:
        self.logs = {rank: EventLog(rank, kept_events=kept) for rank in ranks}
        self.takes_s = takes_s
        self.requests: list[tuple[WorkerRank, int | None]] = []
        self.asked_at_s: list[float] = []
        self.scripted: list[RecoveryAnswer | Exception | None] = []
        self.under_way = 0
        self.most_at_once = 0

    async def recover(self, rank: WorkerRank, start: int | None) -> RecoveryReply | None:
        self.requests.append((rank, start))
        self.asked_at_s.append(anyio.current_time())
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            await anyio.sleep(self.takes_s)
        finally:
            self.under_way -= 1
        if self.scripted:
            answer = self.scripted.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return None if answer is None else RecoveryReply.of(answer)
        return RecoveryReply.of(self.logs[rank].recover(start))


@asynccontextmanager
async def running(feed: EventFeed) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.run)
        yield
        tasks.cancel_scope.cancel()


def root(*blocks: int) -> KvStored:
    return KvStored(None, [StoredBlock(block, block) for block in blocks])


def held(feed: EventFeed, block: int) -> list[WorkerRank]:
    return sorted(feed.index.find_matches([block]))


def begun(*ranks: WorkerRank, kept: int = 1024, limits: RepairLimits = LIMITS) -> tuple[Workers, EventFeed]:
    """Workers, and a feed that receives the events of their ranks."""
    workers = Workers(*ranks, kept=kept)
    feed = EventFeed(KvIndex(), workers.recover, limits=limits)
    for rank in ranks:
        feed.add_worker(rank.worker_id, [rank.dp_rank])
    return workers, feed


async def test_a_worker_that_appears_is_queried_for_everything() -> None:
    workers, feed = begun(RANK)
    workers.logs[RANK].record(root(1))
    async with running(feed):
        await anyio.sleep(2)
        assert held(feed, 1) == [RANK]
        assert (workers.requests, feed.under_repair) == ([(RANK, None)], [])
        feed.receive(workers.logs[RANK].record(root(2)))
        assert held(feed, 2) == [RANK]


async def test_events_that_arrive_during_a_repair_follow_it() -> None:
    workers, feed = begun(RANK)
    log = workers.logs[RANK]
    async with running(feed):
        await anyio.sleep(0.5)
        early = [log.record(root(block)) for block in (1, 2, 3)]
        workers.scripted = [RecoveredTree([], 0)]
        for event in (early[1], early[2], early[0]):
            feed.receive(event)
        assert held(feed, 1) == []
        await anyio.sleep(1)
        assert [held(feed, block) for block in (1, 2, 3)] == [[RANK]] * 3
        assert len(workers.requests) == 1


async def test_a_reported_loss_of_a_publisher_queries_its_ranks_and_those_without_a_known_one() -> None:
    ranks = [WorkerRank(worker_id) for worker_id in (1, 2, 3)]
    workers, feed = begun(*ranks)
    async with running(feed):
        await anyio.sleep(2)
        for rank in ranks[:2]:
            feed.receive(workers.logs[rank].record(root(1)), publisher_id=10 * rank.worker_id)
        for rank in ranks:
            workers.logs[rank].record(root(2))
        workers.requests.clear()
        feed.recheck(10)
        await anyio.sleep(2)
        assert sorted(workers.requests) == [(ranks[0], 2), (ranks[2], 1)]
        assert held(feed, 2) == [ranks[0], ranks[2]]
        feed.recheck()
        await anyio.sleep(2)
        assert held(feed, 2) == ranks


async def test_a_gap_is_queried_and_the_state_stays_meanwhile() -> None:
    workers, feed = begun(RANK)
    log = workers.logs[RANK]
    async with running(feed):
        await anyio.sleep(2)
        feed.receive(log.record(root(1)))
        log.record(root(2))
        feed.receive(log.record(root(3)))
        await anyio.sleep(0.5)
        assert (held(feed, 1), held(feed, 2), held(feed, 3)) == ([RANK], [], [])
        await anyio.sleep(1)
        assert (held(feed, 1), held(feed, 2), held(feed, 3)) == ([RANK], [RANK], [RANK])
        assert workers.requests == [(RANK, None), (RANK, 2)]


async def test_an_event_seen_before_is_not_applied_again() -> None:
    counted: list[tuple[str, str]] = []
    workers = Workers(RANK)
    feed = EventFeed(KvIndex(), workers.recover, counted=lambda kind, status: counted.append((kind, status)))
    feed.add_worker(1)
    log = workers.logs[RANK]
    async with running(feed):
        await anyio.sleep(2)
        events = [log.record(root(1)), log.record(KvRemoved([1])), log.record(KvRemoved([1])), log.record(KvCleared())]
        for event in [events[0], events[0], *events, events[1]]:
            feed.receive(event)
    assert counted == [("stored", "ok"), ("removed", "ok"), ("removed", "block_not_found"), ("cleared", "ok")]


async def test_a_worker_out_of_the_events_reach_sends_its_tree() -> None:
    workers, feed = begun(RANK, kept=2)
    log = workers.logs[RANK]
    async with running(feed):
        await anyio.sleep(2)
        feed.receive(log.record(root(1)))
        log.record(KvRemoved([1]))
        later = [log.record(root(block)) for block in range(2, 6)]
        feed.receive(later[-1])
        await anyio.sleep(2)
    assert [held(feed, block) for block in (1, 2, 5)] == [[], [RANK], [RANK]]


async def test_a_clear_in_the_gap_makes_what_was_before_it_void() -> None:
    workers, feed = begun(RANK)
    log = workers.logs[RANK]
    async with running(feed):
        await anyio.sleep(2)
        feed.receive(log.record(root(1)))
        log.record(root(2))
        log.record(KvCleared())
        feed.receive(log.record(root(3)))
        await anyio.sleep(2)
        feed.receive(log.record(root(4)))
    assert [held(feed, block) for block in (1, 2, 3, 4)] == [[], [], [RANK], [RANK]]


@pytest.mark.parametrize(
    "trouble", [OSError("unreachable"), DumpFailed("busy"), TooNew(2, None, 1), InvalidRange(2, 1)]
)
async def test_a_worker_that_does_not_answer_is_queried_again(trouble: RecoveryAnswer | Exception) -> None:
    """Until it does, nothing is known of the rank: old claims are worse than none."""
    workers, feed = begun(RANK)
    log = workers.logs[RANK]
    async with running(feed):
        await anyio.sleep(2)
        feed.receive(log.record(root(1)))
        log.record(root(2))
        workers.scripted = [trouble]
        feed.receive(log.record(root(3)))
        await anyio.sleep(1.5)
        assert (held(feed, 1), feed.under_repair) == ([], [RANK])
        await anyio.sleep(2)
        assert ([held(feed, block) for block in (1, 2, 3)], feed.under_repair) == ([[RANK]] * 3, [])
        assert workers.requests[-1] == (RANK, None)


async def test_an_answer_that_takes_too_long_is_not_waited_for() -> None:
    workers, feed = begun(RANK)
    workers.takes_s = 100.0
    workers.logs[RANK].record(root(1))
    async with running(feed):
        await anyio.sleep(1)
        workers.takes_s = 1.0
        await anyio.sleep(7)
        assert held(feed, 1) == [RANK]


async def test_after_some_attempts_a_rank_begins_anew_with_what_arrives() -> None:
    workers, feed = begun(RANK)
    log = workers.logs[RANK]
    workers.scripted = [OSError("unreachable") for _ in range(4)]
    log.record(root(1))
    kept = [log.record(root(block)) for block in (2, 3, 4, 5)]
    async with running(feed):
        for event in (kept[0], kept[3], kept[2]):  # the second is lost: what was before it cannot be built on
            feed.receive(event)
        await anyio.sleep(20)
        assert [later - sooner - 1 for sooner, later in pairwise(workers.asked_at_s)] == pytest.approx([1, 2, 4])
        assert feed.under_repair == []
        assert [held(feed, block) for block in (1, 2, 3, 4, 5)] == [[], [], [], [RANK], [RANK]]
        feed.receive(log.record(root(6)))
        assert held(feed, 6) == [RANK]


async def test_a_worker_that_keeps_nothing_is_followed_from_what_arrives() -> None:
    workers, feed = begun(RANK)
    log = workers.logs[RANK]
    workers.scripted = [None, None]
    for block in (1, 2):
        log.record(root(block))
    async with running(feed):
        await anyio.sleep(2)
        feed.receive(log.record(root(3)))
        await anyio.sleep(2)
        feed.receive(log.record(root(4)))
        assert [held(feed, block) for block in (1, 3, 4)] == [[], [RANK], [RANK]]


async def test_events_wait_through_answers_that_do_not_reach_them() -> None:
    workers, feed = begun(RANK)
    log = workers.logs[RANK]
    workers.scripted = [RecoveredTree([], 1), None]
    for block in (1, 2):
        log.record(root(block))
    async with running(feed):
        for block in (3, 4):
            feed.receive(log.record(root(block)))
        await anyio.sleep(5)
        assert [held(feed, block) for block in (2, 3, 4)] == [[], [RANK], [RANK]]


async def test_a_rank_with_progress_is_queried_as_often_as_it_takes() -> None:
    workers, feed = begun(RANK)
    events = [workers.logs[RANK].record(root(block)) for block in range(1, 11)]
    workers.scripted = [RecoveredEvents([event]) for event in events[:8]]
    async with running(feed):
        feed.receive(events[9])
        await anyio.sleep(60)
        assert [held(feed, block) for block in (1, 8, 9, 10)] == [[RANK]] * 4
        assert len(workers.requests) == 9


async def test_a_rank_that_goes_as_its_answer_comes_stays_gone() -> None:
    feed = EventFeed(KvIndex(), recover=lambda rank, start: answer())

    async def answer() -> RecoveryReply:
        feed.remove_worker(1)
        log = EventLog(RANK)
        log.record(root(1))
        return RecoveryReply.of(log.recover())

    feed.add_worker(1)
    async with running(feed):
        await anyio.sleep(1)
    assert feed.index.workers() == []


async def test_a_rank_that_lost_too_much_meanwhile_is_queried_again() -> None:
    workers, feed = begun(RANK, limits=RepairLimits(kept_events=2))
    log = workers.logs[RANK]
    async with running(feed):
        await anyio.sleep(0.5)
        workers.scripted = [RecoveredTree([], 0)]
        for block in range(1, 6):
            feed.receive(log.record(root(block)))
        await anyio.sleep(5)
        assert [held(feed, block) for block in (1, 3, 5)] == [[RANK]] * 3
        assert workers.requests == [(RANK, None), (RANK, 1)]


async def test_a_worker_that_goes_during_its_repair_leaves_nothing() -> None:
    workers, feed = begun(RANK)
    workers.logs[RANK].record(root(1))
    async with running(feed):
        await anyio.sleep(0.5)
        feed.remove_worker(1)
        await anyio.sleep(0.1)
        assert workers.under_way == 0
        feed.receive(workers.logs[RANK].record(root(2)))
        await anyio.sleep(10)
    assert (feed.index.workers(), feed.under_repair, len(workers.requests)) == ([], [], 1)


async def test_what_an_older_life_of_a_worker_answers_is_not_taken() -> None:
    workers, feed = begun(RANK)
    workers.logs[RANK].record(root(1))
    async with running(feed):
        await anyio.sleep(0.5)
        feed.remove_rank(RANK)
        workers.logs[RANK] = EventLog(RANK)
        workers.logs[RANK].record(root(2))
        feed.add_worker(1)
        await anyio.sleep(2)
    assert (held(feed, 1), held(feed, 2)) == ([], [RANK])


async def test_events_of_another_residency_domain_change_nothing_and_are_counted() -> None:
    """Their ids count as the others' do."""
    counted: list[tuple[str, str]] = []
    workers = Workers(RANK)
    feed = EventFeed(KvIndex(), workers.recover, counted=lambda kind, status: counted.append((kind, status)))
    feed.add_worker(1)
    changes: list[KvEventData] = [root(2), KvRemoved([1]), KvCleared()]
    async with running(feed):
        await anyio.sleep(2)
        feed.receive(RouterEvent(1, KvEvent(1, root(1))))
        for event_id, change in enumerate(changes, 2):
            feed.receive(RouterEvent(1, KvEvent(event_id, change), residency_domain="pool"))
        feed.receive(RouterEvent(1, KvEvent(5, root(5))))
        assert [held(feed, block) for block in (1, 2, 5)] == [[RANK], [], [RANK]]
    unsupported = [(kind, "unsupported_residency_domain") for kind in ("stored", "removed", "cleared")]
    assert counted == [("stored", "ok"), *unsupported, ("stored", "ok")]
    assert len(workers.requests) == 1


async def test_a_clear_of_another_residency_domain_makes_nothing_void() -> None:
    workers, feed = begun(RANK)
    async with running(feed):
        await anyio.sleep(2)
        first = [RouterEvent(1, KvEvent(number, root(number))) for number in (1, 2)]
        cleared = RouterEvent(1, KvEvent(3, KvCleared()), residency_domain="pool")
        feed.receive(first[0])
        workers.scripted = [RecoveredEvents([cleared]), RecoveredTree(first, 3)]
        feed.receive(RouterEvent(1, KvEvent(4, root(4))))
        await anyio.sleep(5)
        assert [held(feed, block) for block in (1, 2, 4)] == [[RANK]] * 3


@pytest.mark.parametrize(("data", "kind"), [(KvRemoved(cast("list[int]", [[]])), "removed"), ("?", "unknown")])
@pytest.mark.parametrize("in_repair", [False, True])
async def test_an_invalid_event_harms_no_other_rank(
    in_repair: bool, data: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[tuple[str, str]] = []
    other = WorkerRank(2)
    workers = Workers(RANK, other)
    workers.scripted = [None, None]
    feed = EventFeed(KvIndex(), workers.recover, counted=lambda kind, status: counted.append((kind, status)))
    for rank in (RANK, other):
        feed.add_worker(rank.worker_id)
    async with running(feed):
        await anyio.sleep(0.5 if in_repair else 2)
        feed.receive(RouterEvent(1, KvEvent(1, data)))
        await anyio.sleep(2)
        feed.receive(RouterEvent(1, KvEvent(2, root(1))))
        feed.receive(workers.logs[other].record(root(1)))
        assert held(feed, 1) == [RANK, other]
    assert counted[0] == (kind, "failed")
    assert "event 1 of" in caplog.text


async def test_a_publisher_that_counts_badly_keeps_no_event_from_the_index(caplog: pytest.LogCaptureFixture) -> None:
    def counted(kind: str, status: str) -> None:
        raise ValueError("cannot count to 2")

    workers = Workers(RANK)
    feed = EventFeed(KvIndex(), workers.recover, counted=counted)
    feed.add_worker(RANK.worker_id)
    workers.logs[RANK].record(root(1))
    async with running(feed):
        await anyio.sleep(2)
        feed.receive(workers.logs[RANK].record(root(2)))
        assert (held(feed, 1), held(feed, 2)) == ([RANK], [RANK])
    assert "cannot count to 2" in caplog.text


async def test_ranks_are_repaired_side_by_side_but_not_too_many() -> None:
    ranks = [WorkerRank(worker) for worker in range(10)]
    workers, feed = begun(*ranks, limits=RepairLimits(at_once=3))
    async with running(feed):
        await anyio.sleep(1.5)
        assert len(feed.under_repair) == 7
        await anyio.sleep(5)
        assert (feed.under_repair, workers.most_at_once) == ([], 3)


async def test_only_events_of_ranks_that_were_added_count() -> None:
    workers, feed = begun(RANK)
    for rank in (WorkerRank(2), WorkerRank(1, 1)):
        feed.receive(EventLog(rank).record(root(1)))
    async with running(feed):
        await anyio.sleep(2)
    assert (feed.index.workers(), workers.requests) == ([], [(RANK, None)])


async def test_a_cancelled_run_leaves_its_repairs_to_the_next() -> None:
    workers, feed = begun(RANK)
    workers.logs[RANK].record(root(1))
    async with running(feed):
        await anyio.sleep(0.5)
    assert (feed.under_repair, workers.under_way) == ([RANK], 0)
    async with running(feed):
        await anyio.sleep(0.5)
        with pytest.raises(ContractViolation):
            await feed.run()
        await anyio.sleep(2)
    assert (held(feed, 1), feed.under_repair) == ([RANK], [])


def changes(random: Random) -> Callable[[], KvEventData]:
    """Changes such as an engine makes: roots, continuations, removals of any block, seldom a clear."""
    names: list[int] = []

    def one() -> KvEventData:
        kind = random.random()
        if kind < 0.05:
            names.clear()
            return KvCleared()
        if kind < 0.3 and names:
            return KvRemoved([names.pop(random.randrange(len(names)))])
        parent = random.choice([None, *names[-5:]])
        names.append(random.getrandbits(64))
        return KvStored(parent, [StoredBlock(names[-1], random.randint(1, 3))])

    return one


@given(st.integers(0, 2**32))
async def test_whatever_the_channel_does_the_index_ends_as_the_sources_are(seed: int) -> None:
    """Loss, duplicates, another order, repairs that fail; the last event of each rank arrives."""
    random = Random(seed)
    ranks = [WorkerRank(1), WorkerRank(1, 1), WorkerRank(2)]
    workers, feed = begun(*ranks, kept=8)
    workers.scripted = random.choices([OSError("unreachable"), DumpFailed("busy")], k=random.randint(0, 3))
    sources = {rank: changes(random) for rank in ranks}
    async with running(feed):
        channel: list[RouterEvent] = []
        for _ in range(60):
            rank = random.choice(ranks)
            channel += [workers.logs[rank].record(sources[rank]())] * random.choice([0, 1, 1, 1, 1, 2])
            if len(channel) > random.randint(0, 4):
                feed.receive(channel.pop(random.randrange(len(channel))))
            if random.random() < 0.3:
                await anyio.sleep(random.choice([0.1, 1.0, 5.0]))
        for rank in ranks:
            feed.receive(workers.logs[rank].record(root(5)))
        await anyio.sleep(200)
    for rank in ranks:
        assert feed.index.dump(rank) == workers.logs[rank].index.dump(rank)
    assert feed.under_repair == []


def test_an_answer_may_speak_of_all_ranks_of_the_worker() -> None:
    index = KvIndex()
    logs = [EventLog(WorkerRank(1, rank), index) for rank in range(2)]
    events = [log.record(root(1)) for log in logs]
    feed = EventFeed(KvIndex(), Workers().recover)
    feed.add_worker(1, [1])
    rank_feed = feed._ranks[WorkerRank(1, 1)]
    assert rank_feed.install(RecoveredTree(index.dump(), 1))
    assert feed.index.ranks() == [WorkerRank(1, 1)]
    rank_feed.forget()
    assert rank_feed.install(RecoveredEvents(events))
    assert held(feed, 1) == [WorkerRank(1, 1)]
