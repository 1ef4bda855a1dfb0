"""Metrics records as items of a stream: one event with the record as its one comment.

Source: dynamo lib/llm/src/preprocessor.rs, LLMMetricAnnotation::{from_annotation, to_annotation}.
"""

from __future__ import annotations

from typing import Any

from .annotated import Annotated
from .codec import from_json, to_json
from .errors import InvalidArgument
from .protocols import LLM_METRICS_EVENT, METRIC_EVENTS, LLMMetricAnnotation


def metrics_item(metrics: LLMMetricAnnotation, event: str = LLM_METRICS_EVENT) -> Annotated[Any]:
    """The item that carries these metrics."""
    return Annotated[Any](event=event, comment=[to_json(metrics).decode()])


def metrics_of(item: Annotated[Any]) -> LLMMetricAnnotation | None:
    """The metrics an item carries, None if its event is another.

    Raises InvalidArgument for a metrics event that does not have exactly one comment with such a record.
    """
    if item.event not in METRIC_EVENTS:
        return None
    comments = item.comment or []
    if len(comments) != 1:
        raise InvalidArgument(f"a metrics event has one comment, found {len(comments)}", field="comment")
    return from_json(comments[0], LLMMetricAnnotation)
