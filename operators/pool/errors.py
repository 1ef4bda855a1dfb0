"""Why nobody in a pool can take a request: one error for each reason, and the decision which it is.

::

    ResourceExhausted
    └── AllBusy             there are instances, and every one that may be asked is busy
    Unavailable             there is no instance at all, or none that this router admits
    └── AllExcluded         there are instances, and every one was at fault a moment ago

An instance that was asked for and is not there is CannotConnect; one that is there and busy, WorkerOverloaded.
"""

from __future__ import annotations

from typing import Protocol

from attrs import evolve

from pipeline import PenstockError, ResourceExhausted, Unavailable
from pipeline.errors import OVERLOADED, Facts


class AllBusy(ResourceExhausted):
    """Every eligible worker is busy.

    Trying again makes sense after `retry_after_s`, if that is known; `status` is the HTTP status of the refusal.
    """

    def __init__(
        self,
        message: str = "",
        *,
        retry_after_s: float | None = None,
        status: int = OVERLOADED,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message, cause=cause)
        self.retry_after_s, self.status = retry_after_s, status

    @property
    def facts(self) -> Facts:
        return evolve(super().facts, status=self.status)


class AllExcluded(Unavailable):
    """Every worker was at fault a moment ago; the first is asked again after `retry_after_s`."""

    def __init__(
        self, message: str = "", *, retry_after_s: float | None = None, cause: BaseException | None = None
    ) -> None:
        super().__init__(message, cause=cause)
        self.retry_after_s = retry_after_s


class Gate(Protocol):
    """What can say beforehand that a request would be refused."""

    def refusal(self) -> PenstockError | None:
        """The error a request would meet now; None if it would be sent."""
        ...


ABSENCES = {
    "none_yet": "none has appeared yet",
    "all_left": "all there were have left",
    "closed": "its discovery was closed",
    None: "none of those that are there is admitted",
}


def nobody(name: str, absence: str | None) -> Unavailable:
    """The error where there is no instance to begin with."""
    return Unavailable(f"no instances found for endpoint {name}: {ABSENCES[absence]}")


def all_excluded(name: str, count: int, retry_after_s: float | None) -> AllExcluded:
    """The error where every instance is left out."""
    return AllExcluded(
        f"no instances found for endpoint {name} that may be asked: all {count} failed a moment ago",
        retry_after_s=retry_after_s,
    )


def all_busy(name: str, busy: int, excluded: int, retry_after_s: float | None) -> AllBusy:
    """The error where every instance that is not left out is busy."""
    others = f", {excluded} more failed a moment ago" if excluded else ""
    return AllBusy(f"all workers are busy: {busy} of endpoint {name}{others}", retry_after_s=retry_after_s)
