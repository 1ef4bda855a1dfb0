"""Blocks and prefill tokens in flight on each worker, shared between routers."""

from .blocks import ActiveBlocks, HeldBlocks
from .booking_events import (
    ACTIVE_SEQUENCES_TOPIC,
    BOOKED,
    COMPUTED,
    ENDED,
    ActiveSequenceEvent,
    AddRequest,
    Duration,
    Free,
    MarkPrefillCompleted,
    PrefillLoadHint,
    RouterSteps,
    SequenceEventData,
)
from .field import Load, LoadField, Weights
from .peers import BookingsPart, BookingsRequest, ShareLimits, shared_bookings
from .ranks import Column, MissingDuration, PotentialLoad, PromptLoad, RankLoads
from .replicas import BATCH_EVENTS, Applied, ReplicaSync, apply_events
from .sequences import (
    ACTIVE_REQUEST_EXPIRY,
    EXPIRY_S,
    SWEEP_EVERY_S,
    ActiveRequest,
    ActiveSequences,
    SequenceLoad,
    tracking_hashes,
)

__all__ = [
    "ACTIVE_REQUEST_EXPIRY",
    "ACTIVE_SEQUENCES_TOPIC",
    "BATCH_EVENTS",
    "BOOKED",
    "COMPUTED",
    "ENDED",
    "EXPIRY_S",
    "SWEEP_EVERY_S",
    "ActiveBlocks",
    "ActiveRequest",
    "ActiveSequenceEvent",
    "ActiveSequences",
    "AddRequest",
    "Applied",
    "BookingsPart",
    "BookingsRequest",
    "Column",
    "Duration",
    "Free",
    "HeldBlocks",
    "Load",
    "LoadField",
    "MarkPrefillCompleted",
    "MissingDuration",
    "PotentialLoad",
    "PrefillLoadHint",
    "PromptLoad",
    "RankLoads",
    "ReplicaSync",
    "RouterSteps",
    "SequenceEventData",
    "SequenceLoad",
    "ShareLimits",
    "Weights",
    "apply_events",
    "shared_bookings",
    "tracking_hashes",
]
