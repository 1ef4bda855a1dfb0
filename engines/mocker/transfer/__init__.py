"""Transfer of KV blocks between prefill and decode engines, in simulated time."""

from .engine_sides import receive_blocks, send_blocks
from .exchange import HandoffExchange
from .protocol import (
    ActionKind,
    ActionOutcome,
    EndReason,
    Handoff,
    HandoffAction,
    HandoffFact,
    HandoffOrder,
    handoff_order,
)
from .session import Role, Seat
from .sides import HandoffKey, TransferTiming, handoff_delay_ms

__all__ = [
    "ActionKind",
    "ActionOutcome",
    "EndReason",
    "Handoff",
    "HandoffAction",
    "HandoffExchange",
    "HandoffFact",
    "HandoffKey",
    "HandoffOrder",
    "Role",
    "Seat",
    "TransferTiming",
    "handoff_delay_ms",
    "handoff_order",
    "receive_blocks",
    "send_blocks",
]
