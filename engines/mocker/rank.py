"""Rank: one data-parallel rank of the mock engine, its step loop and the requests that read from it.

    submit ──► Scheduler ──run_step──► wait for its duration ──► channels of the requests
                   └── events of the block pool ──► publisher, feed

A rank costs by the step: one timer, one look at the clock, and one wake for each request that got tokens.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import TypeAlias

import anyio

from pipeline import EngineShutdown, InvalidArgument, PenstockError
from pipeline.errors import BackendUnknown
from pipeline.loop import Timer, clock

from ..publishing import KvEventPublisher
from ..ready_tokens import ReadyTokens
from .args import MockEngineArgs
from .build import make_scheduler
from .horizon import LEAST_STEPS, Horizon, Stretch
from .latencies import Latencies
from .loop_share import LoopShare
from .reports import RankReports
from .scheduling import Sequence, SequenceState, StepResult
from .timing import TimingModel
from .zmq_events import EventFeed

Channel: TypeAlias = ReadyTokens[Sequence, int]
"""Tokens of a request's sequences; the end of one is True."""

_log = logging.getLogger(__name__)

REJECTED = "request rejected: request exceeds worker admission limits"

MIN_SLEEP_S = 0.001
"""Less is not slept in real time but carried over: later steps are that much longer."""

LATE_MAX_S = 0.005
"""By so much at most a step may begin late in real time without ending late. Timers wake up to a millisecond late, and
tokens are delivered: that takes the time of the process, not of the engine that is simulated."""


class Rank:
    """Runs steps while there is work. In virtual time a step includes every request of the moment it begins.

    `feed`, `latencies` and `horizon` are optional and set from outside; with a horizon it runs ahead in virtual time on
    asyncio. Once its loop has ended, waiting and later requests get EngineShutdown.
    """

    def __init__(
        self, dp_rank: int, args: MockEngineArgs, timing: TimingModel | None = None, *, seed_offset: int = 0
    ) -> None:
        self.dp_rank = dp_rank
        self.scheduler = make_scheduler(args, timing=timing, seed_offset=seed_offset)
        self.reports = RankReports(dp_rank, self.scheduler)
        self.feed: EventFeed | None = None
        self.latencies: Latencies | None = None
        self.horizon: Horizon | None = None
        self._stretch: Stretch | None = None
        self._held: dict[Sequence, tuple[int, array[float]]] = {}
        """Output that is due and not delivered yet: the output index of the first token, and the time of each."""
        self._timer: Timer | None = None
        self._clock: Callable[[], float] = anyio.current_time
        self._is_exact = False
        self._live: dict[Sequence, Channel] = {}
        self._work = anyio.Event()
        self._room: anyio.Event | None = None
        self._reserving: deque[object] = deque()
        self._has_ended = False

    @property
    def live(self) -> int:
        """Sequences with a reader."""
        return len(self._live)

    def follows(self, sequence: Sequence) -> bool:
        """Return whether the sequence has more output for its reader."""
        return sequence in self._live

    def publish_to(self, publisher: KvEventPublisher) -> None:
        """Publish the changes of the cache from now on."""
        self.scheduler.pool.on_event = publisher.publish

    def submit(
        self, sequence: Sequence, channel: Channel, *, holds_blocks: bool = False, pays_prompt: bool = False
    ) -> None:
        self.catch_up()
        self.scheduler.submit(sequence, holds_blocks=holds_blocks, pays_prompt=pays_prompt)
        self._follow(sequence, channel)

    async def reserve(self, sequence: Sequence) -> None:
        """Take blocks for a prompt that is computed elsewhere; wait for room, behind earlier reservations.

        Raises EngineShutdown once the loop has ended.
        """
        ticket = object()
        self._reserving.append(ticket)
        try:
            while True:
                if self._has_ended:
                    raise _ended()
                if self._reserving[0] is ticket:
                    self.catch_up()
                    if self.scheduler.reserve(sequence):
                        return
                if self._room is None:
                    self._room = anyio.Event()
                await self._room.wait()  # until blocks may be free, the one before has its own, or the loop has ended
        finally:
            self._reserving.remove(ticket)
            self._wake_reservations()

    def activate(self, sequence: Sequence, channel: Channel) -> None:
        """Let a reserved sequence run: its prompt has arrived."""
        self.catch_up()
        self.scheduler.activate(sequence)
        self._follow(sequence, channel)

    def _follow(self, sequence: Sequence, channel: Channel) -> None:
        if self._has_ended:
            channel.fail(_ended())
            return
        self._live[sequence] = channel
        self._work.set()

    def release(self, sequence: Sequence) -> None:
        """Release the blocks of a finished sequence that holds them."""
        self.catch_up()
        self.scheduler.release(sequence)
        self._make_room()

    def cancel(self, sequence: Sequence) -> None:
        """Drop the sequence and release its blocks. Idempotent."""
        if sequence.stage is not SequenceState.ENDED:
            self.catch_up()
        self._live.pop(sequence, None)
        self._held.pop(sequence, None)
        if sequence.stage is not SequenceState.ENDED:
            self.scheduler.cancel(sequence)
            self._make_room()

    def _make_room(self) -> None:
        """Wake the next step and the reservations, which wait for blocks."""
        self._work.set()
        self._wake_reservations()

    def _wake_reservations(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None

    def fail_all(self, error: Callable[[], PenstockError]) -> None:
        """End every waiting request with an error of its own."""
        self.flush()
        for channel in list(self._live.values()):
            channel.fail(error())

    async def run(self) -> None:
        """Run the step loop until it is cancelled; requests that wait then get EngineShutdown."""
        since_s, now, timer = None, clock(), Timer()
        due_s = now()
        self._is_exact = is_exact = timer.is_exact
        self._timer, self._clock = timer, now
        if self.horizon is not None and is_exact:
            self.horizon.join(self)
        least_s, late_s = (0.0, 0.0) if is_exact else (MIN_SLEEP_S, LATE_MAX_S)
        share = LoopShare()
        try:
            while True:
                if since_s is None and self.scheduler.is_idle:
                    await self._wait_for_work()
                    due_s = max(due_s, now())
                    share.restart()
                if is_exact:
                    began_s, since_s = now() if since_s is None else since_s, None
                    await timer.settle(began_s)  # a request of this very moment is in time for the step
                    if self.horizon is not None and (stretch := self._run_ahead(max(due_s, began_s))) is not None:
                        await self._until_end(stretch, timer, now)
                        due_s, since_s = stretch.end_s, stretch.settles_since_s
                        continue
                    done = self._step()
                else:
                    done = self._step()
                    began_s = now()
                if not done.scheduled_tokens and done.did_nothing:  # nearly every step computes tokens
                    await self._wait_for_work()
                    due_s = max(due_s, now())
                    share.restart()
                    continue
                due_s = max(due_s, began_s - late_s) + done.duration_ms / 1000
                if self._held and not self._may_hold(began_s, due_s):
                    self.flush()
                if due_s - began_s >= least_s:
                    await timer.wait_until(due_s)
                    share.restart()
                    self._deliver(done, now(), offers=True)
                else:
                    await self._take_no_time(done, share)
        finally:
            self.catch_up()
            self.flush()
            if self.horizon is not None:
                self.horizon.leave(self)
            self._has_ended = True
            self.fail_all(_ended)
            self._wake_reservations()

    async def _take_no_time(self, done: StepResult, share: LoopShare) -> None:
        """Let others have their turns once it is time; in real time the output of the step comes before that."""
        if not self._is_exact:
            self._deliver(done, self._clock())
        await share.step_done()
        if self._is_exact:
            self._deliver(done, self._clock())

    def _run_ahead(self, begin_s: float) -> Stretch | None:
        """Begin a stretch of steps if the next ones allow it."""
        assert self.horizon is not None
        assert self._timer is not None
        steps = self.scheduler.uniform_steps()
        times_ms = self.scheduler.uniform_times_ms(steps) if steps >= LEAST_STEPS else None
        if times_ms is None:
            return None
        stretch = Stretch(self.scheduler.running, begin_s, times_ms, self.horizon.end_s(begin_s))
        if len(stretch) < LEAST_STEPS or not stretch.is_spread:
            return None
        self._stretch = stretch
        self._timer.stop_silently(stretch.times_s)
        if (border_s := self._cross_borders(stretch, 1)) is not None:
            self._timer.call_silently(border_s, partial(self._at_border, stretch))
        return stretch

    def _at_border(self, stretch: Stretch) -> float | None:
        """Begin a step in which blocks are taken or filled; return when the next one begins."""
        if self._stretch is not stretch:  # it was cut
            return None
        return self._cross_borders(stretch, stretch.due(self._clock()) + 1)

    def _cross_borders(self, stretch: Stretch, begun: int) -> float | None:
        """Do the steps that have begun, as far as others may see; return when they see the next one, if they do."""
        if not self._is_watched:
            return None
        self.reports.advance(stretch, begun)
        if self.feed is not None:
            self.feed.flush()
        self.reports.show()
        return stretch.begin_of(stretch.done + self.scheduler.steps_to_border())

    @property
    def _is_watched(self) -> bool:
        """Whether others learn of blocks that are taken and filled."""
        pool = self.scheduler.pool
        is_published = pool.on_event is not None or pool.on_event_with_tokens is not None
        return is_published or self.reports.snapshots is not None

    async def _until_end(self, stretch: Stretch, timer: Timer, now: Callable[[], float]) -> None:
        """Wait until the stretch, or what a cut has left of it, ends, and deliver its output."""
        while now() < stretch.end_s:
            await timer.wait_until(stretch.end_s)  # a cut wakes it
        if self._stretch is stretch:
            self._stretch = None
            timer.stop_silently(())
            self.reports.advance(stretch, len(stretch))
            self._hold_steps(stretch, len(stretch), len(stretch))
        elif stretch.is_in_step:
            self._deliver(StepResult(emitted=list(stretch.sequences)), now())

    def catch_up(self) -> None:
        """Come to the state of this moment, if the rank has run ahead: the stretch ends with the step that runs now."""
        stretch, self._stretch = self._stretch, None
        if stretch is None or self._timer is None:
            return
        self._timer.stop_silently(())
        due = stretch.due(self._clock())
        # A call in the moment in which a step ends may come before the next one begins.
        has_begun = stretch.done > due or not due or self._timer.has_settled(stretch.times_s[due - 1])
        begun = stretch.cut(due, has_begun)
        self.reports.advance(stretch, begun)
        if due:
            self._hold_steps(stretch, begun, due)
        self._timer.wake()

    def _may_hold(self, now_s: float, due_s: float) -> bool:
        """Return whether output may be kept back that is due before the step that ends at `due_s` has ended."""
        return self.horizon is not None and self._is_exact and due_s < self.horizon.end_s(now_s)

    def _hold(self, sequence: Sequence, first: int, times_s: Items[float]) -> None:
        """Keep output back: it is delivered with the last token, or at a `flush`."""
        held = self._held.get(sequence)
        if held is None:
            held = self._held[sequence] = first, array("d")
        held[1].extend(times_s)

    def flush(self, sequences: Items[Sequence] | None = None) -> None:
        """Deliver the output of these sequences that was kept back, by default of all."""
        for sequence in list(self._held) if sequences is None else sequences:
            held, channel = self._held.pop(sequence, None), self._live.get(sequence)
            if held is not None and channel is not None:
                first, times_s = held
                channel.put(sequence, sequence.output_tokens(first, first + len(times_s)), None, times_s)

    def _hold_steps(self, stretch: Stretch, begun: int, due: int) -> None:
        """Keep back the output of the first `due` of the `begun` steps of a stretch."""
        times_s = stretch.times_s[:due]
        if self.latencies is not None:
            self.latencies.observe_steps(stretch.sequences, times_s)
        for sequence in stretch.sequences:
            self._hold(sequence, sequence.emitted - begun, times_s)

    async def _wait_for_work(self) -> None:
        self.flush()
        self.reports.show()
        await self._work.wait()
        self._work = anyio.Event()

    def _step(self) -> StepResult:
        try:
            done = self.scheduler.run_step()
        except Exception as raised:  # a model of time of the user's
            error = raised
            _log.exception("a step of rank %d failed", self.dp_rank)
            self.fail_all(
                lambda: error if isinstance(error, PenstockError) else BackendUnknown(str(error), cause=error)
            )
            return StepResult()
        finally:
            if self.feed is not None:
                self.feed.flush()
        if done.finished or done.completed_empty:
            self._wake_reservations()
        self.reports.step(done, self._clock())
        return done

    def _deliver(self, done: StepResult, now_s: float, *, offers: bool = False) -> None:
        """Deliver the output of a step to its requests, but not to those cancelled meanwhile; `offers` as in `put`."""
        live = self._live
        if self.latencies is not None:
            self.latencies.observe_step(done, live, now_s)
        holds = self._may_hold(now_s, now_s)
        emitted = done.emitted
        if done.admitted and not self._is_exact:  # first tokens first: readers have their turns in this order
            emitted = sorted(emitted, key=lambda sequence: sequence.emitted > sequence.new_tokens)
        for sequence in emitted:
            channel = live.get(sequence)
            if channel is not None:
                is_finished = sequence.length == sequence.end
                if is_finished:
                    del live[sequence]
                if holds and sequence.emitted > sequence.new_tokens:
                    self._hold(sequence, sequence.emitted - sequence.new_tokens, (now_s,) * sequence.new_tokens)
                    if is_finished:
                        first, times_s = self._held.pop(sequence)
                        channel.put(sequence, sequence.output_tokens(first), True, times_s)
                else:
                    channel.put(sequence, sequence.new_token_ids(), is_finished or None, offers=offers)
        self._deliver_ends(done)

    def _deliver_ends(self, done: StepResult) -> None:
        """End the requests that a step has ended without a token."""
        live = self._live
        for sequence in done.completed_empty:
            if (channel := live.pop(sequence, None)) is not None:
                channel.put(sequence, [], True)
        for sequence in done.rejected:
            self.flush((sequence,))
            if (channel := live.pop(sequence, None)) is not None:
                channel.fail(InvalidArgument(REJECTED))


def _ended() -> EngineShutdown:
    """Return a new error for each request: an error keeps the frames it has passed."""
    return EngineShutdown("the mock engine's loop has ended")
