"""Blocks and prefill tokens in flight on each worker, shared between routers."""

from .blocks import ActiveBlocks, HeldBlocks
from .field import Load, LoadField, Weights
from .peers import BookingsPart, BookingsRequest, ShareLimits, shared_bookings
from .ranks import Column, MissingDuration, PotentialLoad, PromptLoad, RankLoads
from .replicas import (
    ACTIVE_SEQUENCES_TOPIC,
    BATCH_EVENTS,
    ActiveSequenceEvent,
    AddRequest,
    Applied,
    Duration,
    Free,
    MarkPrefillCompleted,
    PrefillLoadHint,
    ReplicaSync,
    SequenceEventData,
    apply_events,
)
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
    "SequenceEventData",
    "SequenceLoad",
    "ShareLimits",
    "Weights",
    "apply_events",
    "shared_bookings",
    "tracking_hashes",
]
