"""Attach a RequestTracker on the running event loop's clock to a request.

The tracker itself is data and knows no event loop. Its phase barrier is an anyio semaphore, which any task may release
(a lock only its owner), because the permit passes to the task that prefills.

`metrics_item` and `metrics_of`, which no program uses yet, carry metrics records as items of a stream: one event with
the record as its one comment.

Source: dynamo lib/llm/src/preprocessor.rs, LLMMetricAnnotation::{from_annotation, to_annotation}.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio

from ..annotated import Annotated
from ..context import AnyContext
from ..errors import InvalidArgument
from ..loop import clock
from ..protocols import RequestTracker
from ..protocols.timing import LLM_METRICS_EVENT, METRIC_EVENTS, LLMMetricAnnotation
from ..wire import from_json, to_json

TRACKER = "request_tracker"
"""Registry entry where a request's tracker is left, for those above the stage that makes it."""


def track_request(wall_ms: Callable[[], int]) -> RequestTracker:
    """Return a tracker whose request is received now; `wall_ms` gives milliseconds since the epoch."""
    return RequestTracker(clock(), wall_ms, partial(anyio.Semaphore, 1, max_value=1, fast_acquire=True))


def tracker_of(request: AnyContext) -> RequestTracker | None:
    """Return the tracker a stage has left in the request's registry; None if there is none."""
    return request.registry.get_optional(TRACKER, RequestTracker)


def metrics_item(metrics: LLMMetricAnnotation, event: str = LLM_METRICS_EVENT) -> Annotated[Any]:
    """Return the item that carries these metrics."""
    return Annotated[Any](event=event, comment=[to_json(metrics).decode()])


def metrics_of(item: Annotated[Any]) -> LLMMetricAnnotation | None:
    """Return the metrics an item carries, None if its event is another.

    Raise InvalidArgument for a metrics event that does not have exactly one comment with such a record.
    """
    if item.event not in METRIC_EVENTS:
        return None
    comments = item.comment or []
    if len(comments) != 1:
        raise InvalidArgument(f"a metrics event has one comment, found {len(comments)}", field="comment")
    return from_json(comments[0], LLMMetricAnnotation)
