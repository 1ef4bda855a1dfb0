"""Whatever goes wrong on the way: each loss is reported, before the next event or without one."""

from __future__ import annotations

import gc
from typing import Any, Literal, TypeAlias

import anyio
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.network import Event, Missed, Scope
from pipeline.network.direct_events import DirectEventLimits
from pipeline.network.events import Publisher
from tests.pipeline.network.direct_events.worlds import Deployment, Process, processes

HERE, TOPIC = Scope("ns", "comp"), "t"

Action: TypeAlias = Literal["publish", "make", "drop", "cut", "heal", "hold", "go", "away", "back", "wait"]


@define(eq=False)
class Reader:
    """What one process received of each publisher: the next number it expects, and whether it needs a snapshot."""

    expected: dict[int, int] = field(factory=dict)
    in_doubt: set[int | None] = field(factory=set)
    received: int = 0

    def follow(self, process: Process) -> None:
        """Subscribe, as a consumer that repairs does."""
        process.events.missed(HERE, TOPIC).subscribe(self._on_missed)
        process.events.subscribe(HERE, TOPIC, int).subscribe(self._on_event)

    def _on_missed(self, missed: Missed) -> None:
        self.in_doubt.add(missed.publisher_id)

    def _on_event(self, event: Event[int]) -> None:
        self.received += 1
        assert event.payload == event.sequence
        expected = self.expected.get(event.publisher_id, 0)
        assert event.sequence >= expected, "none twice, and in order"
        assert event.sequence == expected or event.publisher_id in self.in_doubt, "a gap is reported before"
        self.expected[event.publisher_id] = event.sequence + 1

    def knows(self, publisher_id: int, published: int) -> bool:
        """Whether it received the last event, or knows that it did not."""
        return self.expected.get(publisher_id, 0) == published or publisher_id in self.in_doubt


@define(eq=False)
class Script:
    """Three processes, each with publishers and a reader, and what is done to them."""

    made: Deployment
    all: list[Process]
    readers: list[Reader] = field(factory=list)
    publishers: list[list[Publisher]] = field(factory=list)
    published: dict[int, int] = field(factory=dict)
    """How many events each publisher has published."""

    def begin(self) -> None:
        for process in self.all:
            self.readers.append(Reader())
            self.publishers.append([])
            self.readers[-1].follow(process)

    async def step(self, action: Action, who: int, which: int) -> None:
        mine, faults = self.publishers[who], self.made.faults
        if action == "make":
            publisher = self.all[who].events.publisher(HERE, TOPIC)
            self.published[publisher.publisher_id] = 0
            mine.append(publisher)
        elif action == "publish" and mine:
            publisher = mine[which % len(mine)]
            for _ in range(1 + which):
                publisher.publish(self.published[publisher.publisher_id])
                self.published[publisher.publisher_id] += 1
        elif action == "drop" and mine:
            del self.published[mine.pop(which % len(mine)).publisher_id]
            gc.collect(0)
        elif action == "cut":
            faults.cut.add(who)
            faults.break_streams()
        elif action == "hold":
            faults.held = faults.held or anyio.Event()
        elif action == "wait":
            await anyio.sleep(which / 5)
        else:
            self._mend(action)

    def _mend(self, action: Action) -> None:
        faults = self.made.faults
        if action == "heal":
            faults.cut.clear()
        elif action == "go" and faults.held is not None:
            faults.held.set()
            faults.held = None
        elif action in ("away", "back"):
            faults.is_store_away = action == "away"

    async def end(self) -> None:
        """Mend all, and wait until what was broken is connected again."""
        for action in ("heal", "go", "back"):
            self._mend(action)
        await anyio.sleep(20)


STEPS = st.lists(
    st.tuples(
        st.sampled_from([*["publish"] * 6, *["hold"] * 2, "make", "drop", "cut", "heal", "go", "away", "back", "wait"]),
        st.integers(0, 2),
        st.integers(0, 7),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=settings().max_examples // 2)
async def test_readers_know_the_last_event_of_each_publisher_or_that_they_missed_it(steps: list[Any]) -> None:
    limits = DirectEventLimits(events=4, batch_events=2)
    async with processes(3, limits=limits) as (made, all_of_them):
        script = Script(made, all_of_them)
        script.begin()
        for step in [("make", 0, 0), ("make", 0, 0), ("make", 1, 0), ("make", 1, 0), ("wait", 0, 3), *steps]:
            await script.step(*step)
        await script.end()
        for publisher_id, published in script.published.items():
            assert [reader.knows(publisher_id, published) for reader in script.readers] == [True] * 3
        received = [reader.received for reader in script.readers]
        for publisher in script.publishers[0]:
            publisher.publish(script.published[publisher.publisher_id])
            await anyio.sleep(1)
        assert [reader.received for reader in script.readers] == [n + len(script.publishers[0]) for n in received]
        assert all(process.events.outgoing.readers <= 2 for process in all_of_them)
