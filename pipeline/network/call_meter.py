"""CallMeter: the component metrics of one instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anyio.lowlevel import current_token
from attrs import define

from pipeline.protocols import worker_label

from .names import Instance

if TYPE_CHECKING:
    from pipeline.metrics import Metrics

TOKEN_BYTES = 4
"""What a token id counts for: an unsigned 32 bit integer."""


@define(eq=False, slots=True)
class MeteredCall:
    """One call that was taken: when, by the loop's clock, and how many tokens have come back."""

    begun_s: float
    tokens: int = 0


class CallMeter:
    """Counts what an instance takes, in the `component` family. Made on the loop the calls end on.

    Bytes are those of token ids, 4 for each: the embedded runtime hands requests and items over as they are, so they
    have no size on a wire. Payloads without token ids have none.

    Source: dynamo lib/runtime/src/pipeline/network/ingress, WorkHandlerMetrics.
    """

    def __init__(self, metrics: Metrics, instance: Instance) -> None:
        # A dropped stream ends its call outside of any task, where anyio itself does not find the clock.
        self._clock = current_token().backend_class.current_time
        labels = {
            "dynamo_namespace": instance.namespace,
            "dynamo_component": instance.component,
            "dynamo_endpoint": instance.endpoint,
            "worker_id": worker_label(instance.instance_id),
        }
        self._requests = metrics.recorder("requests_total", **labels)
        self._inflight = metrics.recorder("inflight_requests", **labels)
        self._duration = metrics.recorder("request_duration_seconds", **labels)
        self._cancellations = metrics.recorder("cancellation_total", **labels)
        self._errors = metrics.recorder("errors_total", **labels, error_type="generate")
        self._request_bytes = metrics.recorder("request_bytes_total", **labels)
        self._response_bytes = metrics.recorder("response_bytes_total", **labels)

    def begun(self, payload: Any) -> MeteredCall:
        """A call with this payload was taken; the result goes to `ended`."""
        self._requests(1)
        self._inflight(1)
        if token_ids := getattr(payload, "token_ids", None):
            self._request_bytes(TOKEN_BYTES * len(token_ids))
        return MeteredCall(self._clock())

    def ended(self, call: MeteredCall, *, cancelled: bool) -> None:
        """The call is over, by its caller's wish if `cancelled`."""
        self._inflight(-1)
        self._duration(self._clock() - call.begun_s)
        if call.tokens:
            self._response_bytes(TOKEN_BYTES * call.tokens)
        if cancelled:
            self._cancellations(1)

    def failed(self) -> None:
        """The engine failed, before or in its answer."""
        self._errors(1)
