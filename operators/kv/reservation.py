"""Placement: a booked request: where it goes, why, and the account of it until it is released.

RequestAccount: what a routed request has put out, and the release of what it holds, once.

Source: dynamo lib/llm/src/kv_router/push_router.rs, RequestGuard. Other than there it begins with the booking, adds as
many output blocks as were filled, and is closed before an error is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from attrs import define, field

from pipeline import Annotated, ReleaseOnce
from pipeline.protocols import LLMEngineOutput, RequestPhase, RequestTracker

from .clock import LoopClock
from .load import Booking, Told
from .metrics import RouterMetrics
from .selection import Decision
from .types import WorkerRank


@define(eq=False)
class Placement:
    """Made with its booking; `release` it on every way out. Each call wakes those that wait for room.

    With `_told` the other routers hear of it too, of its end even where it expired here or its worker has gone.
    Nothing here waits, and all of it may be called in a plain callback of the loop.
    """

    request_id: str
    _decision: Decision | None
    _booking: Booking = field(repr=False)
    _clock: LoopClock = field(repr=False)
    _changed: Callable[[], object] = field(repr=False)
    _told: Told | None = field(default=None, repr=False)

    @property
    def rank(self) -> WorkerRank:
        return self._booking.rank

    @property
    def decision(self) -> Decision:
        """Why there; not to be asked after `forget_decision`."""
        assert self._decision is not None, "the decision was let go"
        return self._decision

    def forget_decision(self) -> None:
        """Lets the reasons go: they are as long as the pool, and a stream stays open for long."""
        self._decision = None

    @property
    def is_live(self) -> bool:
        """False once it was released, has expired, or its worker is gone."""
        return self._booking.is_live

    def mark_prefill_completed(self) -> bool:
        """The prompt is computed: the first token is there. False if that was known, or the booking is gone."""
        if marked := self._booking.mark_prefill_completed(self._now_s()):
            if self._told is not None:
                self._told.prefill_completed()
            self._changed()
        return marked

    def add_output_blocks(self, count: int, weight: float | None) -> bool:
        """The output grew by so many blocks; `weight` decays what only this request holds. False if it is off."""
        now_s = self._now_s()
        return all(self._booking.add_output_block(weight, now_s) for _ in range(count))

    def release(self) -> bool:
        """Takes the request off its rank. False if it is off already."""
        released = self._booking.release(self._now_s())
        if self._told is not None:
            self._told.over()
        if released:
            self._changed()
        return released

    def _now_s(self) -> float:
        """The time, with what the other routers told until then taken in: accounts go by the order of things."""
        if self._told is not None:
            self._told.peers.take_in()
        return self._clock.now_s()


_log = logging.getLogger(__name__)


@define(eq=False)
class RequestAccount:
    """One booked request. `held` releases it, for the ways out on which nothing ran; `finish` also notes the time.

    Until `was_dispatched` is set its end is not counted: there was no answer. What goes wrong in the account, or with
    those who wait for the room it makes, is logged: the answer does not depend on it.

    `phase` is that of this dispatch: the tracker goes on to the next one while a prefill still runs. How long the
    answer is and when it ended only its decode tells the tracker, however late the prefill ends.
    """

    placement: Placement
    metrics: RouterMetrics
    tracker: RequestTracker | None
    input_tokens: int
    block_size_tokens: int
    expected_output_tokens: int | None = None
    tracks_output_blocks: bool = False
    phase: RequestPhase = RequestPhase.AGGREGATED
    was_dispatched: bool = field(default=False, init=False)
    output_tokens: int = field(default=0, init=False)
    held: ReleaseOnce = field(init=False)
    _is_finished: bool = field(default=False, init=False)
    _room_tokens: int = field(init=False)
    """How many output tokens go into the prompt's blocks and those the output has filled since."""

    def __attrs_post_init__(self) -> None:
        self._room_tokens = -self.input_tokens % self.block_size_tokens
        self.held = ReleaseOnce(self._release)

    def count(self, tokens: int) -> None:
        """So many more tokens came, at least one."""
        before = self.output_tokens
        if not before:
            _noting_failure(self.placement.mark_prefill_completed)
            if self.tracker is not None:
                self._first_token(self.tracker)
        self.output_tokens = after = before + tokens
        if after > self._room_tokens:  # once per token: the division is for the few that need a block
            self._grow(-(-(after - self._room_tokens) // self.block_size_tokens))

    def finish(self) -> None:
        """The answer is over, however; the second time nothing happens."""
        if self._is_finished:
            return
        self._is_finished = True
        self.held.release()  # after a drop the stream has done that already
        if (tracker := self._of_answer) is not None and self.was_dispatched:
            tracker.record_finish()
            tracker.record_osl(self.output_tokens)

    def _first_token(self, tracker: RequestTracker) -> None:
        tracker.record_first_token()
        self.metrics.first_token(tracker)
        if self.phase is RequestPhase.PREFILL:
            tracker.record_prefill_complete()
        elif self.phase is RequestPhase.DECODE and tracker.record_decode_first_token():
            self.metrics.blocks_arrived(tracker)

    @property
    def _of_answer(self) -> RequestTracker | None:
        return None if self.phase is RequestPhase.PREFILL else self.tracker

    def _grow(self, added_blocks: int) -> None:
        self._room_tokens += added_blocks * self.block_size_tokens
        if self.tracks_output_blocks:
            weight = output_weight(self.output_tokens, self.expected_output_tokens)
            _noting_failure(lambda: self.placement.add_output_blocks(added_blocks, weight))
        if (tracker := self._of_answer) is not None:
            tracker.record_osl(self.output_tokens)
            tracker.record_finish()
            self.metrics.block_of_output(tracker)

    def _release(self) -> None:
        _noting_failure(self.placement.release)
        if self.was_dispatched:
            self.metrics.ended(self.output_tokens)


def _noting_failure(step: Callable[[], object]) -> None:
    try:
        step()
    except Exception:
        _log.warning("the account of a request could not be kept", exc_info=True)


def output_weight(output_tokens: int, expected_output_tokens: int | None) -> float | None:
    """What a block counts when so much of the expected output is there: the fuller, the sooner it is free again."""
    if expected_output_tokens is None:
        return None
    return max(0.0, 1.0 - output_tokens / max(1, expected_output_tokens))


def ends_badly(item: Annotated[LLMEngineOutput]) -> bool:
    """Whether the item says that the answer failed or was given up, so that the request may be sent again."""
    if item.is_error:
        return True
    reason = None if item.data is None else item.data.finish_reason
    return reason is not None and (reason.is_error or reason.kind == "cancelled")
