"""EngineFollower: an engine's cache events, complete and in order, as changes that a router can apply.

    what it publishes ──► the next? ──yes──► decode ──► EngineEvents ──► DuplicateFilter, merged ──► deliver
                             └─ no: request a replay from there; what does not come is lost

The replay also begins with the last batch that was taken. An engine that does not have it, or has another one in its
place, has restarted: what it held is cleared, and everything it still has is requested.

Source: vllm/distributed/kv_events.py, ZmqEventPublisher; dynamo lib/llm/src/kv_router/publisher/zmq_listener.rs, which
has no replay and does not notice a restart.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from math import inf

import anyio
from attrs import frozen

from pipeline import ContractViolation, InvalidArgument
from pipeline.errors import InvalidMessage
from pipeline.protocols.kv import KvCleared

from .batch_order import BatchOrder, Place
from .engine_changes import DuplicateFilter, EngineChange, EngineEvents, Filtered, merged
from .engine_wire import EngineBatch, RefusalReason, RefusedMessage, WireLimits, decode_frames
from .zmq_sockets import EventSockets, Frames, Link, Replay

_log = logging.getLogger(__name__)

_WARNINGS = 3
_SEQUENCE_BYTES = 8
_END_OF_REPLAY = b"\xff" * _SEQUENCE_BYTES


@frozen
class ReplayLimits:
    """When a replay is requested, and how long it is waited for. Raise InvalidArgument unless `attempts` is at least 1,
    and `idle_s` above 0."""

    timeout_s: float = 5.0
    """Seconds without a message of it, after which an attempt has failed."""
    attempts: int = 3
    """Attempts in a row that bring nothing, after which what is missing is given up."""
    delay_s: float = 0.5
    """Seconds between two attempts."""
    pause_s: float = 30.0
    """Seconds after a replay that was given up in which batches that are missing are lost at once."""
    idle_s: float = 30.0
    """Seconds without any message after which a replay is requested, in case the last ones were lost."""

    def __attrs_post_init__(self) -> None:
        if not self.idle_s > 0:
            raise InvalidArgument(f"must be above 0, got {self.idle_s:g}", field="idle_s")
        if self.attempts < 1:
            raise InvalidArgument(f"must be at least 1, got {self.attempts}", field="attempts")


class _Answer(Enum):
    """How a replay ended."""

    WHOLE = auto()
    CUT = auto()
    """Something in it did not come."""
    RESTARTED = auto()
    """It is of another life of the engine than the batches before."""


class EngineFollower:
    """Follows the engine at `endpoint` (`tcp://host:port`) in `run`, and calls `deliver` with each change.

    `topic` is what the engine's topics begin with. With `replay_endpoint` the batches that were published before the
    connection stood, or that got lost, are fetched. Without it, and where the engine does not keep them any more, they
    are lost: seen by their sequence, which begins with 0, they are counted in `lost_batches`, and the cache may differ
    from what is known of it until those blocks go.

    An engine that restarted is noticed by a sequence that goes back, and by what it replays once a connection that was
    lost stands again; without a replay, an engine that does not go on with the next sequence then is taken for a
    restarted one. Each rank is cleared then, and `restarts` counts it.

    `filtered` counts by reason what is not for a router, `malformed` the messages that were none, `refused` by reason
    those over a limit of `limits`, `repeated` those that came before or come too late, `replayed_batches` those that a
    replay brought, `failed_replays` the replays that were given up. All of these leave the connection as it is, or it
    is made anew. Used in one loop.
    """

    def __init__(
        self,
        endpoint: str,
        deliver: Callable[[EngineChange], object],
        *,
        block_size_tokens: int,
        replay_endpoint: str | None = None,
        topic: bytes = b"",
        limits: WireLimits | None = None,
        replay_limits: ReplayLimits | None = None,
    ) -> None:
        self.endpoint, self.replay_endpoint, self.topic = endpoint, replay_endpoint, topic
        self.limits = WireLimits() if limits is None else limits
        self.replay_limits = ReplayLimits() if replay_limits is None else replay_limits
        self.malformed = self.repeated = self.restarts = self.replayed_batches = self.failed_replays = 0
        self.refused: Counter[RefusalReason] = Counter()
        self.filtered: Counter[str] = Counter()
        self.is_connected = False
        """Whether the connection stands."""
        self._deliver = deliver
        self._order = BatchOrder()
        self._converter = EngineEvents(block_size_tokens)
        self._duplicates = DuplicateFilter()
        self._lost_before = 0
        self._ranks: set[int] = set()
        self._may_have_restarted = False
        self._no_replay_until_s = -inf
        self._runs = False

    @property
    def lost_batches(self) -> int:
        """How many of the engine's messages did not arrive."""
        return self._lost_before + self._converter.lost_batches

    @property
    def has_received(self) -> bool:
        """Whether any batch of the engine's present life has come."""
        return self._order.next_sequence > 0

    async def run(self) -> None:
        """Connect, and again after each loss, and deliver what comes, until cancelled. What `deliver` raises ends it.

        Raise InvalidArgument without pyzmq and for an endpoint that is none, ContractViolation while it runs already.
        """
        if self._runs:
            raise ContractViolation("the follower runs already")
        self._runs = True
        try:
            with EventSockets.opened(
                self.endpoint, topic=self.topic, message_bytes=self.limits.message_bytes
            ) as sockets:
                while True:
                    item: Frames | Link | None = None
                    with anyio.move_on_after(self.replay_limits.idle_s):
                        item = await sockets.receive()
                    await self._take(sockets, item)
        finally:
            self._runs = self.is_connected = False

    def receive(self, frames: Frames) -> None:
        """Take one message of the engine, however it came. What is missing before it is lost."""
        if (batch := self._decoded(frames)) is None:
            return
        place = self._order.place(batch.sequence, frames[-1])
        may_have_restarted, self._may_have_restarted = self._may_have_restarted, False
        if place is Place.OTHER or (may_have_restarted and place is not Place.NEXT):
            self._begin_anew()
        elif place in (Place.TAKEN, Place.LATE):
            self.repeated += 1
            return
        self._apply(batch, frames[-1])

    # -- inside

    async def _take(self, sockets: EventSockets, item: Frames | Link | None) -> None:
        """Take a message, or what became of the connection; None: nothing has come for a while."""
        if item is None:
            if self.is_connected:
                await self._catch_up(sockets)
            return
        self.is_connected = item is Link.UP or isinstance(item, list)
        if isinstance(item, list):
            sequence = _sequence_of(item)
            is_known = sequence is None or self._order.place(sequence, item[-1]) not in (Place.LATER, Place.OTHER)
            if not is_known and anyio.current_time() >= self._no_replay_until_s:
                await self._catch_up(sockets)
            self.receive(item)
            return
        if item is Link.UP:
            await self._catch_up(sockets)
            return
        self._may_have_restarted = self.has_received
        if item is Link.CUT:
            self._refuse("too_large", "the connection broke over one, or over bytes that are no message")
            sockets.reconnect()

    async def _catch_up(self, sockets: EventSockets) -> None:
        """Fetch the batches that are missing, and clear what an engine held that has restarted."""
        if self.replay_endpoint is None:
            return
        failed = 0
        while failed < self.replay_limits.attempts:
            reached = self._order.next_sequence
            with sockets.replay(self.replay_endpoint, max(reached - 1, 0)) as replay:
                answer = await self._replayed(replay)
            if answer is _Answer.WHOLE:
                self._may_have_restarted = False
                return
            if answer is _Answer.RESTARTED:
                self._begin_anew()
            elif self._order.next_sequence > reached:
                failed = 0
            else:
                failed += 1
                await anyio.sleep(self.replay_limits.delay_s)
        self.failed_replays += 1
        self._no_replay_until_s = anyio.current_time() + self.replay_limits.pause_s
        if self.failed_replays <= _WARNINGS:
            first = self._order.next_sequence
            _log.warning("%s does not replay what was published from %d on", self.replay_endpoint, first)

    async def _replayed(self, replay: Replay) -> _Answer:
        """Take the messages of a replay, which begins with the last batch that was taken, if there is one."""
        last = self._order.next_sequence - 1
        is_first = True
        while (frames := await self._next_of(replay)) is not None:
            sequence = int.from_bytes(frames[1], "big")
            place = self._order.place(sequence, frames[2])
            if frames[1] == _END_OF_REPLAY:
                return _Answer.RESTARTED if is_first and last >= 0 else _Answer.WHOLE
            if place is Place.OTHER and last >= 0:
                return _Answer.RESTARTED
            if place is Place.LATER and not is_first:  # a router drops what a slow reader has no room for
                return _Answer.CUT
            if is_first and last >= 0 and sequence > last and self._may_have_restarted:
                self._begin_anew()  # the last one is too old to be kept, or this is another life
            is_first = False
            if place in (Place.NEXT, Place.LATER):
                self._take_replayed(sequence, frames)
        return _Answer.CUT

    async def _next_of(self, replay: Replay) -> Frames | None:
        """Return topic, sequence and payload of the next message, None if none comes."""
        frames: Frames | None = None
        with anyio.move_on_after(self.replay_limits.timeout_s):
            while frames is None:
                frames = _without_envelope(await replay.receive())
                if frames is None:
                    self._note_malformed("not a message of a replay")
        return frames

    def _take_replayed(self, sequence: int, frames: Frames) -> None:
        """Take a batch of a replay; one that cannot be read is given up, for it would come in the same form again."""
        self.replayed_batches += 1
        batch = self._decoded(frames)
        if batch is None:
            self._order.take(sequence, frames[-1])
        else:
            self._apply(batch, frames[-1])

    def _decoded(self, frames: Frames) -> EngineBatch | None:
        try:
            return decode_frames(frames, self.limits)
        except RefusedMessage as error:
            self._refuse(error.reason, str(error))
        except InvalidMessage as error:
            self._note_malformed(str(error))
        return None

    def _note_malformed(self, text: str) -> None:
        self.malformed += 1
        if self.malformed <= _WARNINGS:
            _log.warning("a message from %s cannot be read: %s", self.endpoint, text)

    def _refuse(self, reason: RefusalReason, text: str) -> None:
        self.refused[reason] += 1
        if self.refused[reason] <= _WARNINGS:
            _log.warning("a message from %s is refused, %s: %s", self.endpoint, reason, text)

    def _apply(self, batch: EngineBatch, payload: bytes) -> None:
        self._order.take(batch.sequence, payload)
        self._ranks.add(batch.dp_rank)
        changes: list[EngineChange] = []
        for item in self._converter.convert(batch):
            if isinstance(item, Filtered):
                self.filtered[item.reason] += 1
            elif (passed := self._duplicates.passed(item)) is not None:
                changes.append(passed)
        for change in merged(changes):
            self._deliver(change)

    def _begin_anew(self) -> None:
        """Forget what the engine held before it restarted."""
        self.restarts += 1
        self._lost_before = self.lost_batches
        self._order = BatchOrder()
        self._converter = EngineEvents(self._converter.block_size_tokens)
        self._duplicates = DuplicateFilter()
        for dp_rank in sorted(self._ranks):
            self._deliver(EngineChange(dp_rank, KvCleared()))


def _sequence_of(frames: Frames) -> int | None:
    return int.from_bytes(frames[1], "big") if len(frames) == 3 and len(frames[1]) == _SEQUENCE_BYTES else None


def _without_envelope(frames: Frames) -> Frames | None:
    """Return topic, sequence and payload of a replay's message; older engines send no topic in it."""
    if len(frames) not in (3, 4) or frames[0] != b"" or len(frames[-2]) != _SEQUENCE_BYTES:
        return None
    return [frames[1] if len(frames) == 4 else b"", *frames[-2:]]
