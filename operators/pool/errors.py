"""Why no worker of a pool can take a request: one error for each reason.

::

    ResourceExhausted
    └── AllBusy             there are instances, and every one that may take the request is busy
    Unavailable             there is no instance at all, or none that this router admits
    └── AllCoolingDown      there are instances, and every one was at fault a moment ago

For an instance that the request names: CannotConnect if it is not there, WorkerOverloaded if it is busy.
"""

from __future__ import annotations

from typing import Protocol

from attrs import evolve

from pipeline import PenstockError, ResourceExhausted, Unavailable
from pipeline.errors import OVERLOADED, Facts


class AllBusy(ResourceExhausted):
    """Every eligible worker is busy.

    retry_after_s: seconds after which to try again; None if not known
    status: the HTTP status of the refusal
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


class AllCoolingDown(Unavailable):
    """Every worker was at fault a moment ago; after `retry_after_s` seconds the first may take requests again."""

    type_name = "AllExcluded"

    def __init__(
        self, message: str = "", *, retry_after_s: float | None = None, cause: BaseException | None = None
    ) -> None:
        super().__init__(message, cause=cause)
        self.retry_after_s = retry_after_s


class Gate(Protocol):
    """A pool of workers that may refuse a request before any work is done for it."""

    def refusal(self) -> PenstockError | None:
        """Return the error a request would meet now; None if it would be sent."""
        ...


ABSENCES = {
    "none_yet": "none has appeared yet",
    "all_left": "all there were have left",
    "closed": "its discovery was closed",
    None: "none of those that are there is admitted",
}


def no_instance(name: str, absence: str | None) -> Unavailable:
    """Return the error for a pool without an instance."""
    return Unavailable(f"no instances found for endpoint {name}: {ABSENCES[absence]}")


def all_cooling_down(name: str, count: int, retry_after_s: float | None) -> AllCoolingDown:
    """Return the error for a pool in which every instance is cooling down."""
    return AllCoolingDown(
        f"no instances found for endpoint {name} that may be asked: all {count} failed a moment ago",
        retry_after_s=retry_after_s,
    )


def all_busy(name: str, busy: int, cooling_down: int, retry_after_s: float | None) -> AllBusy:
    """Return the error for a pool in which every instance that is not cooling down is busy."""
    others = f", {cooling_down} more failed a moment ago" if cooling_down else ""
    return AllBusy(f"all workers are busy: {busy} of endpoint {name}{others}", retry_after_s=retry_after_s)
