"""What goes wrong between a prefill worker and a decode worker, one class for each reason.

::

    Unavailable
    └── PrefillNotActivated       nobody prefills now, and the request may not go without
    ResourceExhausted             every prefill worker is busy: see `backpressure`
    PrefillError                  the prefill was dispatched, or was to be, and failed
    ├── NoDisaggregatedParams     it ended well, but hands nothing over
    └── TopologyError             it is not known which decode workers its blocks can reach

After a prefill was dispatched there is no falling back on an aggregated answer: its error goes to the caller.

Source: dynamo lib/llm/src/kv_router/prefill_router/types.rs, PrefillError. Other than there an error is to the caller
what its cause is (may it be sent again, which status), and topology errors have a class.
"""

from __future__ import annotations

from pipeline import CannotConnect, PenstockError, ResourceExhausted, Unavailable
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
    """The prefill worker answered and did not say how to go on from there."""


class TopologyError(PrefillError):
    """The constraint a prefill worker's place puts on decode cannot be derived."""


def backpressure(refusal: ResourceExhausted) -> ResourceExhausted:
    """The error of a request whose prefill nobody can take now, with the figures of the queue that is full."""
    reason, queued, limit = _figures(refusal)
    message = (
        f"router backpressure during prefill resolve: {reason} "
        f"(queued_isl_tokens={queued}, max_queued_isl_tokens={limit})"
    )
    if isinstance(refusal, AllBusy):
        return AllBusy(message, retry_after_s=refusal.retry_after_s, status=refusal.status, cause=refusal)
    return ResourceExhausted(message, cause=refusal)


def _figures(refusal: ResourceExhausted) -> tuple[str, int | None, int | None]:
    """What is full; how many prompt tokens wait and may wait, if that is what is limited."""
    if isinstance(refusal, QueueRejected) and refusal.limit_kind == "raw_isl_tokens":
        return refusal.limit_kind, refusal.current, refusal.limit
    return refusal.message, None, None


def routing_error(error: BaseException, *, was_chosen: bool = False) -> PenstockError:
    """What the caller gets where the prefill could not be handed to a worker.

    Where a router refused it, because its queue or every worker is full, that is backpressure: nobody was asked.
    `was_chosen`: the worker was not the caller's choice but ours, and may have gone while the prefill waited in line:
    then another one may have it.
    """
    if isinstance(error, QueueRejected | AllBusy):
        return backpressure(error)
    if was_chosen and isinstance(error, Unavailable):
        error = CannotConnect(f"it was lost before it had the request: {error}", cause=error)
    return PrefillError(f"failed to route to prefill worker: {error}", cause=error)
