"""Reservation: one request on the worker that was chosen for it, from the choice until it is released, once.

    KvRouter.reserve ──► Reservation ──► count: prompt computed, output blocks filled ──► release

LoadBook: the reservations of one router, and those of its replicas: what is in flight on every rank.

Source: dynamo lib/llm/src/kv_router/push_router.rs, RequestGuard. Other than there it begins with the booking, adds as
many output blocks as were filled, and is closed before an error is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import define, field

from pipeline import Annotated, Take
from pipeline.loop import clock
from pipeline.protocols import LLMEngineOutput
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.kv import PassRates

from .decision import Decision
from .load import BOOKED, COMPUTED, ENDED, EXPIRY_S, ActiveRequest, ActiveSequences, ReplicaSync, SequenceLoad
from .metrics import RequestMeter
from .numbers import RankNumbers
from .pace import UNOBSERVED, Pace, PaceMeter
from .types import WorkerRank

_log = logging.getLogger(__name__)


@define(eq=False, kw_only=True)
class Reservation(ActiveRequest):
    """A request booked on its worker. Release it on every way out; a second release does nothing.

    It expires if it is not released in time, and ends with its worker. Nothing here waits, and every method may be
    called in a plain callback of the loop. A failure to keep the load book, or of a request that waits for the room
    that a release makes, is logged: the answer does not depend on it.
    """

    book: LoadBook = field(repr=False)
    block_size_tokens: int
    prompt_tokens: int = 0
    expected_output_tokens: int | None = None
    """Length of the answer that the client expects; output blocks then weigh less the nearer it is."""
    tracks_output_blocks: bool = False
    """Whether output blocks count as load."""
    meter: RequestMeter | None = None
    """Set when the request is sent: a request that was never sent is not counted as answered."""
    output_tokens: int = field(default=0, init=False)
    """Tokens of the answer so far. The reader of the stream adds them, and calls `advance` at `next_step_tokens`."""
    next_step_tokens: int = field(default=1, init=False)
    """At this many output tokens the load changes: at the first, then at each that needs a new block."""
    queued_tokens: int = field(default=0, init=False)
    """The prompt tokens that its rank had to compute until its first token, when it was booked."""
    first_token_s: float | None = field(default=None, init=False)
    """When the first token came, where that is observed."""
    _take: Take | None = field(default=None, init=False, repr=False)
    """Takes the plain tokens of the answer, if its stream is fed."""
    _decision: Decision | None = field(default=None, init=False)
    _is_released: bool = field(default=False, init=False)

    @property
    def decision(self) -> Decision:
        """Why this worker was chosen; not available after `forget_decision`."""
        assert self._decision is not None, "the decision was dropped"
        return self._decision

    def forget_decision(self) -> None:
        """Drop the reasons: they are as long as the pool, and a stream stays open for long."""
        self._decision = None

    @property
    def is_live(self) -> bool:
        """False once it was released, has expired, or its worker is gone."""
        return self.book.sequences.is_live(self)

    def mark_prefill_completed(self) -> bool:
        """Stop counting the prompt as work; return False if that was done before, or the reservation is not live."""
        return self._kept(self.book.finish_prefill)

    def advance(self) -> None:
        """Take note of the first token, and of output that fills another block."""
        after = self.output_tokens
        first_block_tokens = -self.prompt_tokens % self.block_size_tokens
        if self.next_step_tokens == 1:
            self._kept(self.book.first_token)
            if self.meter is not None:
                self.meter.first_token()
            self.next_step_tokens = first_block_tokens + 1
        if after >= self.next_step_tokens:
            added = -(-(after + 1 - self.next_step_tokens) // self.block_size_tokens)
            self.next_step_tokens += added * self.block_size_tokens
            self._grow(added)

    def relay(self, take: Take) -> Take:
        """Return what takes plain tokens and counts them, as the reader of the stream does items: see `feed`."""
        self._take = take
        return self._take_token

    def _take_token(self, token_id: int, index: int | None, text: str | None = None) -> bool:
        take = self._take
        assert take is not None, "the stream is fed"
        if not (take(token_id, index) if text is None else take(token_id, index, text)):
            return False
        self.output_tokens += 1
        if self.output_tokens >= self.next_step_tokens:
            self.advance()
        return True

    def release(self) -> bool:
        """Take the request off its rank; return False if it is off already."""
        if self._is_released:
            return False
        self._is_released = True
        released = self._kept(self.book.release)
        if self.meter is not None:
            self.meter.ended(self.output_tokens)
        return released

    def finish(self) -> None:
        """Release it, and record the end of the answer in the request's tracker; the tracker needs the loop's clock."""
        if not self._is_released:  # after a drop the stream has done that already
            self.release()
        if (meter := self.meter) is not None:
            self.meter = None
            meter.finished(self.output_tokens)

    def add_output_blocks(self, blocks: int, weight: float | None) -> bool:
        """Count so many more output blocks; `weight` decays what only this request holds. False if it is not live."""
        return self._kept(lambda reservation: self.book.grow(reservation, blocks, weight))

    def _grow(self, blocks: int) -> None:
        if self.tracks_output_blocks:
            self.add_output_blocks(blocks, output_weight(self.output_tokens, self.expected_output_tokens))
        if self.meter is not None:
            self.meter.block_filled(self.output_tokens)

    def _kept(self, step: Callable[[Reservation], bool]) -> bool:
        try:
            return step(self)
        except Exception:
            _log.warning("the account of a request could not be kept", exc_info=True)
            return False


class LoadBook:
    """What is in flight on every rank: the reservations of one router and, with `peers`, of its replicas.

    For one loop. `expiry_s` is when a reservation that was not released is given up. `on_room` is called when a prompt
    was computed or a request ended here. `numbers` are those of the router's index. `meter` observes how fast requests
    are answered. `shows_lately` is whether loads show the blocks held lately.
    """

    def __init__(
        self,
        *,
        expiry_s: float = EXPIRY_S,
        peers: ReplicaSync | None = None,
        numbers: RankNumbers | None = None,
        meter: PaceMeter | None = None,
        shows_lately: bool = False,
    ) -> None:
        self._meter, self._pace, self._shows_lately = meter, UNOBSERVED, shows_lately
        self.sequences = ActiveSequences(expiry_s, RankNumbers() if numbers is None else numbers)
        self.clock = loop_clock()
        self.peers = peers
        self.now_s = self.clock if peers is None else self._now_s
        """The time of a decision or a change of load, once the events of replicas until then are applied."""
        self.on_room: Callable[[], object] = lambda: None
        if peers is not None:
            peers.join(self.sequences, self.clock)

    def __len__(self) -> int:
        """The number of requests that are booked, those of replicas included."""
        return len(self.sequences)

    def _now_s(self) -> float:
        if self.peers is not None:
            self.peers.take_in()
        return self.clock()

    def enter(self, reservation: Reservation, decision: Decision, load: SequenceLoad, now_s: float) -> None:
        """Book the reservation on the chosen rank. Raises what `ActiveSequences.add` raises; nothing is booked then."""
        self.sequences.add(reservation, decision.rank, load, now_s, registered_only=True)
        reservation._decision = decision
        if self._meter is not None and (slot := reservation.slot) is not None:
            reservation.queued_tokens = slot.prompts.tokens_at(now_s)
            before_tokens = max(0, reservation.queued_tokens - load.prefill_tokens)
            self._meter.booked(before_tokens, load.prefill_tokens, decision.prompt.isl_tokens)
        if self.peers is not None:
            self.peers.publish(BOOKED, reservation, load)

    def pace(self, now_s: float) -> Pace:
        """Return how the workers answer, as far as that is observed. When it changes, so do the blocks held lately."""
        if self._meter is not None and (pace := self._meter.pace(now_s)) is not self._pace:
            self._pace = pace
            if self._shows_lately:
                # Where they would count nothing they would only tell ranks apart that are equal.
                self.sequences.note_blocks_lately(now_s, shown=pace.returns > 0 and pace.pause_weight > 0)
        return self._pace

    def reported(self, rank: WorkerRank, rates: PassRates) -> None:
        """A rank reports what its passes take."""
        if self._meter is not None:
            self._meter.reports.take_in(rank, rates, self.clock())

    def set_limits(self, cards: Iterable[ModelRuntimeConfig]) -> None:
        """Take what the workers that are there may run at a time, by their cards."""
        if self._meter is not None:
            self._meter.reports.set_limits(cards)

    def first_token(self, reservation: Reservation) -> bool:
        """The first token came: the prompt was computed."""
        if self._meter is not None and self.sequences.is_live(reservation):
            reservation.first_token_s = now_s = self.clock()
            self._meter.answered(reservation.rank, reservation.queued_tokens, now_s - reservation.booked_s)
        return self.finish_prefill(reservation)

    def finish_prefill(self, reservation: Reservation) -> bool:
        if marked := self.sequences.finish_prefill(reservation, self.now_s()):
            if self.peers is not None:
                self.peers.publish(COMPUTED, reservation)
            self.on_room()
        return marked

    def grow(self, reservation: Reservation, blocks: int, weight: float | None) -> bool:
        """Count so many more output blocks; `weight` decays what only this request holds. False if it is not live."""
        now_s = self.now_s()
        return all(self.sequences.grow(reservation, weight, now_s) for _ in range(blocks))

    def release(self, reservation: Reservation) -> bool:
        """Take it off its rank, and off the replicas' books, also where it had expired or lost its worker here."""
        released = self.sequences.release(reservation, self.now_s())
        if self._meter is not None and released and reservation.first_token_s is not None:
            self._meter.ended(reservation.output_tokens, self.clock() - reservation.first_token_s)
        if self.peers is not None:
            self.peers.publish(ENDED, reservation)
        if released:
            self.on_room()
        return released

    def set_workers(self, gone: Sequence[int], ranks: Mapping[int, range]) -> None:
        """Drop the bookings of workers that are gone, and keep an account for exactly these ranks."""
        for worker_id in gone:
            self.sequences.remove_worker(worker_id)
            if self._meter is not None:
                self._meter.forget(worker_id)
        self.sequences.set_workers(ranks)

    def close(self) -> None:
        """Stop receiving the replicas' events. Reservations stay valid."""
        if self.peers is not None:
            self.peers.close()


def loop_clock() -> Callable[[], float]:
    """Return a clock with the seconds of the loop that runs at its first call; it does not go back.

    Without any loop, or before there is one, it is the time last returned.
    """
    read: Callable[[], float] | None = None
    last_s = 0.0

    def now_s() -> float:
        nonlocal read, last_s
        try:
            if read is None:
                read = clock()
            if (seconds := read()) > last_s:
                last_s = seconds
        except RuntimeError:  # both backends: no loop runs here
            pass
        return last_s

    return now_s


def output_weight(output_tokens: int, expected_output_tokens: int | None) -> float | None:
    """Return what a block weighs at this point of the expected output: the fuller, the sooner it is free again."""
    if expected_output_tokens is None:
        return None
    return max(0.0, 1.0 - output_tokens / max(1, expected_output_tokens))


def ends_badly(item: Annotated[LLMEngineOutput]) -> bool:
    """Whether the item means that the answer failed or was cancelled, so that the request may be sent again."""
    if item.is_error:
        return True
    reason = None if item.data is None else item.data.finish_reason
    return reason is not None and (reason.is_error or reason.kind == "cancelled")
