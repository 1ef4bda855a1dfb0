"""Rejection: refuses a request early when every worker that could take it is busy."""

from __future__ import annotations

import os
from math import isfinite
from typing import Any, Protocol, TypeVar

from pipeline import AsyncEngine, Context, InvalidArgument, Operator, PenstockError, ResourceExhausted, ResponseStream
from pipeline.errors import OVERLOADED
from pipeline.settings import Variable, whole

from .errors import AllBusy

T = TypeVar("T")
U = TypeVar("U")

OVERLOAD_STATUS = Variable(
    "DYN_HTTP_OVERLOAD_STATUS_CODE", OVERLOADED, "HTTP status of a refusal because of overload.", whole(200, 999)
)
RETRY_AFTER_S = 1.0


class Gate(Protocol):
    """A pool of workers that may refuse a request before any work is done for it."""

    def refusal(self) -> PenstockError | None:
        """Return the error a request would meet now; None if it would be sent."""
        ...


class Rejection(Operator[Any, Any, Any, Any]):
    """Refuses a request if all workers behind one of its gates are busy; a gate is a PushRouter, or another `Gate`.

        request ──► AllBusy, or unchanged ──►
        stream  ◄── unchanged             ◄──

    Stands at the very top: a refusal is then cheap, since nothing has been tokenized, booked or retried. Gates are
    given, not found, because they belong to stages below. A request goes on if it was stopped before, and if a gate
    refuses it for another reason, as for want of an instance: the stage below then raises that.

    Raises AllBusy with the reason. The stream is the next stage's own, at no cost.

    gates: the pools
    retry_after_s: seconds after which a client should try again, unless the gate's refusal has its own
    status: the HTTP status of a refusal; by default that of the process's environment, else 529

    Source: dynamo lib/runtime/src/pipeline/network/egress/push_router.rs, the busy check before dispatch. Other than
    there, it comes before the work of the front end, and a refusal carries when to try again.
    """

    declares = (T, U, T, U)  # whatever comes is handed on
    adds_time = False

    def __init__(self, *gates: Gate, retry_after_s: float = RETRY_AFTER_S, status: int | None = None) -> None:
        if not isfinite(retry_after_s) or retry_after_s < 0:
            raise InvalidArgument(f"must be finite and not negative, got {retry_after_s}", field="retry_after_s")
        if status is not None and not 200 <= status <= 999:
            raise InvalidArgument(f"must be an HTTP status from 200 to 999, got {status}", field="status")
        self._gates = gates
        self._retry_after_s = retry_after_s
        self._status = OVERLOAD_STATUS.of(os.environ) if status is None else status

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        if not request.is_stopped:
            for gate in self._gates:
                refused = gate.refusal()
                if isinstance(refused, ResourceExhausted):
                    raise self._rejected(refused)
        return await next.generate(request)

    def _rejected(self, refused: ResourceExhausted) -> AllBusy:
        known_s = getattr(refused, "retry_after_s", None)
        retry_after_s = self._retry_after_s if known_s is None else known_s
        return AllBusy(refused.message, retry_after_s=retry_after_s, status=self._status)
