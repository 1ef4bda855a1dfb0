"""Why no worker of a pool can take a request: one error for each reason.

::

    ResourceExhausted
    └── AllBusy             there are instances, and every one that may take the request is busy
    Unavailable             there is no instance at all, or none that this router admits
    └── AllCoolingDown      there are instances, and every one was at fault a moment ago, or cannot be reached

For an instance that the request names: CannotConnect if it is not there, WorkerOverloaded if it is busy.
"""

from __future__ import annotations

from attrs import evolve

from pipeline import ResourceExhausted, Unavailable
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
    """Every worker was at fault a moment ago, or cannot be reached.

    retry_after_s: seconds after which the first may take requests again
    """

    type_name = "AllExcluded"

    def __init__(
        self, message: str = "", *, retry_after_s: float | None = None, cause: BaseException | None = None
    ) -> None:
        super().__init__(message, cause=cause)
        self.retry_after_s = retry_after_s
