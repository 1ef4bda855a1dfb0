"""What routers of the same workers tell each other about their requests, and how one takes it in.

Source: dynamo lib/kv-router/src/protocols.rs, ActiveSequenceEvent, and sequences/replica_sync.rs. The wire form is the
same; output blocks are not told. Other than there a router's bookings are its own: the same request id booked here, or
told by a third router, is another booking. A request that is prefilled by one pool and decoded by another, or sent
again through another router, meets itself nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.protocols.field_rules import U32_MAX, InvalidRecord

from ..errors import BookingError
from ..types import WorkerRank
from .sequences import ActiveSequences, SequenceLoad

ACTIVE_SEQUENCES_TOPIC = "active_sequences_events"
"""Topic of these events on the event plane."""

_U64_MAX = 2**64 - 1
_NS = 1_000_000_000


@frozen
class AddRequest:
    """A request was booked. The hint is there only if its prompt counts: tokens, and seconds if they are modelled."""

    token_sequence: Sequence[int] | None = None
    track_prefill_tokens: bool = True
    expected_output_tokens: int | None = None
    prefill_tokens: int | None = None
    prefill_duration_s: float | None = None


@frozen
class MarkPrefillCompleted:
    """Its prompt is computed."""


@frozen
class Free:
    """It is over."""


SequenceEventData: TypeAlias = AddRequest | MarkPrefillCompleted | Free


@frozen
class ActiveSequenceEvent:
    """One step in the life of a request, told by the router it is from. `worker` counts for `AddRequest` only."""

    request_id: str
    worker: WorkerRank
    data: SequenceEventData
    router_id: int
    lora_name: str | None = None

    @classmethod
    def added(
        cls, request_id: str, worker: WorkerRank, load: SequenceLoad, router_id: int, lora_name: str | None = None
    ) -> ActiveSequenceEvent:
        """The event that tells of a booking."""
        data = AddRequest(
            token_sequence=load.hashes or None,
            track_prefill_tokens=load.prefill_tokens > 0,
            prefill_tokens=load.prefill_tokens or None,
            prefill_duration_s=load.prefill_duration_s,
        )
        return cls(request_id, worker, data, router_id, lora_name)

    def to_wire(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "worker": self.worker._asdict(),
            "data": _data_to_wire(self.data),
            "router_id": self.router_id,
            "lora_name": self.lora_name,
        }

    @classmethod
    def from_wire(cls, value: Any) -> ActiveSequenceEvent:
        """Raises InvalidRecord, naming the place, for anything that is no event."""
        event = _object(value, "")
        worker, lora_name = _object(event.get("worker"), "worker"), event.get("lora_name")
        if lora_name is not None and not isinstance(lora_name, str):
            raise InvalidRecord("expected a string", "lora_name")
        if not isinstance(event.get("request_id"), str):
            raise InvalidRecord("expected a string", "request_id")
        rank = WorkerRank(
            _integer(worker.get("worker_id"), _U64_MAX, "worker.worker_id"),
            _integer(worker.get("dp_rank", 0), U32_MAX, "worker.dp_rank"),
        )
        router_id = _integer(event.get("router_id"), _U64_MAX, "router_id")
        return cls(event["request_id"], rank, _data_from_wire(event.get("data")), router_id, lora_name)


Heard: TypeAlias = tuple[float, ActiveSequenceEvent]
"""An event and when it was received."""


@frozen
class Applied:
    """What a batch changed: whether loads must be published, and whether waiting requests may go on."""

    loads_changed: bool
    made_room: bool
    dropped: int


def apply_events(sequences: ActiveSequences, heard: Sequence[Heard], *, registered_only: bool = False) -> Applied:
    """Takes one batch of other routers' events in; an added prompt begins when it was heard of.

    A booking on an unknown worker opens an account for it, or is dropped and counted with `registered_only`. One that
    is told again replaces what was told before: its router would not book it anew if it were not over. The end of a
    request we do not know is nothing.
    """
    loads_changed = made_room = False
    dropped = 0
    for received_s, event in heard:
        booked_as, data = _booked_as(event), event.data
        if isinstance(data, MarkPrefillCompleted):
            booking = sequences.booking(booked_as)
            made_room |= booking is not None and booking.mark_prefill_completed(received_s)
            continue
        if sequences.free(booked_as, received_s):
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
    tokens = data.prefill_tokens or 0 if data.track_prefill_tokens else 0
    return SequenceLoad(data.token_sequence or (), tokens, data.prefill_duration_s)


def _data_to_wire(data: SequenceEventData) -> Any:
    if not isinstance(data, AddRequest):
        return type(data).__name__
    hint = None
    if data.prefill_tokens is not None:
        duration = None if data.prefill_duration_s is None else round(data.prefill_duration_s * _NS)
        expected = None if duration is None else {"secs": duration // _NS, "nanos": duration % _NS}
        hint = {"initial_effective_prefill_tokens": data.prefill_tokens, "expected_prefill_duration": expected}
    added = {
        "token_sequence": None if data.token_sequence is None else list(data.token_sequence),
        "track_prefill_tokens": data.track_prefill_tokens,
        "expected_output_tokens": data.expected_output_tokens,
        "prefill_load_hint": hint,
    }
    return {"AddRequest": added}


def _data_from_wire(value: Any) -> SequenceEventData:
    if value == "Free":
        return Free()
    if value == "MarkPrefillCompleted":
        return MarkPrefillCompleted()
    if not isinstance(value, dict) or value.keys() != {"AddRequest"}:
        raise InvalidRecord("expected Free, MarkPrefillCompleted, or an object with the one key AddRequest", "data")
    place = "data.AddRequest"
    added = _object(value["AddRequest"], place)
    sequence, expected = added.get("token_sequence"), added.get("expected_output_tokens")
    if sequence is not None and not isinstance(sequence, list):
        raise InvalidRecord("expected a list", f"{place}.token_sequence")
    tracked = added.get("track_prefill_tokens", True)
    if not isinstance(tracked, bool):
        raise InvalidRecord("expected true or false", f"{place}.track_prefill_tokens")
    tokens, duration_s = _hint_from_wire(added.get("prefill_load_hint"), f"{place}.prefill_load_hint")
    return AddRequest(
        None if sequence is None else [_integer(h, _U64_MAX, f"{place}.token_sequence") for h in sequence],
        tracked,
        None if expected is None else _integer(expected, U32_MAX, f"{place}.expected_output_tokens"),
        tokens,
        duration_s,
    )


def _hint_from_wire(value: Any, place: str) -> tuple[int | None, float | None]:
    if value is None:
        return None, None
    hint = _object(value, place)
    tokens = _integer(
        hint.get("initial_effective_prefill_tokens"), _U64_MAX, f"{place}.initial_effective_prefill_tokens"
    )
    if hint.get("expected_prefill_duration") is None:
        return tokens, None
    place = f"{place}.expected_prefill_duration"
    duration = _object(hint["expected_prefill_duration"], place)
    secs = _integer(duration.get("secs"), _U64_MAX, f"{place}.secs")
    return tokens, secs + _integer(duration.get("nanos"), _NS - 1, f"{place}.nanos") / _NS


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRecord("expected an object", place)
    return value


def _integer(value: Any, high: int, place: str) -> int:
    if type(value) is not int or not 0 <= value <= high:
        raise InvalidRecord(f"expected an integer from 0 to {high}", place)
    return value
