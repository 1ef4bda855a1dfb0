"""CallMeter: the component metrics of one instance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio.lowlevel import current_token

from pipeline.protocols import worker_label

from .names import Instance

if TYPE_CHECKING:
    from pipeline.metrics import Metrics


class CallMeter:
    """Counts what an instance takes, in the `component` family. Made on the loop the calls end on.

    Source: dynamo lib/runtime/src/pipeline/network/ingress, WorkHandlerMetrics.
    """

    def __init__(self, metrics: Metrics, instance: Instance) -> None:
        self._metrics = metrics
        # A dropped stream ends its call outside of any task, where anyio itself does not find the clock.
        self._clock = current_token().backend_class.current_time
        self._labels = {
            "dynamo_namespace": instance.namespace,
            "dynamo_component": instance.component,
            "dynamo_endpoint": instance.endpoint,
            "worker_id": worker_label(instance.instance_id),
        }

    def begun(self) -> float:
        """A call was taken; the result goes to `ended`."""
        self._metrics.add("requests_total", 1, **self._labels)
        self._metrics.add("inflight_requests", 1, **self._labels)
        return self._clock()

    def ended(self, begun_s: float, *, cancelled: bool) -> None:
        """The call is over, by its caller's wish if `cancelled`."""
        self._metrics.add("inflight_requests", -1, **self._labels)
        self._metrics.record("request_duration_seconds", self._clock() - begun_s, **self._labels)
        if cancelled:
            self._metrics.add("cancellation_total", 1, **self._labels)

    def failed(self) -> None:
        """The engine failed, before or in its answer."""
        self._metrics.add("errors_total", 1, **self._labels, error_type="generate")
