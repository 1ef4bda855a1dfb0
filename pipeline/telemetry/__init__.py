"""Spans, trace propagation, metrics, and the Prometheus text format."""

from .metrics import Buckets, Instrument, Metrics
from .prometheus import Sample, family, merged, with_labels
from .propagation import extract, inject, linked
from .tracing import (
    ENDING,
    REQUEST_ID,
    UNTRACED,
    OpenSpan,
    RequestSpan,
    TracedEngine,
    Tracer,
    annotate,
    link_to,
    spanned,
    trace_link,
    traced,
)

__all__ = [
    "ENDING",
    "REQUEST_ID",
    "UNTRACED",
    "Buckets",
    "Instrument",
    "Metrics",
    "OpenSpan",
    "RequestSpan",
    "Sample",
    "TracedEngine",
    "Tracer",
    "annotate",
    "extract",
    "family",
    "inject",
    "link_to",
    "linked",
    "merged",
    "spanned",
    "trace_link",
    "traced",
    "with_labels",
]
