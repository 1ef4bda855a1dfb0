"""Events of several lives of one worker: which publisher is believed, and what a late word of a former one does."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import TypeAlias

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv import EventLog, KvIndex, WorkerRank
from operators.kv.events import EventFeed, RepairLimits
from pipeline.protocols.kv import DumpFailed, KvEventData, KvRemoved, KvStored, RecoveryReply, RouterEvent, StoredBlock

RANK = WorkerRank(1)
LIMITS = RepairLimits(timeout_s=5.0, first_delay_s=1.0, longest_delay_s=4.0, attempts=4)
LONG_S = 300.0
"""Longer than any repair here takes."""

Sent: TypeAlias = tuple[RouterEvent, int]


class Life:
    """One life of the worker: its log and the id it publishes under."""

    def __init__(self, publisher_id: int, first_id: int = 1) -> None:
        self.publisher_id = publisher_id
        self.log = EventLog(RANK, kept_events=8, first_id=first_id)

    def sends(self, change: KvEventData) -> Sent:
        return self.log.record(change), self.publisher_id


class Site:
    """A feed and the worker whose current life answers it after `takes_s`; `troubles` come first, until there are none.

    With `names` the answers name the publisher; with `keeps` unset the worker keeps nothing.
    """

    def __init__(self, first: Life, *, names: bool = True, keeps: bool = True) -> None:
        self.living, self.names, self.keeps = first, names, keeps
        self.takes_s = 1.0
        self.questions: list[int | None] = []
        self.troubles: list[Exception | DumpFailed] = []
        self.feed = EventFeed(KvIndex(), self.recover, limits=LIMITS)
        self.feed.add_worker(RANK.worker_id)

    async def recover(self, rank: WorkerRank, start: int | None) -> RecoveryReply | None:
        self.questions.append(start)
        await anyio.sleep(self.takes_s / 2)
        if not self.keeps:
            return None
        named = self.living.publisher_id if self.names else None
        answer = self.troubles.pop(0) if self.troubles else self.living.log.recover(start)
        if isinstance(answer, Exception):
            raise answer
        await anyio.sleep(self.takes_s / 2)
        return RecoveryReply.of(answer, named)

    def arrives(self, *sent: Sent) -> None:
        for event, publisher_id in sent:
            self.feed.receive(event, publisher_id)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The feed runs, and its first request is answered."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.feed.run)
            await anyio.sleep(2)
            yield
            tasks.cancel_scope.cancel()

    @property
    def is_true(self) -> bool:
        """Whether the index holds what the living life holds."""
        return self.feed.index.dump(RANK) == self.living.log.index.dump(RANK)


def root(*blocks: int) -> KvStored:
    return KvStored(None, [StoredBlock(block, block) for block in blocks])


def names_in(index: KvIndex) -> set[int]:
    changes = [event.event.data for event in index.dump(RANK)]
    return {block.block_hash for change in changes if isinstance(change, KvStored) for block in change.blocks}


def held(site: Site, *blocks: int) -> list[bool]:
    return [bool(site.feed.index.find_matches([block])) for block in blocks]


async def test_a_straggler_with_a_high_id_does_not_mute_the_publisher_that_is_alive() -> None:
    site = Site(life := Life(71))
    straggler = Life(70, first_id=2000).sends(root(7))
    async with site.running():
        site.arrives(life.sends(root(1)), straggler)
        await anyio.sleep(LONG_S)
        site.arrives(life.sends(root(2)))
        assert (held(site, 1, 2, 7), site.feed.under_repair) == ([True, True, False], [])
    assert site.questions == [None, 2], "the straggler costs one question"


async def test_a_straggler_leaves_the_state_during_the_query() -> None:
    site = Site(life := Life(71))
    async with site.running():
        site.arrives(life.sends(root(1)), Life(70, first_id=2000).sends(root(7)))
        await anyio.sleep(0.5)
        site.arrives(life.sends(root(2)))
        assert site.feed.under_repair == [RANK]
        assert held(site, 1, 2) == [True, True], "events of the known publisher are applied meanwhile"


async def test_a_new_life_of_a_worker_is_believed_when_it_answers_so() -> None:
    site = Site(old := Life(70))
    async with site.running():
        site.arrives(*[old.sends(root(block)) for block in (1, 2, 3)])
        site.living = Life(71)
        site.arrives(site.living.sends(root(9)))
        assert held(site, 1, 9) == [True, False]
        await anyio.sleep(4)
        site.arrives(site.living.sends(root(10)))
        assert held(site, 1, 2, 3, 9, 10) == [False, False, False, True, True]


@pytest.mark.parametrize("names", [True, False])
async def test_a_restart_is_seen_also_where_no_event_came_before_it(names: bool) -> None:
    """All that the former life held came from its answer."""
    site = Site(old := Life(70), names=names)
    for block in (1, 2, 3):
        old.sends(root(block))
    async with site.running():
        assert held(site, 1, 2, 3) == [True, True, True]
        site.living = Life(71)
        site.arrives(site.living.sends(root(9)))
        await anyio.sleep(4)
        site.arrives(site.living.sends(root(10)))
        assert held(site, 3, 9, 10) == [False, True, True]


async def test_what_a_former_publisher_sent_does_not_count_late() -> None:
    site = Site(old := Life(70))
    async with site.running():
        site.arrives(old.sends(root(1)))
        late = old.sends(root(2))
        site.living = Life(71)
        site.arrives(site.living.sends(root(9)))
        await anyio.sleep(4)
        site.arrives(late)
        await anyio.sleep(4)
        assert (held(site, 1, 2, 9), site.feed.under_repair) == ([False, False, True], [])


async def test_a_new_life_that_reached_higher_ids_is_no_gap_of_the_old_one() -> None:
    """The answer to a question in the old life's numbers continues nothing that is known."""
    site = Site(old := Life(70))
    async with site.running():
        site.arrives(old.sends(root(1)), old.sends(root(2)))
        site.living = Life(71)
        sent = [site.living.sends(root(block)) for block in (11, 12, 13, 14)]
        site.arrives(sent[3])
        await anyio.sleep(4)
        assert site.is_true
        assert site.questions == [None, 3, None]


async def test_a_publisher_that_appears_during_a_query_needs_another_query() -> None:
    site = Site(old := Life(70))
    async with site.running():
        site.arrives(old.sends(root(1)), Life(60).sends(root(6)))
        await anyio.sleep(0.7)  # the old life has answered, and its answer is on the way
        site.living = Life(71)
        site.arrives(site.living.sends(root(9)))
        await anyio.sleep(LONG_S)
        assert (site.is_true, site.feed.under_repair) == (True, [])


async def test_a_former_publisher_that_does_not_stop_keeps_nothing_from_the_living_one() -> None:
    """The feed requests it again and again, ever less often."""
    site, zombie = Site(life := Life(71)), Life(70, first_id=500)
    async with site.running():
        for step in range(600):
            site.arrives(zombie.sends(root(10_000 + step)), life.sends(root(step + 1)))
            assert held(site, step + 1) == [True]
            await anyio.sleep(0.1)
        await anyio.sleep(LONG_S)
        assert (site.is_true, site.feed.under_repair) == (True, [])
    assert len(site.questions) < 60 / LIMITS.longest_delay_s + 10


# -- where the worker does not decide


@pytest.mark.parametrize("site", [Site(Life(71), names=False), Site(Life(71), keeps=False)], ids=["unnamed", "kept"])
async def test_the_next_event_of_the_living_publisher_heals_a_wrong_belief(site: Site) -> None:
    """No answer names the current life, so the straggler, received last, is believed until then, and not for ever."""
    site = Site(Life(71), names=site.names, keeps=site.keeps)
    async with site.running():
        site.arrives(site.living.sends(root(1)), Life(70, first_id=2000).sends(root(7)))
        await anyio.sleep(LONG_S)
        assert site.feed.under_repair == []
        site.arrives(site.living.sends(root(2)))
        await anyio.sleep(LONG_S)
        site.arrives(site.living.sends(root(3)))
        assert (held(site, 2, 3, 7), site.feed.under_repair) == ([True, True, False], [])


async def test_a_query_without_answer_ends_with_the_publisher_of_the_last_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    site = Site(old := Life(70))
    async with site.running():
        site.arrives(old.sends(root(1)))
        site.living = Life(71)
        site.troubles = [OSError("unreachable")] * 100
        site.arrives(site.living.sends(root(9)))
        await anyio.sleep(LONG_S)
        assert (held(site, 1, 9), site.feed.under_repair) == ([False, True], [])
        assert len(site.questions) == 1 + LIMITS.attempts
        assert "no useful answer in 4 attempts" in caplog.text


async def test_an_unanswered_question_about_a_straggler_costs_a_rank_in_order_nothing() -> None:
    site = Site(life := Life(71))
    async with site.running():
        site.arrives(life.sends(root(1)))
        site.troubles = [DumpFailed("busy")] * 100
        site.arrives(Life(70, first_id=2000).sends(root(7)), life.sends(root(2)))
        await anyio.sleep(LONG_S)
        assert (held(site, 1, 2, 7), site.feed.under_repair) == ([True, True, False], [])


async def test_a_wrong_belief_after_unanswered_questions_is_healed_by_the_next_event() -> None:
    site = Site(life := Life(71))
    async with site.running():
        site.arrives(life.sends(root(1)))
        site.troubles = [OSError("unreachable")] * 4
        site.arrives(Life(70, first_id=2000).sends(root(7)))
        await anyio.sleep(LONG_S)
        assert (held(site, 1, 7), site.feed.under_repair) == ([False, True], [])
        site.arrives(life.sends(root(2)))
        await anyio.sleep(LONG_S)
        assert (site.is_true, site.feed.under_repair) == (True, [])


async def test_an_older_dump_than_what_was_applied_meanwhile_takes_nothing_back() -> None:
    """Only a worker that keeps few events answers with one; here all of them arrive, late, while it is on its way."""
    site = Site(life := Life(71))
    async with site.running():
        site.arrives(life.sends(root(1)))
        late = [life.sends(root(block)) for block in range(2, 20)]
        site.arrives(Life(70).sends(root(7)))
        await anyio.sleep(0.7)
        site.arrives(*late, life.sends(root(20)))
        await anyio.sleep(LONG_S)
        assert (site.is_true, site.feed.under_repair) == (True, [])


def changes(random: Random) -> Callable[[], KvEventData]:
    names: list[int] = []

    def one() -> KvEventData:
        if random.random() < 0.3 and names:
            return KvRemoved([names.pop(random.randrange(len(names)))])
        names.append(random.getrandbits(64))
        return KvStored(random.choice([None, *names[-4:-1]]), [StoredBlock(names[-1], random.randint(1, 3))])

    return one


def deliver_some(site: Site, channel: list[Sent], random: Random) -> None:
    while channel and random.random() < 0.7:
        site.arrives(channel.pop(random.randrange(len(channel))))


@given(st.integers(0, 2**32))
async def test_whatever_arrives_of_whichever_life_the_index_ends_as_the_living_one_is(seed: int) -> None:
    """Restarts, loss, duplicates, any order, failing answers, stragglers at the end. Each life's last event arrives."""
    random = Random(seed)
    site = Site(Life(70, random.choice([1, 1, 40])))
    site.takes_s = random.choice([0.2, 1.0, 3.0])
    source, channel = changes(random), list[Sent]()
    kinds: list[Exception | DumpFailed] = [OSError("unreachable"), DumpFailed("busy")]
    troubles = random.choices(kinds, k=LIMITS.attempts - 1)
    async with site.running():
        for step in range(60):
            if random.random() < 0.08:
                channel.append(site.living.sends(source()))
                site.living, source = Life(71 + step, random.choice([1, 1, 1, 30])), changes(random)
            if random.random() < 0.1 and troubles:
                site.troubles.append(troubles.pop())
            channel += [site.living.sends(source())] * random.choice([0, 1, 1, 1, 1, 2])
            deliver_some(site, channel, random)
            if random.random() < 0.3:
                await anyio.sleep(random.choice([0.1, 1.0, 5.0]))
        channel.append(site.living.sends(source()))
        while channel:
            deliver_some(site, channel, random)
            await anyio.sleep(random.choice([0.0, 0.1, 5.0]))
        await anyio.sleep(LONG_S)
        assert site.is_true
        assert site.feed.under_repair == []


@given(st.integers(0, 2**32))
async def test_without_names_nothing_false_is_left_after_two_events_of_the_living_publisher(seed: int) -> None:
    """Whatever was believed before. Something may be missing: a rank that began anew knows what came since."""
    random = Random(seed)
    site = Site(Life(70), names=False)
    source, channel = changes(random), list[Sent]()
    async with site.running():
        for step in range(40):
            if random.random() < 0.1:
                site.living, source = Life(71 + step, random.choice([1, 1, 30])), changes(random)
            channel += [site.living.sends(source())] * random.choice([0, 1, 1, 2])
            deliver_some(site, channel, random)
            await anyio.sleep(random.choice([0, 0, 0.1, 1.0, 5.0]))
        site.arrives(*channel)
        await anyio.sleep(LONG_S)
        for block in (1, 2):
            site.arrives(site.living.sends(root(block)))
            await anyio.sleep(LONG_S)
        assert (held(site, 2), site.feed.under_repair) == ([True], [])
        assert names_in(site.feed.index) <= names_in(site.living.log.index)


async def test_dropped_events_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    site = Site(Life(71))
    with caplog.at_level(logging.INFO):
        async with site.running():
            site.arrives(Life(70).sends(root(7)))
            await anyio.sleep(4)
    assert "1 events of" in caplog.text
