"""What goes wrong between a prefill worker and a decode worker, one class for each reason.

::

    Unavailable
    └── PrefillNotActivated       there is no prefill worker now, and the request may not go without
    ResourceExhausted             every prefill worker is busy: see `backpressure`
    PrefillError                  the prefill was dispatched, or was to be, and failed
    ├── NoDisaggregatedParams     it ended well, but without parameters for decode
    └── TopologyError             it is not known which decode workers its blocks can reach

Once a prefill was sent its error goes to the caller; decode does not compute the prompt in its place.

Source: dynamo lib/llm/src/kv_router/prefill_router/types.rs, PrefillError. Other than there an error is to the caller
what its cause is (may it be sent again, which status), and topology errors have a class.
"""

from __future__ import annotations

from pipeline import PenstockError, ResourceExhausted, Unavailable
from pipeline.errors import Facts

from ..kv import QueueRejected
from ..pool import AllBusy


class PrefillNotActivated(Unavailable):
    """There is no prefill worker, and requests are not to be served without one."""

    def __init__(
        self, message: str = "Prefill router not yet activated", *, cause: BaseException | None = None
    ) -> None:
        super().__init__(message, cause=cause)


class PrefillError(PenstockError):
    """The prefill failed; what it met is the cause, and decides what the error may lead to."""

    @property
    def facts(self) -> Facts:
        cause = self.__cause__
        return cause.facts if isinstance(cause, PenstockError) else super().facts


class NoDisaggregatedParams(PrefillError):
    """The prefill worker's answer has no parameters to decode with."""


class TopologyError(PrefillError):
    """The constraint a prefill worker's place puts on decode cannot be derived."""


def backpressure(refusal: ResourceExhausted) -> ResourceExhausted:
    """Return the error of a request whose prefill no worker has room for, with the figures of the full queue."""
    reason, queued, limit = _figures(refusal)
    message = (
        f"router backpressure during prefill resolve: {reason} "
        f"(queued_isl_tokens={queued}, max_queued_isl_tokens={limit})"
    )
    if isinstance(refusal, AllBusy):
        return AllBusy(message, retry_after_s=refusal.retry_after_s, status=refusal.status, cause=refusal)
    return ResourceExhausted(message, cause=refusal)


def _figures(refusal: ResourceExhausted) -> tuple[str, int | None, int | None]:
    """Return what is full, how many prompt tokens wait and how many may, if these are limited."""
    if isinstance(refusal, QueueRejected) and refusal.limit_kind == "raw_isl_tokens":
        return refusal.limit_kind, refusal.current, refusal.limit
    return refusal.message, None, None


def reservation_error(error: BaseException) -> PenstockError:
    """Return the error for a caller whose prefill got no worker: backpressure if workers or queue are full."""
    return backpressure(error) if isinstance(error, ResourceExhausted) else routing_error(error)


def routing_error(error: BaseException) -> PenstockError:
    """Return the error for a caller whose prefill could not be sent.

    A refusal by the router itself, for its queue or every worker is full, is backpressure: no worker had the request.
    """
    if isinstance(error, QueueRejected | AllBusy):
        return backpressure(error)
    return PrefillError(f"failed to route to prefill worker: {error}", cause=error)
