"""TraceLink: a span, as others link to it."""

from __future__ import annotations

from attrs import define


@define(slots=True)
class TraceLink:
    """The generate span of the worker before this one: 32 and 16 hex digits. Written by the framework only."""

    trace_id: str
    span_id: str
