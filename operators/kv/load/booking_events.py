"""The events by which routers of the same workers share their requests, on the wire.

ActiveSequenceEvent: one step of a request. A snapshot consists of these.

RouterSteps: steps that leave together, in columns, as they are published: a record of each takes several times as long
to write and to read.

Source: dynamo lib/kv-router/src/protocols.rs, ActiveSequenceEvent, whose wire form is the same; output blocks are not
shared. Other than there several steps are one event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated, Self, TypeAlias

from attrs import define, frozen

from pipeline.protocols.field_rules import U32, U64, IntRange, InvalidRecord, Tagged, null

from ..types import WorkerRank
from .sequences import ActiveRequest, SequenceLoad

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


@define
class PrefillLoadHint:
    """The load of a prompt that counts."""

    initial_effective_prefill_tokens: U64
    """Prompt tokens the worker must compute."""
    expected_prefill_duration: Duration | None = null()
    """How long that takes; None if it is not modelled."""


@define
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

    def load(self) -> SequenceLoad:
        """Return what the request puts on its worker."""
        hint = self.prefill_load_hint
        if hint is None:
            return SequenceLoad(self.token_sequence or ())
        tokens = hint.initial_effective_prefill_tokens if self.track_prefill_tokens else 0
        duration = hint.expected_prefill_duration
        return SequenceLoad(self.token_sequence or (), tokens, None if duration is None else duration.seconds)


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


@define
class ActiveSequenceEvent:
    """One step in the life of a request, published by the router it is from. `worker` counts for `AddRequest` only."""

    request_id: str
    worker: WorkerRank
    data: SequenceEventData
    router_id: U64
    lora_name: str | None = null()


BOOKED, COMPUTED, ENDED = "b", "c", "e"
"""Kinds of steps: a request was booked, its prompt is computed, it has ended."""
_NO_RANK = WorkerRank(0, 0)


Step: TypeAlias = tuple[str, ActiveRequest, SequenceLoad | None]
"""The kind of a step, its request, and the load of one that was booked."""


@define
class RouterSteps:
    """Steps of a router's requests, in their order. Raises InvalidRecord for columns that do not fit each other."""

    router_id: U64
    kinds: str
    """A letter for each step."""
    request_ids: list[str]
    """Of each step."""
    worker_ids: list[U64]
    """Of each step that books a request, as the columns that follow."""
    dp_ranks: list[U32]
    hashes: list[list[U64]]
    """Sequence hashes of its blocks; none if blocks are not tracked."""
    prefill_tokens: list[U64]
    """Prompt tokens the worker must compute; 0 where the prompt does not count."""
    prefill_durations_ns: list[U64 | None]
    """How long that takes; None if it is not modelled."""

    def __attrs_post_init__(self) -> None:
        kinds = self.kinds
        bookings = kinds.count(BOOKED)
        if bookings + kinds.count(COMPUTED) + kinds.count(ENDED) != len(kinds):
            raise InvalidRecord("expected the letters of steps", "kinds")
        if len(self.request_ids) != len(kinds):
            raise InvalidRecord("expected one id a step", "request_ids")
        columns = (self.worker_ids, self.dp_ranks, self.hashes, self.prefill_tokens, self.prefill_durations_ns)
        if any(len(column) != bookings for column in columns):
            raise InvalidRecord("expected one value a booking")

    @classmethod
    def of(cls, router_id: int, steps: Sequence[Step]) -> Self:
        """Return the event of these steps."""
        booked = [(request.rank, load) for _, request, load in steps if load is not None]
        return cls(
            router_id,
            "".join([kind for kind, _, _ in steps]),
            [request.request_id for _, request, _ in steps],
            [rank.worker_id for rank, _ in booked],
            [rank.dp_rank for rank, _ in booked],
            [list(load.hashes) for _, load in booked],
            [load.prefill_tokens for _, load in booked],
            [_duration_ns(load) for _, load in booked],
        )

    def events(self) -> Iterator[ActiveSequenceEvent]:
        """Yield the steps one by one."""
        numbers, router_id = count(), self.router_id
        for kind, request_id in zip(self.kinds, self.request_ids, strict=True):
            if kind == BOOKED:
                at = next(numbers)
                rank = WorkerRank(self.worker_ids[at], self.dp_ranks[at])
                yield ActiveSequenceEvent(request_id, rank, self._booking(at), router_id)
            else:
                yield ActiveSequenceEvent(request_id, _NO_RANK, _COMPUTED if kind == COMPUTED else _ENDED, router_id)

    def _booking(self, at: int) -> AddRequest:
        tokens, duration_ns = self.prefill_tokens[at], self.prefill_durations_ns[at]
        duration = None if duration_ns is None else Duration(*divmod(duration_ns, _NS))
        hint = PrefillLoadHint(tokens, duration) if tokens else None
        return AddRequest(self.hashes[at] or None, tokens > 0, prefill_load_hint=hint)


_LONGEST_S = 1e10
"""More does not fit into 64 bits of nanoseconds."""
_COMPUTED, _ENDED = MarkPrefillCompleted(), Free()


def _duration_ns(load: SequenceLoad) -> int | None:
    return None if (duration_s := load.prefill_duration_s) is None else round(min(duration_s, _LONGEST_S) * _NS)
