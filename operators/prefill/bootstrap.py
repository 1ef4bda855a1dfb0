"""Where decode meets prefill: the rendezvous a router chooses, or one that a prefill worker has told.

Source: dynamo lib/llm/src/kv_router/prefill_router/execution.rs, generate_bootstrap_room.
"""

from __future__ import annotations

from random import Random
from typing import Any
from uuid import UUID

from pipeline.protocols import BootstrapInfo
from pipeline.protocols.runtime_config import DisaggregatedEndpoint, ModelRuntimeConfig

ROOM_BITS = 63
ROOM_MAX = 2**ROOM_BITS - 1
_PORT_MAX = 2**16 - 1
_U64_MAX = 2**64 - 1


def bootstrap_room(dp_rank: int | None, dp_size: int | None, draw: int) -> int:
    """The room for a number drawn from 0 to ROOM_MAX.

    Where rank and size are known, room modulo size is the rank: engines find the rank that way. Never above ROOM_MAX.
    """
    if dp_rank is None or not dp_size:
        return draw
    rooms_of_rank = (ROOM_MAX - dp_rank) // dp_size + 1
    room: int = draw % rooms_of_rank * dp_size + dp_rank
    return room


def bootstrap_endpoint(config: ModelRuntimeConfig | None) -> tuple[str, int] | None:
    """Host and port where that worker waits for decode; None if it does not say both."""
    endpoint = config.disaggregated_endpoint if config is not None else None
    if not isinstance(endpoint, DisaggregatedEndpoint) or not endpoint.bootstrap_host:
        return None
    return None if endpoint.bootstrap_port is None else (endpoint.bootstrap_host, endpoint.bootstrap_port)


def new_meeting(host: str, port: int, dp_rank: int | None, dp_size: int | None, rng: Random) -> BootstrapInfo:
    """A meeting of its own for one request."""
    room = bootstrap_room(dp_rank, dp_size, rng.getrandbits(ROOM_BITS))
    return BootstrapInfo(host, port, room, UUID(int=rng.getrandbits(128), version=4))


def told_meeting(params: Any) -> BootstrapInfo | None:
    """The meeting that a prefill worker's parameters name, if they name all of it."""
    if not isinstance(params, dict):
        return None
    found: list[Any] = [params.get(f"bootstrap_{part}") for part in ("host", "port", "room")]
    host, port, room = found
    if isinstance(host, str) and is_up_to(port, _PORT_MAX) and is_up_to(room, _U64_MAX):
        return BootstrapInfo(host, port, room)
    return None


def is_up_to(value: Any, limit: int) -> bool:
    """Whether it is a whole number from 0 to the limit."""
    return type(value) is int and 0 <= value <= limit
