"""Rank: one data-parallel rank of the mock engine, its pass loop and whom the passes are for.

    submit ──► Scheduler ──run_pass──► wait for its duration ──► channels of the requests
                   └── events of the block pool ──► publisher, feed

Everything of a rank costs by the pass: one timer, one look at the clock, and one wake for each request that got tokens.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import anyio
from anyio.lowlevel import checkpoint

from pipeline import EngineShutdown, PenstockError
from pipeline.errors import BackendUnknown
from pipeline.loop import Alarm, loop_clock

from ..engine_metrics import ComponentSnapshot, SnapshotPublisher
from ..kv_sources import KvEventPublisher
from .args import MockEngineArgs
from .assembly import make_scheduler
from .channel import Channel
from .event_feed import EventFeed
from .latencies import Latencies
from .plan import Pass
from .sequence import Sequence, Stage
from .timing import TimingModel

_log = logging.getLogger(__name__)

MIN_SLEEP_S = 0.001
"""Less is not slept in real time, it is owed: the passes after it are that much longer."""

_HIT_RATE_ADMISSIONS = 1000
"""The hit rate is the mean of the last so many."""


class Rank:
    """Runs passes while there is work. In virtual time a pass takes in all that comes at the moment it begins.

    `snapshots`, `feed` and `latencies` are set by whoever wants them, or never. Once its loop has ended, what waits and
    whatever is submitted later gets EngineShutdown.
    """

    def __init__(
        self, dp_rank: int, args: MockEngineArgs, timing: TimingModel | None = None, *, seed_offset: int = 0
    ) -> None:
        self.dp_rank = dp_rank
        self.scheduler = make_scheduler(args, timing=timing, seed_offset=seed_offset)
        self.snapshots: SnapshotPublisher | None = None
        self.feed: EventFeed | None = None
        self.latencies: Latencies | None = None
        self._live: dict[Sequence, Channel] = {}
        self._work = anyio.Event()
        self._room: anyio.Event | None = None
        self._reserving: deque[object] = deque()
        self._has_ended = False
        self._hit_rates: deque[float] = deque(maxlen=_HIT_RATE_ADMISSIONS)
        self._shown_blocks = -1

    @property
    def live(self) -> int:
        """Sequences that somebody waits for."""
        return len(self._live)

    @property
    def hit_rate(self) -> float | None:
        """Which part of a prompt its first admission found in the cache, on average of the last; None before any."""
        return sum(self._hit_rates) / len(self._hit_rates) if self._hit_rates else None

    def follows(self, sequence: Sequence) -> bool:
        """Whether somebody still waits for something of the sequence."""
        return sequence in self._live

    def publish_to(self, publisher: KvEventPublisher) -> None:
        """Hands the changes of the cache to the routers from now on."""
        self.scheduler.pool.on_event = publisher.publish

    def submit(
        self, sequence: Sequence, channel: Channel, *, holds_blocks: bool = False, pays_prompt: bool = False
    ) -> None:
        self.scheduler.submit(sequence, holds_blocks=holds_blocks, pays_prompt=pays_prompt)
        self._follow(sequence, channel)

    async def reserve(self, sequence: Sequence) -> None:
        """Takes blocks for a prompt that is computed elsewhere; waits for room, behind those who wait already.

        Raises EngineShutdown once the loop has ended.
        """
        ticket = object()
        self._reserving.append(ticket)
        try:
            while True:
                if self._has_ended:
                    raise _ended()
                if self._reserving[0] is ticket and self.scheduler.reserve(sequence):
                    return
                await self._room_is_made()
        finally:
            self._reserving.remove(ticket)
            self._wake_reservations()

    def activate(self, sequence: Sequence, channel: Channel) -> None:
        """The prompt of a reserved sequence is here."""
        self.scheduler.activate(sequence)
        self._follow(sequence, channel)

    def _follow(self, sequence: Sequence, channel: Channel) -> None:
        if self._has_ended:
            channel.fail(_ended())
            return
        self._live[sequence] = channel
        self._work.set()

    def release(self, sequence: Sequence) -> None:
        """Lets go the blocks of a finished sequence that was to hold them."""
        self.scheduler.release(sequence)
        self._make_room()

    def cancel(self, sequence: Sequence) -> None:
        """Nobody waits for the sequence any more; it gives back what it has. Idempotent."""
        self._live.pop(sequence, None)
        if sequence.stage is not Stage.ENDED:
            self.scheduler.cancel(sequence)
            self._make_room()

    async def _room_is_made(self) -> None:
        """Returns when blocks may have come free, the one before has its own, or the loop has ended."""
        if self._room is None:
            self._room = anyio.Event()
        await self._room.wait()

    def _make_room(self) -> None:
        """Wakes what waits for blocks: the next pass, and reservations."""
        self._work.set()
        self._wake_reservations()

    def _wake_reservations(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None

    def fail_all(self, error: Callable[[], PenstockError]) -> None:
        """Ends every request that waits with an error of its own."""
        for channel in list(self._live.values()):
            channel.fail(error())

    async def run(self) -> None:
        """The pass loop, until it is cancelled; whoever waits then is told that the engine is gone."""
        try:
            await self._run()
        finally:
            self._has_ended = True
            self.fail_all(_ended)
            self._wake_reservations()

    async def _run(self) -> None:
        due_s, clock, alarm = 0.0, loop_clock(), Alarm()
        least_s = 0.0 if alarm.is_exact else MIN_SLEEP_S
        while True:
            if self.scheduler.is_idle:
                await self._wait_for_work()
            if alarm.is_exact:
                await alarm.settle()  # who comes at this very moment is in time for the pass
            done = self._pass()
            if done.did_nothing:
                await self._wait_for_work()
                continue
            now_s = clock()
            due_s = max(due_s, now_s) + done.duration_ms / 1000
            if due_s - now_s >= least_s:
                await alarm.wait(due_s)
            else:
                await checkpoint()
            self._deliver(done, clock())

    async def _wait_for_work(self) -> None:
        self._show()
        await self._work.wait()
        self._work = anyio.Event()

    def _pass(self) -> Pass:
        try:
            done = self.scheduler.run_pass()
        except Exception as raised:  # a model of time that somebody else wrote
            error = raised
            _log.exception("a pass of rank %d failed", self.dp_rank)
            self.fail_all(
                lambda: error if isinstance(error, PenstockError) else BackendUnknown(str(error), cause=error)
            )
            return Pass()
        finally:
            if self.feed is not None:
                self.feed.flush()
        for sequence in done.admitted:
            self._hit_rates.append((sequence.cached_tokens or 0) / sequence.prompt_tokens)
        if done.finished or done.completed_empty:
            self._wake_reservations()
        self._show()
        return done

    def _deliver(self, done: Pass, now_s: float) -> None:
        """Tells each request what the pass gave it; who was cancelled meanwhile hears nothing."""
        live = self._live
        if self.latencies is not None:
            self.latencies.saw(done, live, now_s)
        for sequence in done.emitted:
            channel = live.get(sequence)
            if channel is not None:
                is_finished = sequence.length == sequence.end
                if is_finished:
                    del live[sequence]
                channel.tell(sequence, sequence.new_token_ids(), is_finished)
        for sequence in done.completed_empty:
            if (channel := live.pop(sequence, None)) is not None:
                channel.tell(sequence, [], True)
        for sequence in done.rejected:
            if (channel := live.pop(sequence, None)) is not None:
                channel.reject()

    def _show(self) -> None:
        pool = self.scheduler.pool
        if self.snapshots is None or pool.active == self._shown_blocks:
            return
        self._shown_blocks = pool.active
        usage = pool.active / pool.capacity
        snapshot = ComponentSnapshot(pool.active, pool.capacity, usage, self.hit_rate, self.dp_rank)
        self.snapshots.publish(self.dp_rank, snapshot)


def _ended() -> EngineShutdown:
    """Made anew for each request: an error keeps the frames it has passed."""
    return EngineShutdown("the mock engine's loop has ended")
