"""Prefilling elsewhere: a prefill worker computes the prompt, a decode worker goes on with its blocks."""

from __future__ import annotations

from .conditional import ConditionalDisaggregation
from .errors import NoDisaggregatedParams, PrefillError, PrefillNotActivated, TopologyError
from .pool import KvPrefill, PrefillPool, PushPrefill
from .router import PrefillRouter, PrefillSettings

__all__ = [
    "ConditionalDisaggregation",
    "KvPrefill",
    "NoDisaggregatedParams",
    "PrefillError",
    "PrefillNotActivated",
    "PrefillPool",
    "PrefillRouter",
    "PrefillSettings",
    "PushPrefill",
    "TopologyError",
]
