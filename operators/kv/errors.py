"""The errors of the KV router.

Selection itself raises errors of the core: Unavailable where no worker can be reached, ResourceExhausted where all
are overloaded, WorkerOverloaded and InvalidArgument for a request that names its worker.

Source: dynamo lib/kv-router/src/scheduling/types.rs, KvSchedulerError, and sequences/multi_worker.rs, SequenceError.
"""

from __future__ import annotations

from typing import Literal

from pipeline import PenstockError, ResourceExhausted
from pipeline.errors import ExceededLimit

LimitKind = Literal["requests", "raw_isl_tokens", "cached_tokens"]


class BookingError(PenstockError):
    """The account of active sequences and its user disagree about a request."""


class DuplicateRequest(BookingError):
    """This request id is booked already, on this worker or another."""


class RequestNotFound(BookingError):
    """No request of this id is booked."""


class WorkerNotFound(BookingError):
    """The worker to book on is not there, or not any more."""


class QueueRejected(ResourceExhausted):
    """A queue is full: `current` of `limit` are used by the requests of this class.

    Only the message and the exceeded limit, `router_queue_<kind>`, cross a process; the other facts are for the caller.
    """

    def __init__(
        self,
        message: str = "",
        *,
        policy_class: str = "",
        limit_kind: LimitKind = "requests",
        current: int = 0,
        limit: int = 0,
        exceeded: ExceededLimit | None = None,
        cause: BaseException | None = None,
    ) -> None:
        text = f"the queue {policy_class!r} is full: {limit_kind} at {current} of {limit}"
        exceeded = exceeded or ExceededLimit(f"router_queue_{limit_kind}", current, limit)
        super().__init__(message or text, exceeded=exceeded, cause=cause)
        self.policy_class = policy_class
        self.limit_kind: LimitKind = limit_kind
        self.current, self.limit = current, limit
