"""Transfer of KV blocks between prefill and decode engines, in simulated time."""

from .exchange import Receiver, Sender, TransferExchange, transferred
from .protocol import TransferKey, TransferOrder, TransferTiming, transfer_delay_ms, transfer_order
from .session import SessionEndpoint, TransferRole

__all__ = [
    "Receiver",
    "Sender",
    "SessionEndpoint",
    "TransferExchange",
    "TransferKey",
    "TransferOrder",
    "TransferRole",
    "TransferTiming",
    "transfer_delay_ms",
    "transfer_order",
    "transferred",
]
