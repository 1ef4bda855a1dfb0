"""Rank: one data-parallel rank of the mock engine, its step loop and the requests that read from it.

    submit ──► Scheduler ──run_step──► wait for its duration ──► channels of the requests
                   └── events of the block pool ──► publisher, feed

A rank costs by the step: one timer, one look at the clock, and one wake for each request that got tokens.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Items

import anyio
from anyio.lowlevel import checkpoint

from pipeline import EngineShutdown, InvalidArgument, PenstockError
from pipeline.errors import BackendUnknown
from pipeline.loop import Timer, Wakeup, clock

from ..publishing import ComponentSnapshot, KvEventPublisher, SnapshotPublisher
from .args import MockEngineArgs
from .build import make_scheduler
from .scheduling import Sequence, SequenceState, StepResult
from .timing import TimingModel
from .zmq_events import EventFeed


class Channel:
    """Tokens and endings of a request's sequences, in the order they were made, until one task reads them.

    It never fills: a request's tokens are counted beforehand.
    """

    __slots__ = ("error", "news", "outputs")

    def __init__(self) -> None:
        self.outputs: deque[tuple[Sequence, list[int], bool]] = deque()
        """For each step with output: the sequence, its new tokens, and whether it is finished."""
        self.error: PenstockError | None = None
        """What ended the request, other than its last token."""
        self.news = Wakeup()
        """Set when there is something to read; also when the request is stopped."""

    def deliver(self, sequence: Sequence, token_ids: list[int], is_finished: bool) -> None:
        self.outputs.append((sequence, token_ids, is_finished))
        self.news.wake()

    def fail(self, error: PenstockError) -> None:
        """The request can never be served, or the engine failed with it."""
        self.error = error
        self.news.wake()


class Histogram:
    """Counts of values by bounds; a bound is counted with the values below it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Items[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Latencies:
    """Three histograms in seconds, as engines have them: to the first token, token to token, and of whole requests.

    A request that ends early counts with the tokens it has read, and not as a whole; one for no tokens is not measured.
    The tokens of a burst share the time since the token before it. Source: dynamo lib/llm/src/mocker/metrics.rs,
    NativeRequestTiming. Other than there, the times are those of the steps, not of the reader, and each choice counts.
    """

    def __init__(self, first_bounds: Items[float], gap_bounds: Items[float], whole_bounds: Items[float]) -> None:
        self.first_token = Histogram(first_bounds)
        self.token_gap = Histogram(gap_bounds)
        self.whole = Histogram(whole_bounds)
        self.finished = 0
        """Requests that finished."""

    def begin(self, sequences: Iterable[Sequence], now_s: float) -> None:
        """Measure these requests from now on."""
        for sequence in sequences:
            sequence.begun_s = now_s

    def observe_step(self, done: StepResult, live: Container[Sequence], now_s: float) -> None:
        """Measure the output of a step, delivered now, to sequences with a reader."""
        gaps: dict[float, int] = {}
        for sequence in done.emitted:
            if sequence not in live:
                continue
            last_s, sequence.last_token_s = sequence.last_token_s, now_s
            if last_s is None:
                if sequence.begun_s is not None:
                    self.first_token.observe(now_s - sequence.begun_s)
            elif sequence.new_tokens == 1:  # nearly all of them, since the same step
                gaps[last_s] = gaps.get(last_s, 0) + 1
            else:
                self.token_gap.observe((now_s - last_s) / sequence.new_tokens, sequence.new_tokens)
        for last_s, count in gaps.items():
            self.token_gap.observe(now_s - last_s, count)
        for sequence in done.finished:
            if sequence in live and sequence.begun_s is not None:
                self.finished += 1
                self.whole.observe(now_s - sequence.begun_s)


_log = logging.getLogger(__name__)

REJECTED = "request rejected: request exceeds worker admission limits"

MIN_SLEEP_S = 0.001
"""Less is not slept in real time but carried over: later steps are that much longer."""

_HIT_RATE_ADMISSIONS = 1000
"""The hit rate is the mean over that many last admissions."""


class Rank:
    """Runs steps while there is work. In virtual time a step includes every request of the moment it begins.

    `snapshots`, `feed` and `latencies` are optional and set from outside. Once its loop has ended, waiting and later
    requests get EngineShutdown.
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
        """Sequences with a reader."""
        return len(self._live)

    @property
    def hit_rate(self) -> float | None:
        """Mean share of the prompt found in the cache over the last admissions; None before any."""
        return sum(self._hit_rates) / len(self._hit_rates) if self._hit_rates else None

    def follows(self, sequence: Sequence) -> bool:
        """Return whether the sequence has more output for its reader."""
        return sequence in self._live

    def publish_to(self, publisher: KvEventPublisher) -> None:
        """Publish the changes of the cache from now on."""
        self.scheduler.pool.on_event = publisher.publish

    def submit(
        self, sequence: Sequence, channel: Channel, *, holds_blocks: bool = False, pays_prompt: bool = False
    ) -> None:
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
                if self._reserving[0] is ticket and self.scheduler.reserve(sequence):
                    return
                if self._room is None:
                    self._room = anyio.Event()
                await self._room.wait()  # until blocks may be free, the one before has its own, or the loop has ended
        finally:
            self._reserving.remove(ticket)
            self._wake_reservations()

    def activate(self, sequence: Sequence, channel: Channel) -> None:
        """Let a reserved sequence run: its prompt has arrived."""
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
        self.scheduler.release(sequence)
        self._make_room()

    def cancel(self, sequence: Sequence) -> None:
        """Drop the sequence and release its blocks. Idempotent."""
        self._live.pop(sequence, None)
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
        for channel in list(self._live.values()):
            channel.fail(error())

    async def run(self) -> None:
        """Run the step loop until it is cancelled; requests that wait then get EngineShutdown."""
        due_s, now, timer = 0.0, clock(), Timer()
        is_exact = timer.is_exact
        least_s = 0.0 if is_exact else MIN_SLEEP_S
        try:
            while True:
                if self.scheduler.is_idle:
                    await self._wait_for_work()
                if is_exact:
                    await timer.settle()  # a request of this very moment is in time for the step
                done = self._step()
                if not done.scheduled_tokens and done.did_nothing:  # nearly every step computes tokens
                    await self._wait_for_work()
                    continue
                now_s = now()
                due_s = max(due_s, now_s) + done.duration_ms / 1000
                if due_s - now_s >= least_s:
                    await timer.wait_until(due_s)
                else:
                    await checkpoint()
                self._deliver(done, now())
        finally:
            self._has_ended = True
            self.fail_all(_ended)
            self._wake_reservations()

    async def _wait_for_work(self) -> None:
        self._show()
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
        for sequence in done.admitted:
            self._hit_rates.append((sequence.cached_tokens or 0) / sequence.prompt_tokens)
        if done.finished or done.completed_empty:
            self._wake_reservations()
        self._show()
        return done

    def _deliver(self, done: StepResult, now_s: float) -> None:
        """Deliver the output of a step to its requests; those cancelled meanwhile get none."""
        live = self._live
        if self.latencies is not None:
            self.latencies.observe_step(done, live, now_s)
        for sequence in done.emitted:
            channel = live.get(sequence)
            if channel is not None:
                is_finished = sequence.length == sequence.end
                if is_finished:
                    del live[sequence]
                channel.deliver(sequence, sequence.new_token_ids(), is_finished)
        for sequence in done.completed_empty:
            if (channel := live.pop(sequence, None)) is not None:
                channel.deliver(sequence, [], True)
        for sequence in done.rejected:
            if (channel := live.pop(sequence, None)) is not None:
                channel.fail(InvalidArgument(REJECTED))

    def _show(self) -> None:
        pool = self.scheduler.pool
        if self.snapshots is None or pool.active == self._shown_blocks:
            return
        self._shown_blocks = pool.active
        usage = pool.active / pool.capacity
        snapshot = ComponentSnapshot(pool.active, pool.capacity, usage, self.hit_rate, self.dp_rank)
        self.snapshots.publish(self.dp_rank, snapshot)


def _ended() -> EngineShutdown:
    """Return a new error for each request: an error keeps the frames it has passed."""
    return EngineShutdown("the mock engine's loop has ended")
