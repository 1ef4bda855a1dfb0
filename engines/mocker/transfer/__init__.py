"""Transfer of KV blocks between prefill and decode engines, in simulated time."""

from .across import DestinationTurn, PeerDestination, TransferDoor
from .exchange import TransferExchange
from .protocol import TransferKey, TransferOrder, TransferTiming, transfer_delay_ms, transfer_order
from .session import DestinationEndpoint, SessionEndpoint, TransferRole
from .sides import Receiver, Sender, transferred

__all__ = [
    "DestinationEndpoint",
    "DestinationTurn",
    "PeerDestination",
    "Receiver",
    "Sender",
    "SessionEndpoint",
    "TransferDoor",
    "TransferExchange",
    "TransferKey",
    "TransferOrder",
    "TransferRole",
    "TransferTiming",
    "transfer_delay_ms",
    "transfer_order",
    "transferred",
]
