"""Spans, trace propagation, metrics, and the Prometheus text format.

What is imported under its own name again is for sibling packages; users take the names of `__all__`.
"""

from .metrics import Buckets, Instrument, Metrics
from .metrics import sanitize_label as sanitize_label
from .metrics import sanitize_name as sanitize_name
from .prometheus import Sample as Sample
from .prometheus import family as family
from .prometheus import merged as merged
from .prometheus import with_labels as with_labels
from .propagation import extract, inject
from .propagation import linked as linked
from .tracing import ENDING as ENDING
from .tracing import REQUEST_ID as REQUEST_ID
from .tracing import UNTRACED as UNTRACED
from .tracing import OpenSpan, Tracer, annotate, link_to, spanned, trace_link, traced
from .tracing import RequestSpan as RequestSpan
from .tracing import TracedEngine as TracedEngine

__all__ = [
    "Buckets",
    "Instrument",
    "Metrics",
    "OpenSpan",
    "Tracer",
    "annotate",
    "extract",
    "inject",
    "link_to",
    "spanned",
    "trace_link",
    "traced",
]
