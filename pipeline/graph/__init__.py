"""Segments: operators and an engine become an engine, printed and drawn."""

from .segment import Chain, LateEngine, Segment, SegmentSink, join, link

__all__ = ["Chain", "LateEngine", "Segment", "SegmentSink", "join", "link"]
