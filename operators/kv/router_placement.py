"""Placement: a booked request: where it goes, why, and the account of it until it is released."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from .active_sequences import Booking
from .choose import Decision
from .replica_sync import Told
from .router_clock import LoopClock
from .worker_rank import WorkerRank


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
