"""Data parallel ranks: which one a request asks for, and whether this worker has it.

Source: dynamo components/src/dynamo/common, forced_dp_rank and validate_global_dp_rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from operator import index
from typing import Any

from pipeline import InvalidArgument
from pipeline.protocols import PreprocessedRequest

_log = logging.getLogger(__name__)


def forced_dp_rank(request: PreprocessedRequest | Mapping[str, Any]) -> int | None:
    """The rank that the request's routing names, also as digits; None if it names none.

    The request may be given as plain values. Raises InvalidArgument for a text that is no number.
    """
    routing: Any = request.get("routing") if isinstance(request, Mapping) else request.routing
    rank = routing.get("dp_rank") if isinstance(routing, Mapping) else getattr(routing, "dp_rank", None)
    if rank is None:
        return None
    try:
        return int(rank) if isinstance(rank, str) else index(rank)
    except (TypeError, ValueError):
        raise InvalidArgument(f"expected a rank, got {rank!r}", field="routing.dp_rank") from None


def own_dp_rank(rank: int | None, start: int, size: int) -> int | None:
    """The rank if it is one of the `size` ranks from `start`; None, with a warning, if it is another worker's.

    Where there is only one rank the question does not arise: None.
    """
    if rank is None or size <= 1:
        return None
    if start <= rank < start + size:
        return rank
    _log.warning("the request asks for rank %d, this worker has [%d, %d)", rank, start, start + size)
    return None
