"""The events by which routers of the same workers share their requests, and how a router applies them.

Source: dynamo lib/kv-router/src/protocols.rs, ActiveSequenceEvent, and sequences/replica_sync.rs. The wire form is the
same; output blocks are not shared. Other than there a router's bookings are its own: the same request id booked here,
or by a third router, is another booking. So a request that is prefilled in one pool and decoded in another, or sent
again through another router, never collides with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self, TypeAlias

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.protocols.field_rules import U32, U64, IntRange, Tagged, null

from ..errors import BookingError
from ..types import WorkerRank
from .sequences import ActiveSequences, SequenceLoad

ACTIVE_SEQUENCES_TOPIC = "active_sequences_events"
"""Topic of these events on the event plane."""

_NS = 1_000_000_000

Nanoseconds: TypeAlias = Annotated[int, IntRange(0, _NS - 1)]


@frozen
class Duration:
    """A time as other routers write it."""

    secs: U64
    """Whole seconds."""
    nanos: Nanoseconds
    """The rest, in nanoseconds."""

    @classmethod
    def of(cls, seconds: float) -> Self:
        """Return the duration, rounded to nanoseconds."""
        return cls(*divmod(round(seconds * _NS), _NS))

    @property
    def seconds(self) -> float:
        return self.secs + self.nanos / _NS


@frozen
class PrefillLoadHint:
    """The load of a prompt that counts."""

    initial_effective_prefill_tokens: U64
    """Prompt tokens the worker must compute."""
    expected_prefill_duration: Duration | None = null()
    """How long that takes; None if it is not modelled."""


@frozen
class AddRequest:
    """A request was booked."""

    token_sequence: list[U64] | None = null()
    """Sequence hashes of its blocks; None if blocks are not tracked."""
    track_prefill_tokens: bool = True
    """Whether the tokens of the hint count."""
    expected_output_tokens: U32 | None = null()
    """The client's estimate, in tokens."""
    prefill_load_hint: PrefillLoadHint | None = null()
    """None if the prompt does not count."""

    @classmethod
    def of(cls, load: SequenceLoad) -> Self:
        """Return the step in which a request with this load is booked."""
        hint = None
        if load.prefill_tokens:
            duration_s = load.prefill_duration_s
            hint = PrefillLoadHint(load.prefill_tokens, None if duration_s is None else Duration.of(duration_s))
        return cls(list(load.hashes) or None, load.prefill_tokens > 0, prefill_load_hint=hint)


@frozen
class MarkPrefillCompleted:
    """The prompt of a request is computed."""


@frozen
class Free:
    """A request has ended."""


SequenceEventData: TypeAlias = Annotated[
    AddRequest | MarkPrefillCompleted | Free,
    Tagged({"AddRequest": AddRequest, "MarkPrefillCompleted": MarkPrefillCompleted, "Free": Free}),
]


@frozen
class ActiveSequenceEvent:
    """One step in the life of a request, published by the router it is from. `worker` counts for `AddRequest` only."""

    request_id: str
    worker: WorkerRank
    data: SequenceEventData
    router_id: U64
    lora_name: str | None = null()


ReceivedEvent: TypeAlias = tuple[float, ActiveSequenceEvent]
"""An event and when it was received."""


@frozen
class Applied:
    """What a batch changed: whether loads must be published, and whether waiting requests may go on."""

    loads_changed: bool
    made_room: bool
    dropped: int


def apply_events(
    sequences: ActiveSequences, received: Sequence[ReceivedEvent], *, registered_only: bool = False
) -> Applied:
    """Apply a batch of other routers' events; an added prompt begins when its event was received.

    A booking on an unknown worker opens an account for it, or is dropped and counted with `registered_only`. A second
    booking of an id replaces the first: its router would not book it again unless the first had ended. The end of an
    unknown request changes nothing.
    """
    loads_changed = made_room = False
    dropped = 0
    for received_s, event in received:
        booked_as, data = _booked_as(event), event.data
        known = sequences.get(booked_as)
        if isinstance(data, MarkPrefillCompleted):
            if known is not None:
                made_room |= sequences.finish_prefill(known, received_s)
            continue
        if known is not None and sequences.release(known, received_s):
            loads_changed = made_room = True
        if isinstance(data, AddRequest):
            try:
                sequences.book(booked_as, event.worker, _load(data), received_s, registered_only=registered_only)
                loads_changed = True
            except (BookingError, InvalidArgument):
                dropped += 1
    return Applied(loads_changed, made_room, dropped)


def _booked_as(event: ActiveSequenceEvent) -> str:
    """The id under which another router's booking is in our account; no request of ours has such a one."""
    return f"{event.router_id}\0{event.request_id}"


def _load(data: AddRequest) -> SequenceLoad:
    hint = data.prefill_load_hint
    if hint is None:
        return SequenceLoad(data.token_sequence or ())
    tokens = hint.initial_effective_prefill_tokens if data.track_prefill_tokens else 0
    duration = hint.expected_prefill_duration
    return SequenceLoad(data.token_sequence or (), tokens, None if duration is None else duration.seconds)
