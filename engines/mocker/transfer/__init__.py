"""Transfer of KV blocks between prefill and decode engines, in simulated time."""

from .engine_sides import receive_blocks, send_blocks
from .exchange import TransferExchange
from .protocol import (
    ActionKind,
    ActionOutcome,
    EndReason,
    Transfer,
    TransferAction,
    TransferFact,
    TransferOrder,
    transfer_order,
)
from .session import SessionEndpoint, TransferRole
from .sides import TransferKey, TransferTiming, transfer_delay_ms

__all__ = [
    "ActionKind",
    "ActionOutcome",
    "EndReason",
    "SessionEndpoint",
    "Transfer",
    "TransferAction",
    "TransferExchange",
    "TransferFact",
    "TransferKey",
    "TransferOrder",
    "TransferRole",
    "TransferTiming",
    "receive_blocks",
    "send_blocks",
    "transfer_delay_ms",
    "transfer_order",
]
